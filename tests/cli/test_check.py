import json

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.check import MAX_GRIDS
from slipstream.planner.job.file import parse_job
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_job, plan_with
from slipstream.schedules.codec import encode, write
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.table import Table, library
from tests.general import layers_moved
from tests.generate import BROKEN, HEALTHY, by_hand

pytestmark = pytest.mark.usefixtures("counted_steps")


def run(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


@pytest.fixture
def good(tmp_path):
    write(by_hand(BROKEN), tmp_path / "good.json")
    return tmp_path / "good.json"


@pytest.fixture
def bad(tmp_path):
    write(
        by_hand({**HEALTHY, "0.0": HEALTHY["0.0"].replace("W0@4", "W0@5")}), tmp_path / "bad.json"
    )
    return tmp_path / "bad.json"


def test_valid(good):
    done = run(good)
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{good}: valid: 3 workers, period 7 s; it claims to be at most ")
    assert done.stdout.endswith("; --bound verifies that\n")


def test_of_many_violations_the_first_are_drawn_as_the_help_says(tmp_path):
    early = {
        name: line.replace("W0@4", "W0@1").replace("W0@5", "W0@1") for name, line in HEALTHY.items()
    }
    write(by_hand(early), tmp_path / "early.json")
    shown = run(tmp_path / "early.json").stdout
    assert "4 violations" in shown and shown.count("|from 0 s") == MAX_GRIDS == 3
    words = " ".join(run("--help").stdout.split())
    assert "draws the ops around the first three violations of each file" in words


def test_the_bound_of_a_file_is_a_claim_that_can_be_proven(tmp_path):
    (tmp_path / "job.toml").write_text(
        "pipelines = 3\nstages = 4\nmicrobatches = 6\n[time]\nforward = 1\n"
        "backward_input = 1\nbackward_weight = 1\noptimizer = 3\n"
    )
    path = tmp_path / "s.json"
    result = CliRunner().invoke(
        app, ["plan", str(tmp_path / "job.toml"), "--failed", "1.2", "--out", str(path)]
    )
    assert result.exit_code == 0
    assert (
        "claims to be optimal with whole stages in place (bound 30 s); --bound verifies that"
        in run(path).stdout
    )
    assert (
        "its bound, 30 s with whole stages in place, is proven: it is optimal"
        in run(path, "--bound").stdout
    )
    assert json.loads(run(path, "--bound", "--json").stdout)["bounds"] == [
        {
            "file": str(path),
            "scope": "whole stages",
            "claimed": 30.0,
            "proven": 30.0,
            "verified": True,
        }
    ]


def moved_bounds(layers, tmp_path):
    """Claimed and proven bounds of a plan where one of four workers is down.

    The work is that of `layers` layers, 3 ticks for each of 8 micro-batches; to step one takes 2
    ticks.
    """
    stages = (layers - layers // 2, layers // 2)
    each, step = list(stages), [2 * count for count in stages]
    job = parse_job(
        f"pipelines = 2\nstages = 2\nmicrobatches = 4\n[time]\nforward = {each}\n"
        f"backward_input = {each}\n"
        f"backward_weight = {each}\noptimizer = {step}\n[placement]\nlayers = {list(stages)}\n"
    )
    plan = plan_with(PlanOptions(layers="move", method="greedy", time_limit=2), job, [Worker(0, 0)])
    assert any(seat.holds for seat in plan.schedule.seats)
    write(plan.schedule, tmp_path / "s.json")
    done = run(tmp_path / "s.json", "--bound", "--json")
    (bound,) = json.loads(done.stdout)["bounds"]
    return bound["claimed"], bound["proven"], done.exit_code


def test_the_bound_of_moved_layers_counts_the_step_of_one(tmp_path):
    assert moved_bounds(3, tmp_path) == (3 * 24 / 3 + 2, 3 * 24 / 3 + 2, 0)


def test_that_whole_layers_are_run_is_proven_from_the_file(tmp_path):
    """One of three workers runs eleven of 32 layers of micro-batches.

    They are of two layers, both of which it steps.
    """
    assert moved_bounds(4, tmp_path) == (3 * 11 + 2 * 2, 3 * 11 + 2 * 2, 0)


def test_a_file_of_before_proves_what_it_tells(tmp_path):
    """It does not tell what layers take."""
    moved_bounds(4, tmp_path)
    old = json.loads((tmp_path / "s.json").read_text())
    del old["times"]["of_layers"]
    (tmp_path / "s.json").write_text(json.dumps(old))
    done = run(tmp_path / "s.json", "--bound", "--json")
    (bound,) = json.loads(done.stdout)["bounds"]
    assert bound["proven"] == 4 * 24 / 3 + 2 < bound["claimed"] and done.exit_code == 1


def test_a_false_bound_is_found_out(tmp_path):
    """The bound must be proven.

    Nobody can see from a plan of 36 s that there are better ones.
    """
    job = parse_job(
        "pipelines = 3\nstages = 4\nmicrobatches = 6\n[time]\nforward = 1\nbackward_input = 1\n"
        "backward_weight = 1\noptimizer = 3\n"
    )
    schedule, path = plan_job(job, [Worker(1, 2)], method="1f1b").schedule, tmp_path / "s.json"
    write(
        msgspec.structs.replace(
            schedule, lower_bound_ticks=schedule.period_ticks, status="optimal"
        ),
        path,
    )
    assert run(path).exit_code == 0 and "claims to be optimal" in run(path).stdout
    done = run(path, "--bound")
    assert done.exit_code == 1 and "could not be proven; " in done.stdout


def test_violation_with_its_grid(good, bad):
    done = run(good, bad)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[1] == f"{bad}: 1 violation"
    assert lines[2].startswith(
        "  one-at-a-time: I(micro-batch 0.1, stage 0) on 0.0 starts at 5 ticks (2.5 s)"
    )
    assert lines[4] == ">   0.0 |F0---F1---     I0---     I1---W1---A----O----"
    assert lines[5].endswith("^^^^^ I(micro-batch 0.1, stage 0) on 0.0")


def test_json(good, bad):
    assert json.loads(run(good, "--json").stdout) == {"violations": []}
    done = run(good, bad, "--json")
    assert done.exit_code == 1
    (violation,) = json.loads(done.stdout)["violations"]
    assert violation.pop("message").startswith(
        "I(micro-batch 0.1, stage 0) on 0.0 starts at 5 ticks"
    )
    assert violation == {
        "file": str(bad),
        "rule": "one-at-a-time",
        "op": "I",
        "worker": "0.0",
        "stage": 0,
        "layers": [0, 1],
        "pipeline": 0,
        "microbatch": 1,
        "start": 2.5,
    }


def test_a_slice_that_its_worker_does_not_hold(tmp_path):
    """Named by its layers, which are no stage."""
    schedule = layers_moved()
    seats = tuple(replace(seat, holds=seat.holds and ((0, 2), (3, 4))) for seat in schedule.seats)
    write(replace(schedule, seats=seats), tmp_path / "plan.json")
    (violation, *_) = json.loads(run(tmp_path / "plan.json", "--json").stdout)["violations"]
    assert violation["message"] == "worker 1.0 runs A(layer 2), but holds layers 0 to 1, layer 3"
    assert (violation["rule"], violation["stage"], violation["layers"]) == ("closing", None, [2, 3])


def test_json_of_a_violation_without_an_op(tmp_path):
    write(by_hand(HEALTHY, period_ticks=5), tmp_path / "period.json")
    (violation,) = json.loads(run(tmp_path / "period.json", "--json").stdout)["violations"]
    assert (violation["rule"], violation["worker"]) == ("period", "0.0")
    assert violation["op"] is violation["start"] is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff" * 100,
        b"[" * 10**6,
        encode(by_hand(HEALTHY))[:-20],
        encode(by_hand(HEALTHY)).replace(b'"version":2', b'"version":9'),
        encode(by_hand(HEALTHY)).replace(b'"pipelines":2', b'"pipelines":1000000000'),
    ],
)
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_unreadable(tmp_path, data, more):
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    for command in ("check", "show"):
        done = CliRunner().invoke(app, [command, str(path), *more])
        assert done.exit_code == 2
        assert done.stdout == ""
        assert done.stderr.startswith(f"slipstream: {path}: ")
        assert done.stderr.count("\n") == 1


def test_a_job_in_the_place_of_a_schedule_and_the_other_way_round(good, tmp_path):
    """Both are told how to get from the one to the other."""
    (tmp_path / "job.toml").write_text("pipelines = 2\n")
    done = run(tmp_path / "job.toml")
    assert done.exit_code == 2
    assert done.stderr.endswith(
        f"; `slipstream plan {tmp_path / 'job.toml'} --out FILE` makes a schedule of a job\n"
    )
    done = CliRunner().invoke(app, ["plan", str(good)])
    assert done.exit_code == 2 and done.stderr.endswith(
        "; a job file is TOML: `slipstream new` writes one\n"
    )


def test_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "missing.json"):
        done = run(path)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith(
            f"slipstream: {path}: {'a folder, and' if path.is_dir() else 'cannot be read: '}"
        )


# --- Tables, and files of which one is bad --------------------------------------------------------


def test_one_bad_file_does_not_hide_the_verdict_on_the_others(good, bad, tmp_path):
    (tmp_path / "no.json").write_text("{")
    done = run(tmp_path / "no.json", bad, tmp_path / "none.json", good)
    assert (
        done.exit_code == 2
        and f"{bad}: 1 violation" in done.stdout
        and f"{good}: valid" in done.stdout
    )
    assert (
        done.stderr.count("\n") == 2
        and "no.json: " in done.stderr
        and "none.json: cannot be read" in done.stderr
    )
    answer = json.loads(run(tmp_path / "no.json", good, "--json").stdout)
    assert answer["violations"] == [] and [refusal["file"] for refusal in answer["unreadable"]] == [
        str(tmp_path / "no.json")
    ]


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_table_and_its_entries_are_schedules(command, tmp_path):
    table = library("gpt-1.5b")
    keys = [row.key for row in Table.load(table).rows()]
    whole = CliRunner().invoke(app, [command, str(table)])
    assert whole.exit_code == 0, whole.output
    assert whole.stdout.count(": valid: " if command == "check" else "gpt-1.5b: period ") == len(
        keys
    )
    entry = CliRunner().invoke(app, [command, str(table / "entries" / "count-1.json")])
    assert entry.exit_code == 0 and entry.stdout.count("\n") < whole.stdout.count("\n") / 8
    refused = CliRunner().invoke(app, [command, str(tmp_path)])
    assert (
        refused.exit_code == 2
        and "a folder, and not that of a table; expected a schedule's file" in refused.stderr
    )
    (tmp_path / "entries").mkdir()
    for name in ("index.json", "programs.json.gz", "job.toml"):
        (tmp_path / name).write_bytes((table / name).read_bytes())
    broken = CliRunner().invoke(app, [command, str(tmp_path)])
    assert broken.exit_code == 2 and broken.stderr.count("\n") == 1 and "entries" in broken.stderr
