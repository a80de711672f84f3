"""`slipstream lookup` as a user meets it, and `slipstream plan --normalise`."""

import json

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.shared import options as inputs
from slipstream.cli.shared.train_options import TrainRequest
from slipstream.cli.train import look_up_or_plan
from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.job.file import parse_job
from slipstream.planner.options import PlanOptions
from slipstream.planner.recompute import choose_recomputation, with_bound_of_choices
from slipstream.schedules.check import check
from slipstream.schedules.codec import ScheduleError, read
from slipstream.schedules.schedule import Worker
from tests.cli.test_table import JOB

pytestmark = pytest.mark.usefixtures("counted_steps")

DEEP = JOB.replace("stages = 2", "stages = 3").replace("microbatches = 3", "microbatches = 4")


def slipstream(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lookup")
    (folder / "job.toml").write_text(DEEP)
    result = slipstream(
        "table",
        folder / "job.toml",
        "--max-failures",
        "2",
        "--method",
        "greedy",
        "--jobs",
        "1",
        "--out",
        folder / "table",
    )
    assert result.exit_code == 0
    return folder / "table"


def test_a_table_that_is_not_finished_says_how_to_finish_it(tmp_path):
    result = slipstream("lookup", tmp_path, "--failed", "0.0")
    assert (
        result.exit_code == 2
        and "holds no index.json; expected the folder of a table" in result.stderr
    )
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "count-1.json.gz").write_bytes(b"")
    result = slipstream("lookup", tmp_path, "--failed", "0.0")
    assert (
        result.exit_code == 2
        and "1 of its entries are there, and the `slipstream table` command that began it "
        "continues from there"
        in " ".join(result.stderr.split())
    )


def test_a_file_is_no_table(table):
    result = slipstream("lookup", table / "job.toml", "--failed", "0.0")
    assert result.exit_code == 2
    assert (
        result.stderr
        == f"slipstream: {table / 'job.toml'}: a file; expected the folder of a table, as "
        "`slipstream table` writes it\n"
    )


def test_a_schedule_too_large_for_a_file_is_refused(table, tmp_path, monkeypatch):
    def refused(_):
        raise ScheduleError("the schedule is too large for a file")

    monkeypatch.setattr(inputs, "encode", refused)
    result = slipstream("lookup", table, "--failed", "0.0", "--out", tmp_path / "schedule.json")
    assert (result.exit_code, result.stderr) == (
        2,
        "slipstream: --out: the schedule is too large for a file\n",
    )


def test_gives_a_relabelled_schedule(table, tmp_path):
    out = tmp_path / "schedule.json"
    result = slipstream(
        "lookup", table, "--failed", "0.0", "--failed", "1.0", "--normalise", "--out", out, "--json"
    )
    answer = json.loads(result.stdout)
    assert result.exit_code == 0 and (answer["key"], answer["answer"]) == ("count-2", "roles moved")
    assert answer["lookup_seconds"] > 0
    schedule = read(out)
    assert check(schedule) == [] and schedule.failed == (Worker(0, 0), Worker(1, 0))
    assert answer["period"] == schedule.seconds(schedule.period_ticks)
    assert (
        answer["moves"]
        == [{"worker": str(seat.worker), "role": str(seat.role)} for seat in schedule.moves]
        != []
    )


def test_tells_a_reader_who_moves(table):
    result = slipstream("lookup", table, "--failed", "0.0", "--failed", "1.0", "--normalise")
    assert (
        "roles moved, entry count-2" in result.stdout
        and "loads its parameters from a peer" in result.stdout
    )
    assert "every live worker keeps its role" in slipstream("lookup", table).stdout


@pytest.mark.parametrize("worker", ["0.0", "1.1", "2.2"])
def test_the_answer_at_once_to_one_failure_is_in_the_table_and_moves_no_layer(
    table, worker, tmp_path
):
    answers = {}
    for option in ((), ("--normalise",), ("--settled",)):
        result = slipstream(
            "lookup", table, "--failed", worker, *option, "--json", "--out", tmp_path / "now.json"
        )
        answers[option] = answer = json.loads(result.stdout)
        assert result.exit_code == 0 and answer["key"] is not None and not result.stderr
        assert option or (answer["answer"], answer["moves"], answer["layers_moved"]) == (
            "at once",
            [],
            0,
        )
        assert check(read(tmp_path / "now.json")) == []
    assert (
        answers[()]["period"]
        >= answers["--normalise",]["period"]
        >= answers["--settled",]["period"]
    )
    assert answers["--settled",]["answer"] == "settled", "also where whole roles have moved"
    assert any(answer["layers_moved"] for answer in answers.values()) or worker == "2.2"


def test_failures_that_are_in_the_table_only_with_roles_moved_are_planned_in_place(table):
    result = slipstream("lookup", table, "--failed", "0.0", "--failed", "1.0", "--json")
    answer = json.loads(result.stdout)
    assert (answer["key"], answer["answer"], answer["moves"]) == (None, "at once", [])
    assert (
        "0.0, 1.0 down: in the table only with roles moved (--normalise); planning on the spot"
        in result.stderr
    )
    both = slipstream("lookup", table, "--failed", "0.0", "--normalise", "--settled")
    assert both.exit_code == 2 and "take one" in both.stderr


def test_what_is_not_in_the_table_is_planned_on_the_spot(table, tmp_path):
    out = tmp_path / "schedule.json"
    failed = [option for worker in ("0.0", "1.1", "2.2") for option in ("--failed", worker)]
    result = slipstream("lookup", table, *failed, "--out", out, "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0 and answer["key"] is None and answer["moves"] == []
    assert (
        "not in the table, which covers up to 2 failures; planning on the spot with layers in "
        "place (with "
        "layers moved: --settled)" in result.stderr.replace("\n", " ")
    )
    assert check(read(out)) == [] and len(read(out).failed) == 3


def test_what_is_planned_on_the_spot_recomputes_what_the_entries_of_the_table_recompute(tmp_path):
    """Room for less than 2 of 4 micro-batches: the first stage runs its forward again."""
    (tmp_path / "job.toml").write_text(
        JOB.replace("microbatches = 3", "microbatches = 4")
        + """
[placement]
layers = [2, 2]
[memory]
capacity = 1.4
activation = 1
weight_stash = 0.1
recomputed = 0.05
[model]
blocks = 2
[training]
recompute = "auto"
"""
    )
    out = tmp_path / "table"
    result = slipstream(
        "table",
        tmp_path / "job.toml",
        "--max-failures",
        "0",
        "--method",
        "greedy",
        "--jobs",
        "1",
        "--out",
        out,
    )
    assert result.exit_code == 0, result.output
    schedules = []
    for failed in ([], ["--failed", "0.0"]):
        result = slipstream("lookup", out, *failed, "--out", tmp_path / "schedule.json", "--json")
        assert result.exit_code == 0, result.output
        schedules.append(read(tmp_path / "schedule.json"))
    entry, planned = schedules
    assert entry.times == planned.times and entry.memory == planned.memory
    first, second = planned.times.backward_input
    assert first == second + planned.times.forward[0]


def test_bounds_hold_for_any_choice_of_recomputed_stages(tmp_path):
    """Two of three stages run their forward again.

    The bound of this choice alone is longer.
    """
    text = (
        JOB.replace("stages = 2", "stages = 3")
        + """
[placement]
layers = [2, 2, 2]
[memory]
capacity = 1.4
activation = 1
weight_stash = 0.1
recomputed = 0.05
[training]
recompute = "auto"
"""
    )
    (tmp_path / "job.toml").write_text(text)
    planned = ["--method", "greedy", "--steps", "20000"]
    for command in (
        (
            "table",
            tmp_path / "job.toml",
            "--max-failures",
            "0",
            *planned,
            "--jobs",
            "1",
            "--out",
            tmp_path / "table",
        ),
        ("lookup", tmp_path / "table", "--out", tmp_path / "entry.json"),
        ("lookup", tmp_path / "table", "--failed", "0.0", "--out", tmp_path / "planned.json"),
        ("plan", tmp_path / "job.toml", *planned, "--out", tmp_path / "plan.json"),
    ):
        assert slipstream(*command).exit_code == 0
    for name in ("entry", "planned", "plan"):
        schedule = read(tmp_path / f"{name}.json")
        options = PlanOptions(slices=name != "planned")
        honest = with_bound_of_choices(schedule, parse_job(text), options, schedule.failed)
        assert (
            0
            < schedule.lower_bound_ticks
            == honest.lower_bound_ticks
            < proven_bound(schedule).ticks
        ), name
    request = TrainRequest(job=tmp_path / "job.toml", method="greedy")
    job = parse_job(text)
    chosen = choose_recomputation(job, PlanOptions(method="greedy", steps=20_000)).job
    first, _ = look_up_or_plan(request, chosen, (), None, job)
    assert first.lower_bound_ticks < proven_bound(first).ticks


def test_lost_nodes_are_looked_up_by_number(tmp_path):
    (tmp_path / "job.toml").write_text(JOB + "[topology]\nworkers_per_node = 2\n")
    out = tmp_path / "table"
    result = slipstream(
        "table",
        tmp_path / "job.toml",
        "--max-failures",
        "1",
        "--by-node",
        "--method",
        "greedy",
        "--jobs",
        "1",
        "--out",
        out,
    )
    assert result.exit_code == 0 and "nodes down" in result.stdout
    answers = [
        json.loads(slipstream("lookup", out, *down, "--json").stdout)
        for down in (
            ["--failed-node", "1"],
            ["--failed", "1.0", "--failed", "1.1"],
            ["--failed-node", "0", "--failed-node", "2"],
        )
    ]
    assert [answer["key"] for answer in answers] == [
        "pattern-0,1",
        "pattern-0,1",
        "pattern-0,1+0,1",
    ]
    refused = slipstream("lookup", out, "--failed-node", "3")
    assert (
        refused.exit_code == 2
        and "--failed-node 3: expected a node of the job, 0 to 2" in refused.stderr
    )


def test_a_dead_stage_exits_1(table):
    failed = [option for worker in ("0.0", "1.0", "2.0") for option in ("--failed", worker)]
    result = slipstream("lookup", table, *failed)
    assert result.exit_code == 1 and "stage 0 has no live worker" in result.stderr
    assert "up to 2 failures that leave every stage a live worker" in result.stderr.replace(
        "\n", " "
    )


def test_out_is_tried_before_anything_is_planned(table, tmp_path):
    failed = [option for worker in ("0.0", "1.1", "2.2") for option in ("--failed", worker)]
    (tmp_path / "file").write_text("x")
    result = slipstream("lookup", table, *failed, "--out", tmp_path / "file" / "x.json")
    assert (
        result.exit_code == 2
        and "planning" not in result.stderr
        and "cannot be written" in result.stderr
    )


def test_bad_input_exits_2_in_one_line(table, tmp_path):
    for arguments, says in (
        (["nowhere"], "nowhere: no such folder or table; those that come with Slipstream are"),
        ([table, "--failed", "9.9"], "--failed: the job has no worker 9.9"),
        ([table, "--failed", "x"], "'x' is not a worker"),
        ([table, "--out", "/dev/null/x"], "/dev/null/x: cannot be written"),
    ):
        result = slipstream("lookup", *arguments)
        assert result.exit_code == 2 and says in result.stderr and result.stderr.count("\n") == 1
    (table / "job.toml").write_bytes(b"x")
    try:
        failed = [option for worker in ("0.0", "1.1", "2.2") for option in ("--failed", worker)]
        result = slipstream("lookup", table, *failed)
        assert result.exit_code == 2 and "job.toml: not as the index describes it" in result.stderr
    finally:
        (table / "job.toml").write_text(DEEP)


def test_plan_normalise_moves_workers_where_that_is_shorter(tmp_path):
    job, out = tmp_path / "job.toml", tmp_path / "schedule.json"
    job.write_text(DEEP)
    failed = ["--failed", "0.0", "--failed", "1.0", "--method", "greedy"]
    in_place = json.loads(slipstream("plan", job, *failed, "--json").stdout)
    result = slipstream("plan", job, *failed, "--normalise", "--json", "--out", out)
    moved = json.loads(result.stdout)
    assert moved["period"] < in_place["period"] and in_place["moves"] == [] and moved["moves"]
    assert moved["fault_free_period"] == in_place["fault_free_period"] and check(read(out)) == []
    assert "takes over" in slipstream("plan", job, *failed, "--normalise").stdout
