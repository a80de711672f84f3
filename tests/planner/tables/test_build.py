"""Building tables: complete, the same whoever finishes first, and going on where it was stopped."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.job.file import parse_job
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.planner.recompute import with_recomputation
from slipstream.planner.report import Transition
from slipstream.planner.tables.build import (
    WHOLE_TABLE,
    BuiltTable,
    EntryPlanner,
    Share,
    all_tasks,
    basis_of,
    build_share,
    build_table,
)
from slipstream.planner.tables.folder import PARTS, TableFolder, decode_part, encode_part, make_part
from slipstream.planner.tables.taking_over import improve_parts, improve_patterns
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.file import TableError, decode_entry
from slipstream.schedules.tables.pattern import (
    dead_column,
    pattern_key,
    pattern_of,
    pipeline_classes,
)
from slipstream.schedules.tables.table import Table
from tests.patience import SECONDS

JOB = b"""
pipelines = 2
stages = 2
microbatches = 3
[time]
forward = 2
backward_input = 2
backward_weight = 2
optimizer = 1
transfer = 1
[memory]
capacity = 3
"""
OPTIONS = PlanOptions(method="greedy", time_limit=600)
"""Options for processes, whose entries do not depend on the clock.

List schedules end with their steps far sooner than that.
"""
QUICK = PlanOptions(method="greedy", time_limit=0.1)
"""For entries that are planned in this process, by the clock of steps."""

STEPS = 20_000
NOTHING_MOVES = Transition(layers=0, bytes=0.0, seconds=0.0)


def build(folder, *, text=JOB, options=OPTIONS, **more):
    return build_table(
        parse_job(text.decode()), text, folder, options, **{"max_failures": 2, **more}
    )


quick_build = partial(build, options=QUICK)


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def in_this_process(monkeypatch):
    """Entries are planned one after the other, by the clock of steps.

    Plans are real, but there are no processes. Tests without the fixture have them.
    """

    def run_all(plan, tasks, jobs, refusals=(), executor=None):
        yield from ((task, plan(task)) for task in tasks)

    monkeypatch.setattr("slipstream.planner.tables.build.run_all", run_all)


def test_an_entry_that_no_reader_would_take_is_not_written(tmp_path, in_this_process, monkeypatch):
    monkeypatch.setattr("slipstream.schedules.codec.MAX_OPS", 10)
    with pytest.raises(
        TableError, match=r"entry count-2: too large for a table: .* expected at most 10"
    ):
        quick_build(tmp_path)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A table of all counts and patterns of up to two failures."""
    folder = tmp_path_factory.mktemp("exact")
    return folder, build(folder, max_failures=2, exact=True, jobs=2)


def test_every_failure_set_is_found_and_valid(exact):
    folder, _ = exact
    table = Table.load(folder)
    table.verify()
    grid = table.basis.grid
    classes = pipeline_classes(grid, table.basis.times, table.basis.memory)
    for size in range(3):
        for failed in combinations(grid.workers(), size):
            found = table.lookup(failed, roles_move=True)
            if dead_column(failed, grid) is not None:
                assert found is None
                continue
            at_once = table.lookup(failed)
            assert (
                at_once is not None and not at_once.layers_to_load and check(at_once.schedule) == []
            )
            assert found.schedule.period_ticks <= at_once.schedule.period_ticks
            assert (
                found is not None
                and check(found.schedule) == []
                and found.schedule.failed == failed
            )
            pattern = (
                table.checked_schedule(pattern_key(pattern_of(failed, classes), classes))
                if size
                else None
            )
            count = table.checked_schedule(f"count-{size}")
            assert found.schedule.period_ticks == min(
                count.period_ticks, (pattern or count).period_ticks
            )
            assert found.key.startswith("count") or not found.moves
            settled = table.lookup(failed, settled=True)
            assert settled is not None and check(settled.schedule) == []
            assert settled.schedule.period_ticks <= found.schedule.period_ticks
    assert table.lookup(list(grid.workers())[:3]) is None  # three failures are not in the table


def test_rows_say_what_each_entry_gives(exact):
    folder, built = exact
    rows = {row.key: row for row in built.index.entries}
    failures = [1, 2, *[1] * 2, *[2] * 4]
    assert [row.failures for row in built.index.entries] == [0, *failures, *failures]
    assert [row.key for row in built.index.entries][9:12] == [
        "settled-count-1",
        "settled-count-2",
        "settled-pattern-0",
    ]
    for count in range(1, 3):
        at_once, settled = rows[f"count-{count}"], rows[f"settled-count-{count}"]
        assert rows[f"count-{count - 1}"].period <= at_once.period >= settled.period
        assert at_once.layers_moved is None and settled.layers_moved >= 0
    assert rows["count-0"].throughput == 1 and rows["count-2"].fault_scaled == pytest.approx(2 / 4)
    dead = rows["pattern-0+0"]
    assert dead.status == "no plan" and dead.period is None
    assert "stage 0 has no live worker" in dead.reason and dead.sha256 is None
    readable = (folder / "index.md").read_text()
    assert (
        "no plan: stage 0 has no live worker" in readable
        and "pattern-0,1" in readable
        and "50.00%" in readable
    )
    assert "settled s" in readable and "GB to move" in readable and "| settled-" not in readable
    assert built.report() == {
        "entries": 17,
        "seconds": round(built.seconds, 3),
        "worst_gap": built.worst_gap,
        "bytes": sum(len(data) for data in contents(folder).values()),
        "planned": 17,
        "no_plan": 4,
    }


def test_programs_are_stored_once(exact):
    table = Table.load(exact[0])
    texts = [bytes(text) for text in table.program_texts]
    assert (
        len(texts)
        == len(set(texts))
        < sum(len(table.checked_schedule(row.key).seats) for row in table.rows() if row.sha256)
    )


def test_one_process_or_two_the_bytes_are_the_same(tmp_path):
    build(tmp_path / "one", jobs=1)
    build(tmp_path / "two", jobs=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.slow
def test_shares_that_end_together_write_one_table(tmp_path):
    """Shares that end together write the bytes of one process.

    Each is in a process of its own, as on machines with a shared folder.
    """
    whole = tmp_path / "whole"
    build(whole)
    with ProcessPoolExecutor(3) as processes:
        futures = [
            processes.submit(build_one_share, tmp_path / "shares", number) for number in range(3)
        ]
        found = [future.result() for future in futures]
    assert contents(whole) == contents(tmp_path / "shares")
    entries = len(Table.load(whole).rows())
    assert sum(share.planned for share in found) == entries
    assert any(isinstance(share, BuiltTable) for share in found)
    assert all(
        share.finished < share.entries == entries
        for share in found
        if not isinstance(share, BuiltTable)
    )
    assert isinstance(build_one_share(tmp_path / "shares", 1), BuiltTable)


def build_one_share(folder, number):
    return build_share(
        parse_job(JOB.decode()), JOB, folder, OPTIONS, Share(number, 3), max_failures=2
    )


def test_a_share_that_never_ran_is_told_and_the_same_command_publishes(tmp_path, in_this_process):
    """With a larger K, too, where a table is there."""
    for failures in (1, 2):
        for number in (0, 2):
            unfinished = build_share(
                parse_job(JOB.decode()),
                JOB,
                tmp_path,
                QUICK,
                Share(number, 3),
                max_failures=failures,
            )
            assert (
                unfinished.finished < unfinished.entries and not (tmp_path / "index.json").exists()
            )
        built = build_share(
            parse_job(JOB.decode()), JOB, tmp_path, QUICK, Share(1, 3), max_failures=failures
        )
        assert built.index.max_failures == failures and not (tmp_path / PARTS).exists()
        Table.load(tmp_path).verify()


def test_a_share_that_finds_parts_gone_takes_the_table_of_another(
    tmp_path, in_this_process, monkeypatch
):
    # Both have seen all parts; the other one publishes, and removes them, while this one reads.
    publish = TableFolder.publish

    def twice(folder, *arguments, **more):
        monkeypatch.setattr(TableFolder, "publish", publish)
        publish(folder, *arguments, **more)
        return publish(folder, *arguments, **more)

    build_share(parse_job(JOB.decode()), JOB, tmp_path, QUICK, Share(1, 2), max_failures=1)
    monkeypatch.setattr(TableFolder, "publish", twice)
    built = build_share(parse_job(JOB.decode()), JOB, tmp_path, QUICK, Share(0, 2), max_failures=1)
    assert isinstance(built, BuiltTable)


@pytest.mark.parametrize("text", ["3", "3/3", "-1/3", "1/0", "a/b", "1/3/4", ""])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a share; expected I/N, with I from 0 to N - 1"):
        Share.parse(text)


def test_a_larger_table_keeps_what_is_there(tmp_path, in_this_process):
    quick_build(tmp_path / "table", max_failures=1)
    assert quick_build(tmp_path / "table", max_failures=1).planned == 0
    assert quick_build(tmp_path / "table", max_failures=2).planned == 2  # at once, and settled
    quick_build(tmp_path / "whole", max_failures=2)
    assert contents(tmp_path / "table") == contents(tmp_path / "whole")
    # And a smaller one drops the rest.
    assert quick_build(tmp_path / "table", max_failures=1).planned == 0
    assert Table.load(tmp_path / "table").lookup([Worker(0, 0), Worker(1, 1)]) is None
    assert len(list((tmp_path / "table" / "entries").iterdir())) == 5
    assert quick_build(tmp_path / "table", max_failures=1, settled=False).planned == 0
    assert len(list((tmp_path / "table" / "entries").iterdir())) == 4


BUILD = """
import os, signal, sys
from pathlib import Path
from tests.planner.tables.test_build import build

def kill(done, total):
    if done == 4:
        os.kill(os.getpid(), signal.SIGKILL)

build(Path(sys.argv[1]), max_failures=2, exact=True, progress=kill)
"""


def killed_halfway(folder):
    """A build in a process of its own, killed when some entries are there."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))
    }
    done = subprocess.run(
        [sys.executable, "-c", BUILD, folder],
        env=environment,
        stderr=subprocess.DEVNULL,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_build_goes_on_where_it_stopped(exact, tmp_path):
    killed_halfway(tmp_path)
    kept = {path.name: path.read_bytes() for path in (tmp_path / PARTS).glob("*.gz")}
    assert len(kept) == 4
    with pytest.raises(TableError, match=r"index\.json: cannot be read"):
        Table.load(tmp_path)
    assert build(tmp_path, max_failures=2, exact=True).planned == 13
    assert contents(tmp_path) == contents(exact[0])


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (JOB.replace(b"forward = 2", b"forward = 4"), OPTIONS, "its times differ"),
        (
            JOB,
            msgspec.structs.replace(OPTIONS, method="cp-sat"),
            "its method is greedy, not cp-sat",
        ),
        (
            JOB,
            msgspec.structs.replace(OPTIONS, backward="fused"),
            "its backward is split, not fused",
        ),
        (
            JOB,
            msgspec.structs.replace(OPTIONS, time_limit=3.0),
            r"its time_limit is 600\.0, not 3\.0",
        ),
    ],
)
def test_another_job_or_other_options_are_refused(exact, tmp_path, text, options, says):
    with pytest.raises(TableError, match=f"index.json: has another job or other options: {says}"):
        build(exact[0], text=text, options=options)
    job = parse_job(JOB.decode())
    task = all_tasks(job, 1, exact=False)[1]
    part = EntryPlanner(job, OPTIONS, basis_of(job, OPTIONS))(task)
    (tmp_path / PARTS).mkdir()
    (tmp_path / PARTS / "count-1.json.gz").write_bytes(encode_part(part))
    with pytest.raises(
        TableError, match=f"count-1.json.gz: has another job or other options: {says}"
    ):
        build(tmp_path, text=text, options=options)


def test_a_damaged_part_is_refused(tmp_path):
    job = parse_job(JOB.decode())
    part = EntryPlanner(job, OPTIONS, basis_of(job, OPTIONS))(all_tasks(job, 1, exact=False)[1])
    data = encode_part(part)
    assert decode_part(data, "part") == msgspec.structs.replace(
        part, sha256=decode_part(data, "part").sha256
    )
    file = tmp_path / PARTS / "count-1.json.gz"
    file.parent.mkdir()
    forged = msgspec.structs.replace(
        part, entry=msgspec.structs.replace(part.entry, period_ticks=1)
    )
    for damaged, says in (
        (data[:-20], "truncated"),
        (b"x" + data, "not readable as gzip"),
        (encode_with(forged, decode_part(data, "part").sha256), "its digest does not match"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(TableError, match=f"count-1.json.gz: .*{says}"):
            build(tmp_path)
    file.write_bytes(data)
    file.rename(file.with_name("count-2.json.gz"))
    with pytest.raises(TableError, match=r"count-2\.json\.gz: holds entry 'count-1'"):
        build(tmp_path)


def encode_with(part, sha256):
    from slipstream.schedules.tables.file import compress

    return compress(msgspec.json.encode(msgspec.structs.replace(part, sha256=sha256)))


def test_too_many_patterns_are_refused_at_once():
    job = parse_job(JOB.replace(b"stages = 2", b"stages = 60").decode())
    with pytest.raises(TableError, match="more than 20000 patterns of up to 5 failures"):
        all_tasks(job, 5, exact=True)
    with pytest.raises(TableError, match="the job has only 4 workers"):
        all_tasks(parse_job(JOB.decode()), 5, exact=False)


THREE = JOB[: JOB.index(b"[memory]")].replace(b"pipelines = 2", b"pipelines = 3")
CROSSED = b'[topology]\nnode = [["0.0", "1.1"], ["0.1", "2.0"], ["1.0", "2.1"]]\n'


@pytest.mark.parametrize("exact", [False, True])
def test_one_and_two_nodes_lost_are_found_and_equal_ones_planned_once(
    tmp_path, exact, in_this_process
):
    text = THREE + CROSSED
    built = quick_build(tmp_path, text=text, max_failures=2, by_node=True, exact=exact)
    table = Table.load(tmp_path)
    nodes, basis = parse_job(text.decode()).nodes, table.basis
    classes = pipeline_classes(basis.grid, basis.times, basis.memory)
    of_nodes = {row.key: row.nodes for row in built.index.entries if row.nodes}
    assert of_nodes == {
        f"{settled}pattern-{key}": sets
        for settled in ("", "settled-")
        for key, sets in (("0+1", ((0,), (1,), (2,))), ("0+0,1+1", ((0, 1), (0, 2), (1, 2))))
    }
    for lost in (1, 2):
        for chosen in combinations(range(3), lost):
            down = {worker for number in chosen for worker in nodes[number]}
            key = pattern_key(pattern_of(down, classes), classes)
            assert chosen in of_nodes[key]
            found = table.lookup(down)
            assert (
                found is not None
                and check(found.schedule) == []
                and set(found.schedule.failed) == down
            )
            assert found.schedule.period_ticks <= table.checked_schedule(key).period_ticks
            if lost == 2:  # more failures than are planned by their number: only by node
                assert found.key == key and not found.moves
                settled = table.lookup(down, settled=True)
                assert (
                    settled is not None
                    and settled.schedule.period_ticks <= found.schedule.period_ticks
                )
    lines = (tmp_path / "index.md").read_text().splitlines()
    cells = {
        line.split("|")[-2].strip(): line.split("|")[-3].strip()
        for line in lines
        if line.startswith("| ")
    }
    assert cells["key"] == "nodes down" and cells["count-1"] == "-"
    assert (cells["pattern-0+1"], cells["pattern-0+0,1+1"]) == ("0 1 2", "0+1 0+2 1+2")


def test_a_table_by_node_is_added_to_one_without_and_taken_back(tmp_path, in_this_process):
    text = THREE + CROSSED
    before = quick_build(tmp_path, text=text, exact=True)
    plain = contents(tmp_path)
    with_nodes = quick_build(tmp_path, text=text, exact=True, by_node=True)
    old = {row.key for row in before.index.entries}
    new = {row.key for row in with_nodes.index.entries} - old
    assert new == {"pattern-0+0,1+1", "settled-pattern-0+0,1+1", "count-4", "settled-count-4"}, (
        "two nodes lost, in place and with roles moved, at once and settled; one node is a "
        "pattern of two failures"
    )
    assert with_nodes.planned == 4
    assert quick_build(tmp_path, text=text, exact=True, by_node=True).planned == 0
    assert len(with_nodes.index.entries) == len(before.index.entries) + 4
    assert quick_build(tmp_path, text=text, exact=True).planned == 0 and contents(tmp_path) == plain


def test_roles_move_where_a_lost_node_has_several_workers_of_one_stage(tmp_path, in_this_process):
    """Without the option, more failures than --max-failures are found in place, if at all."""
    text = THREE + b'[topology]\nnode = [["0.0", "1.0"], ["0.1", "1.1"], ["2.0", "2.1"]]\n'
    quick_build(tmp_path, text=text, max_failures=1, by_node=True)
    table, lost = Table.load(tmp_path), {Worker(0, 0), Worker(1, 0)}
    assert table.lookup(lost).key == "pattern-0+0"
    found = table.lookup(lost, roles_move=True)
    assert found.key == "count-2" and len(found.moves) == 1 and check(found.schedule) == []
    assert found.schedule.period_ticks < table.checked_schedule("pattern-0+0").period_ticks


def test_a_lost_node_with_all_of_a_stage_has_an_entry_for_those_who_get_its_layers_elsewhere(
    tmp_path, in_this_process
):
    text = THREE + b'[topology]\nnode = [["0.0", "1.0", "2.0"], ["0.1", "1.1", "2.1"]]\n'
    quick_build(tmp_path, text=text, max_failures=0, by_node=True, settled=False)
    table, lost = Table.load(tmp_path), {Worker(pipeline, 0) for pipeline in range(3)}
    assert table.lookup(lost) is None
    found = table.lookup(lost, held_elsewhere=True)
    assert (
        found.key == "count-3"
        and check(found.schedule) == []
        and set(found.schedule.failed) == lost
    )
    assert {seat.role.column for seat in found.schedule.seats} == {0, 1} and found.moves


def test_nodes_that_hold_all_of_a_stage_have_no_plan(tmp_path, in_this_process):
    text = JOB + b'[topology]\nnode = [["0.0", "1.0"], ["0.1", "1.1"]]\n'
    built = quick_build(tmp_path, text=text, max_failures=0, by_node=True, settled=False)
    rows = {row.nodes: row for row in built.index.entries if row.nodes}
    assert set(rows) == {((0,),), ((1,),), ((0, 1),)} and all(row.reason for row in rows.values())


def test_what_cannot_be_planned_by_node_is_refused_at_once():
    with pytest.raises(
        TableError, match="--by-node: the job file does not say which workers share a node; add "
    ):
        all_tasks(parse_job(JOB.decode()), 1, exact=False, by_node=True)
    many = JOB.replace(b"stages = 2", b"stages = 101") + b"[topology]\nworkers_per_node = 1\n"
    with pytest.raises(
        TableError, match="one or two of 202 nodes can be lost in 20503 ways; at most 20000"
    ):
        all_tasks(parse_job(many.decode()), 1, exact=False, by_node=True)


SLOW = JOB.replace(b"pipelines = 2", b"pipelines = 3").replace(
    b"[memory]", b'slow = {"0.1" = 2, "1.0" = 3}\n[memory]'
)


def test_where_a_slow_worker_is_down_nobody_plays_its_role_at_its_pace(tmp_path, in_this_process):
    quick_build(tmp_path, text=SLOW)
    table = Table.load(tmp_path)
    table.verify()
    job = parse_job(SLOW.decode())
    shorter = 0
    for failed in (
        down for size in (1, 2) for down in combinations(table.basis.grid.workers(), size)
    ):
        for settled in (False, True):
            found = table.lookup(failed, settled=settled, roles_move=not settled)
            assert (
                found is not None
                and check(found.schedule) == []
                and found.schedule.failed == failed
            )
            count = table.checked_schedule(f"count-{len(failed)}")
            assert found.schedule.seconds(found.schedule.period_ticks) <= count.seconds(
                count.period_ticks
            )
            shorter += found.key.startswith(f"count-{len(failed)}-with-")
    assert shorter
    found = {table.lookup([worker], roles_move=True).key for worker, _ in job.time.slow}
    assert found == {"count-1-with-0.1", "roles-pattern-1:0"}, (
        "another slow worker leaves its role when 1.0 is down"
    )


def test_too_many_slow_workers_are_refused_at_once():
    slow = ", ".join(f'"{pipeline}.0" = 2' for pipeline in range(300))
    job = parse_job(
        JOB.decode()
        .replace("pipelines = 2", "pipelines = 400")
        .replace("[memory]", f"slow = {{{slow}}}\n[memory]")
    )
    with pytest.raises(
        TableError, match=r"more than 20000 entries with one of 300 slow workers .* lower it"
    ):
        all_tasks(job, 100, exact=False)


def test_index_is_json_that_anything_can_read(exact):
    index = json.loads((exact[0] / "index.json").read_text())
    assert index["format"] == "slipstream.table" and index["entries"][1]["key"] == "count-1"
    assert (exact[0] / "job.toml").read_bytes() == JOB


def test_entries_that_run_at_once_cut_micro_batches_where_that_is_faster(tmp_path, in_this_process):
    """Two workers that are left of a stage run 15 micro-batches cut by layers.

    Whole, one runs 8; cut, each runs 7 and a half.

    No layer moves for it, and whoever really failed, the entry fits.
    """
    text = b"""
pipelines = 3
stages = 2
microbatches = 5
[placement]
layers = [4, 4]
[time]
forward = 2
backward_input = 2
backward_weight = 2
optimizer = 1
transfer = 1
"""
    quick_build(tmp_path / "table", text=text, max_failures=1, settled=False)
    table = Table.load(tmp_path / "table")
    whole = plan_only(
        msgspec.structs.replace(OPTIONS, slices=False), parse_job(text.decode()), [Worker(0, 1)]
    ).schedule
    for failed in table.basis.grid.workers():
        schedule = table.lookup([failed]).schedule
        assert (
            check(schedule) == []
            and schedule.slices
            and all(seat.holds is None for seat in schedule.seats)
        )
        assert schedule.seconds(schedule.period_ticks) < whole.seconds(whole.period_ticks)


def test_a_number_of_failures_is_never_slower_than_a_pattern_of_as_many():
    """The roles of a number of failures may be vacant where a pattern has them."""
    job = parse_job(JOB.replace(b"microbatches = 3", b"microbatches = 6").decode())
    basis = basis_of(job, QUICK)

    def part(key, failed, **options):
        asked = PlanOptions(backward="split", optimizer="staggered", **options)
        return make_part(
            basis,
            key,
            plan_only(asked, job, failed).schedule,
            NOTHING_MOVES if key.startswith("settled") else None,
        )

    poor, good = {"method": "1f1b"}, {"method": "greedy", "steps": 200_000}
    first, second = [Worker(0, 0)], [Worker(0, 1)]
    parts = {
        "count-0": part("count-0", [], **good),
        "count-1": part("count-1", first, **poor),
        "pattern-1": part("pattern-1", second, **good),
        "settled-count-1": part("settled-count-1", first, **poor),
        "settled-pattern-1": part("settled-pattern-1", second, **poor),
    }
    assert parts["pattern-1"].entry.period_ticks < min(
        parts[key].entry.period_ticks for key in ("count-1", "settled-count-1", "settled-pattern-1")
    )
    better = parts | improve_parts(parts, 1, patterns=["pattern-1"])
    better |= improve_patterns(better, ["pattern-1"], job)
    assert len({better[key].entry.period_ticks for key in parts if key != "count-0"}) == 1
    for changed in better.values():
        schedule = decode_entry(changed.entry, changed.basis, changed.programs)
        assert check(schedule) == [] and proven_bound(schedule).ticks >= schedule.lower_bound_ticks


def test_a_plan_of_more_failures_keeps_no_bound_of_other_vacant_roles():
    """A bound with layers in place was that of the entry whose plan was replaced."""
    text = JOB.replace(b"pipelines = 2", b"pipelines = 3").replace(b"transfer = 1", b"transfer = 0")
    text = text.replace(b"capacity = 3", b"capacity = 9").replace(
        b"backward_input = 2", b"backward_input = [0, 2]"
    )
    text = text.replace(b"forward = 2", b"forward = [1, 6]")
    job = parse_job(text.decode())
    basis = basis_of(job, QUICK)
    in_place = make_part(
        basis,
        "count-1",
        plan_only(PlanOptions(method="greedy", steps=1), job, [Worker(0, 1)]).schedule,
    )
    more = make_part(
        basis,
        "count-2",
        plan_only(
            PlanOptions(method="greedy", steps=100_000), job, [Worker(0, 0), Worker(1, 0)]
        ).schedule,
    )
    better = improve_parts({"count-1": in_place, "count-2": more}, 1)["count-1"]
    schedule = decode_entry(better.entry, better.basis, better.programs)
    optimum = plan_only(PlanOptions(steps=400_000), job, schedule.failed).schedule
    assert (
        schedule.failed != (Worker(0, 1),)
        and in_place.entry.lower_bound_ticks > optimum.period_ticks
    )
    assert schedule.lower_bound_ticks <= optimum.period_ticks


def test_bounds_of_a_table_hold_for_every_choice_of_recomputed_stages(tmp_path, in_this_process):
    """The planner may have chosen one that is not the best."""
    text = JOB.replace(b"backward_weight = 2", b"backward_weight = [1, 2]").replace(
        b"capacity = 3",
        b"capacity = 4\nactivation = 1\nweight_stash = 1\nrecomputed = 0.5\n"
        b"[training]\nrecompute = 'auto'",
    )
    job = parse_job(text.decode())
    chosen = with_recomputation(job, (0, 1))
    built = build_share(
        chosen, text, tmp_path, QUICK, WHOLE_TABLE, max_failures=1, exact=True, base_job=job
    )
    for row in built.index.entries:
        if row.period is not None:
            layers = "move" if row.key.startswith("settled") else "fixed"
            other = plan_only(
                msgspec.structs.replace(QUICK, layers=layers, steps=STEPS), job, row.failed
            )
            assert 0 < row.lower_bound <= other.period < row.period, row.key
