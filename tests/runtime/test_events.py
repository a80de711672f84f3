"""docs/formats.md describes what real runs leave.

It is in events.jsonl and losses.jsonl.
"""

import json
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from slipstream.runtime.checkpoints.checkpoint import open_latest
from slipstream.runtime.events import AnyEvent, Event, Iteration, decode_event, decode_iteration
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.protocol.failure_injection import Injection
from slipstream.schedules.codec import read
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import against, planned
from tests.runtime.forked import own_fork_server
from tests.runtime.pacing import UntilBack
from tests.runtime.running import metrics_in, schedule_for, tiny

JOB = grid(2, 2, 2)
LOST = Worker(0, 1)
COMMON = [field.name for field in msgspec.structs.fields(Event)]


def described():
    """The fields of each kind, as docs/formats.md has them."""
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \|",
        text.partition("## Events")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
    return {kind: re.findall(r"`(\w+)`", fields) for kind, fields in rows if kind != "event"}


def fields(kind):
    return [field.name for field in msgspec.structs.fields(kind) if field.name not in COMMON]


def lines(out, name="events.jsonl"):
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run that loses a worker and gets it back.

    It is then started again from its checkpoint.
    """
    out, back = tmp_path_factory.mktemp("run"), (Return(LOST, 7),)
    pace = UntilBack(back)
    with own_fork_server() as fork_server:
        result = run(
            schedule_for(JOB),
            tiny(),
            out=out,
            iterations=40,
            fork_server=fork_server,
            progress=pace.progress,
            options=RunOptions(notify=pace.notify),
            resilience=against(
                [Injection(LOST, 5, 2)], scheduler=planned(JOB), checkpoint_every=20, returns=back
            ),
        )
        assert [recovery.live for recovery in result.recoveries] == [3, 4]
        run(
            schedule_for(JOB),
            tiny(),
            out=out,
            iterations=43,
            fork_server=fork_server,
            resilience=Resilience(resume=open_latest(out / "checkpoints")),
        )
    return out


def test_the_documentation_describes_every_kind_with_its_fields():
    kinds = {kind.__struct_config__.tag: fields(kind) for kind in get_args(AnyEvent)}
    assert described() == kinds
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    line = re.search(r"`losses.jsonl` \|.*?`(\{.*?\})`", text)
    assert line and list(json.loads(line[1])) == [
        field.name for field in msgspec.structs.fields(Iteration)
    ]


def test_every_line_of_a_run_is_as_described(folder):
    kinds = described()
    for line in lines(folder):
        assert list(line) == ["event", *COMMON, *kinds[line["event"]]], line
    for line in (folder / "events.jsonl").read_bytes().splitlines():
        decode_event(line)
    for line in (folder / "losses.jsonl").read_bytes().splitlines():
        decode_iteration(line)


def test_what_happened_is_told_in_its_order(folder):
    # Of a core that others use, too, or a file system that is slow.
    machine = ("slowed", "recovered", "noted")
    events = [
        line
        for line in lines(folder)
        if line["event"] not in ("plan_asked", "plan_answered", "fetch_progressed", *machine)
    ]
    kinds = [line["event"] for line in events]
    back = ["fetch_begun", "handed_over", "joined", "order_given", "resumed"]
    checkpoints = [line["checkpoint"] for line in events if line["event"] == "checkpoint_written"]
    assert checkpoints == [20, 40]
    assert [kind for kind in kinds if kind != "checkpoint_written"] == [
        "started",
        "order_given",
        "failed",
        "order_given",
        "resumed",
        *back,
        "finished",
        "started",
        "order_given",
        "finished",
    ]
    orders = [line for line in events if line["event"] == "order_given"]
    assert [(line["phase"], line["live"]) for line in orders] == [
        ("whole", 4),
        ("at once", 3),
        ("whole", 4),
        ("whole", 4),
    ]
    failed = events[kinds.index("failed")]
    # Iteration 4 where a peer had not yet reported it when the lost worker, which ran ahead, died.
    assert (
        failed["worker"] == list(LOST)
        and failed["iteration"] in (4, 5)
        and "SIGKILL" in failed["reason"]
    )
    assert [line["iteration"] for line in events if line["event"] == "started"] == [0, 40]
    assert [line["iteration"] for line in events if line["event"] == "finished"] == [40, 43]
    answers = [line for line in lines(folder) if line["event"] == "plan_answered"]
    assert answers[0]["down"] == [list(LOST)] and answers[0]["error"] is None


def test_times_grow_and_agree_with_those_of_the_iterations(folder):
    events, iterations = lines(folder), lines(folder, "losses.jsonl")
    assert [line["iteration"] for line in iterations] == list(range(43))
    for file_lines in (events, iterations):
        times = [line["time"] for line in file_lines]
        assert times == sorted(times)
    starts = [index for index, line in enumerate(events) if line["event"] == "started"]
    first, second = (events[index] for index in starts)
    assert second["seconds"] < second["time"] - first["time"], "they count from each start"
    for index, line in enumerate(events):
        start = events[max(start for start in starts if start <= index)]
        assert abs((line["time"] - start["time"]) - (line["seconds"] - start["seconds"])) < 0.002
    failed = next(line for line in events if line["event"] == "failed")
    at = failed["iteration"]
    assert iterations[at - 1]["time"] <= failed["time"] <= iterations[at]["time"]
    assert all(0 < line["period"] < 60 for line in iterations)


def test_metrics_are_told_of_each_iteration(folder):
    metrics = metrics_in(folder)
    times = [line["time"] for line in lines(folder, "losses.jsonl")]
    assert [line.time for line in metrics] == times
    assert {(line.phase, line.live) for line in metrics} == {("whole", 4), ("at once", 3)}
    at = next(line["iteration"] for line in lines(folder) if line["event"] == "resumed")
    assert [metrics[iteration].recoveries for iteration in (at - 1, at, 39, 42)] == [0, 1, 2, 2]
    assert all(
        line.gradient_norm > 0 and line.tokens_per_second > 0 and line.mfu is None
        for line in metrics
    )
    assert {line.learning_rate for line in metrics} == {tiny().training.learning_rate}
    seconds = metrics[20].time - metrics[19].time
    assert metrics[20].tokens_per_second == pytest.approx(
        sum(JOB.microbatches) * 16 / seconds, abs=0.01
    )


def test_each_schedule_is_there_once_by_the_digest_that_orders_name(folder):
    orders = [line for line in lines(folder) if line["event"] == "order_given"]
    digests = {line["schedule"] for line in orders}
    assert {path.stem for path in (folder / "schedules").iterdir()} == digests and len(digests) == 2
    for line in orders:
        schedule = read(folder / "schedules" / f"{line['schedule']}.json")
        assert len(schedule.seats) == line["live"]
        assert schedule.seconds(schedule.period_ticks) == pytest.approx(line["planned_period"])
