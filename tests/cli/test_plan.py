"""`slipstream plan` as a user meets it."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer import Exit
from typer.testing import CliRunner

from slipstream.cli import plan as plan_command
from slipstream.cli.app import app
from slipstream.cli.shared.plan_summary import answer_lines
from slipstream.planner.job.file import read_job
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_with
from slipstream.planner.recompute import choose_recomputation
from slipstream.planner.reference import FaultFree
from slipstream.planner.report import Alternative
from slipstream.schedules.check import check
from slipstream.schedules.codec import read
from slipstream.schedules.schedule import Worker
from tests.patience import SECONDS

pytestmark = pytest.mark.usefixtures("counted_steps")

JOB = """
pipelines = 3
stages = 4
microbatches = 6
[time]
forward = 1
backward_input = 1
backward_weight = 1
optimizer = 3
"""
HARD = (
    JOB.replace("pipelines = 3", "pipelines = 4")
    .replace("= 6", "= 16")
    .replace("stages = 4", "stages = 8")
    + "[memory]\ncapacity = 8\nweight_stash = 1\n"
)
FOLDED = HARD + "[placement]\norder = 'v'\nchunks = 2\n"
"""A job whose plans do not reach their bound."""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def slipstream(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("microbatches", "says"), [(1, "1 micro-batch run re-"), (2, "2 micro-batch runs re-")]
)
def test_what_is_re_routed_is_counted_in_words(tmp_path, microbatches, says):
    (tmp_path / "job.toml").write_text(
        JOB.replace("microbatches = 6", f"microbatches = {microbatches}")
    )
    result = CliRunner().invoke(
        app, ["plan", str(tmp_path / "job.toml"), "--failed", "1.2", "--method", "greedy"]
    )
    assert f"1.2 down: {says}" in result.stdout


def test_json_has_the_stable_keys(job, tmp_path):
    result = slipstream("plan", job, "--failed", "1.2", "--json", "--out", tmp_path / "s.json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0 and set(answer) >= {
        "period",
        "lower_bound",
        "gap",
        "status",
        "solve_seconds",
        "fault_free_period",
        "rerouted",
        "peak_memory",
        "moves",
        "work_bound",
        "holds",
        "layers_moved",
        "bytes_moved",
        "seconds_to_move",
        "fixed_period",
        "pays_after_iterations",
        "shed",
    }
    assert (answer["period"], answer["lower_bound"], answer["gap"], answer["status"]) == (
        30,
        30,
        0,
        "optimal",
    )
    assert (answer["fault_free_period"], answer["rerouted"], answer["moves"]) == (22, 6, [])
    assert check(read(tmp_path / "s.json")) == []


def test_prints_a_timeline_and_what_it_means(job):
    result = slipstream("plan", job, "--failed", "1.2")
    assert "1.2  ╳ down" in result.stdout and "period 30 s, proven optimal" in result.stdout
    assert "11 of 12 workers" in result.stdout


def test_methods_and_modes(job):
    for arguments, period in (
        (["--method", "1f1b"], 30),
        (["--method", "greedy"], 22),
        (["--failed", "1.2", "--optimizer", "synchronous"], 32),
    ):
        assert json.loads(slipstream("plan", job, "--json", *arguments).stdout)["period"] == period


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--failed", "9.9"], "--failed: the job has no worker 9.9"),
        (["--failed", "x"], "'x' is not a worker: write PIPELINE.STAGE"),
        (["--failed", "node3"], "; all workers of node N: --failed-node N"),
        (["--backward", "both"], "--backward both: expected split or fused"),
        (["--optimizer", "lazy"], "--optimizer lazy: expected staggered or synchronous"),
        (["--method", "magic"], "--method magic: expected cp-sat or greedy or 1f1b"),
        (
            ["--failed-node", "0"],
            "--failed-node: the job file does not say which workers share a node; add [topology]",
        ),
        (["--out", "/dev/null/s.json"], "/dev/null/s.json: cannot be written"),
        (["--time-limit", "-1"], "--time-limit"),
        (["--layers", "moves"], "--layers moves: expected fixed or move; did you mean 'move'?"),
        (
            ["--layers", "move", "--normalise"],
            "--normalise moves whole roles, --layers move any layers: take one",
        ),
        (["--from-checkpoint"], "--from-checkpoint: only with --layers move"),
        (["--bandwidth", "0"], "--bandwidth"),
    ],
)
def test_bad_options_exit_2(job, arguments, says):
    result = slipstream("plan", job, *arguments)
    assert result.exit_code == 2 and says in result.stderr and "Traceback" not in result.stderr


def test_what_steers_the_search_is_read_and_what_it_tried_is_told(tmp_path):
    job, params, out = (tmp_path / name for name in ("job.toml", "params.toml", "plan.json"))
    job.write_text(FOLDED)
    params.write_text("[annealing]\ntrade = 0.0\n")
    arguments = (
        "plan",
        job,
        "--failed",
        "1.2",
        "--steps",
        50_000,
        "--params",
        params,
        "--out",
        out,
    )
    said = slipstream(*arguments, "--verbose").stdout
    assert re.search(r"0 +0 +annealing: trade units", said) is None
    assert re.search(r"[1-9][\d,]* +\d+ +annealing: exchange runs of ops", said)
    assert "by list schedules, annealing" in said and "until the steps are made" in said
    first = out.read_bytes()
    assert "annealing:" not in slipstream(*arguments).stdout and out.read_bytes() == first
    assert "list schedules, annealing" in read(out).method
    params.write_text("[annealing]\nheat = 1\n")
    refused = slipstream(*arguments)
    assert (
        refused.exit_code == 2
        and "params.toml: Object contains unknown field `heat`" in refused.stderr
    )


def test_all_workers_of_a_failed_node_are_down(tmp_path):
    path, out = tmp_path / "job.toml", tmp_path / "plan.json"
    path.write_text(JOB + "[topology]\nworkers_per_node = 2\n")
    arguments = (
        "plan",
        path,
        "--method",
        "greedy",
        "--failed",
        "0.0",
        "--failed-node",
        "5",
        "--failed-node",
        "2",
    )
    assert slipstream(*arguments, "--out", out).exit_code == 0
    assert list(map(str, read(out).failed)) == ["0.0", "1.0", "1.1", "2.2", "2.3"]
    result = slipstream("plan", path, "--failed-node", "6")
    assert (
        result.exit_code == 2
        and "--failed-node 6: expected a node of the job, 0 to 5" in result.stderr
    )


def test_a_bad_job_exits_2_in_one_line(tmp_path):
    (tmp_path / "job.toml").write_text(JOB.replace("stages", "stagess"))
    result = slipstream("plan", tmp_path / "job.toml")
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert "key 'stages' is missing" in result.stderr


@pytest.mark.parametrize(
    "command", [("plan",), ("table", "--max-failures", "1", "--out", "table"), ("simulate",)]
)
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("training.foo=3", "unknown key training.foo"),
        ("training.batch=0", "training.batch is 0"),
        ("model.widht=8", "unknown key model.widht; did you mean model.width?"),
    ],
)
def test_what_a_run_would_refuse_exits_2_before_anything_is_planned(job, command, setting, says):
    result = CliRunner().invoke(app, [command[0], str(job), *command[1:], "--set", setting])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{job}: {says}" in result.stderr and len(result.stderr.splitlines()) == 1


def test_no_plan_exits_1_with_the_reason(job, tmp_path):
    out = tmp_path / "s.json"
    result = slipstream(
        "plan", job, "--failed", "0.1", "--failed", "1.1", "--failed", "2.1", "--out", out
    )
    assert (
        result.exit_code == 1 and "stage 1 has no live worker" in result.stderr and not out.exists()
    )
    assert "--from-checkpoint" in result.stderr
    lost = ["--failed", "0.1", "--failed", "1.1", "--failed", "2.1", "--layers", "move"]
    assert "no live worker holds layer 1; `slipstream plan" in slipstream("plan", job, *lost).stderr
    said = slipstream("plan", job, *lost, "--from-checkpoint", "--method", "greedy").stdout
    assert "period" in said and "drop" not in said


TIGHT = """[memory]
capacity = 1.6
activation = 1
weight_stash = 0.1
recomputed = 0.05
[placement]
layers = 4
"""


@pytest.mark.slow
def test_what_is_computed_again_where_memory_is_tight(tmp_path):
    """The job file chooses what is computed again.

    Where it leaves no choice to the planner, the answer says what that would give.
    """
    plain, auto = tmp_path / "plain.toml", tmp_path / "auto.toml"
    plain.write_text(JOB + TIGHT)
    auto.write_text(JOB + TIGHT + "[training]\nrecompute = 'auto'\n")
    answer = json.loads(
        slipstream(
            "plan", auto, "--method", "greedy", "--json", "--out", tmp_path / "s.json"
        ).stdout
    )
    assert (
        answer["recomputed_stages"]
        and answer["quick_period"] < answer["quick_period_without_recomputation"]
    )
    without = json.loads(slipstream("plan", plain, "--method", "greedy", "--json").stdout)
    assert answer["period"] < without["period"] and without["recomputed_stages"] is None
    schedule = read(tmp_path / "s.json")
    assert check(schedule) == [] and schedule.memory.capacity[0] < schedule.memory.capacity[3]
    said = " ".join(
        slipstream("plan", auto, "--method", "greedy", "--failed", "1.2").stdout.split()
    )
    assert re.search(
        r"stages [\d,-]+ compute their activations again: by quick plans with all workers "
        r"alive the "
        r"period is [\d.]+ s; without, [\d.]+ s",
        said,
    )
    said = " ".join(slipstream("plan", plain, "--method", "greedy").stdout.split())
    assert 'shorter: training.recompute = "auto", at least ' in said


def test_the_choice_of_what_is_computed_again_is_within_the_limit(tmp_path, monkeypatch):
    # Both with the best choice and without, the whole search has no end before its limit.
    path = tmp_path / "job.toml"
    path.write_text(
        """
pipelines = 1
stages = 8
microbatches = 16
[time]
forward = [54, 68, 52, 58, 53, 65, 64, 62]
backward_input = [84, 63, 86, 75, 66, 84, 79, 61]
backward_weight = [56, 43, 53, 59, 40, 46, 57, 41]
[memory]
capacity = 3
activation = 1
weight_stash = 0.1
recomputed = 0.05
[placement]
layers = 4
[training]
recompute = "auto"
"""
    )
    limits = []

    def make_plan(job, failed, options, **others):
        limits.append(options.limit_seconds)
        raise Exit(0)

    monkeypatch.setattr(plan_command, "make_plan", make_plan)
    given = PlanOptions(steps=300_000)
    assert slipstream("plan", path, "--steps", given.steps, "--json").exit_code == 0
    clock = given.make_clock()
    assert choose_recomputation(read_job(path), given, clock).stages
    assert clock.now() + limits[0] <= 1.01 * given.limit_seconds


WEIGHTS = "[memory]\ncapacity = 9\nweights = 2\nunit_bytes = 1e9\n"


@pytest.mark.slow
def test_what_a_plan_takes_to_move(tmp_path):
    """Roles of a stage with two dead workers move.

    A layer takes 2 GB, and comes at 1e9 bytes a second from the one that is left.
    """
    (tmp_path / "job.toml").write_text(JOB + WEIGHTS)
    command = [
        "plan",
        tmp_path / "job.toml",
        "--failed",
        "0.1",
        "--failed",
        "1.1",
        "--normalise",
        "--bandwidth",
        "1e9",
        "--method",
        "greedy",
    ]
    answer = json.loads(slipstream(*command, "--json").stdout)
    moves = answer["moves"]
    assert moves and all(
        answer["holds"][move["worker"]] == [[1, 2]] for move in moves if move["role"][2] == "1"
    )
    assert (answer["layers_moved"], answer["bytes_moved"]) == (len(moves), 2e9 * len(moves))
    assert answer["seconds_to_move"] == 2 * max(Counter(move["role"][2] for move in moves).values())
    gained = answer["fixed_period"] - answer["period"]
    assert (
        answer["pays_after_iterations"] == math.ceil(answer["seconds_to_move"] / gained)
        and answer["shed"] == 0
    )
    assert answer["work_bound"] == pytest.approx(18 * 12 / 10)
    said = (
        f"layers to move: {len(moves)}, {2 * len(moves)} GB in about "
        f"{answer['seconds_to_move']:g} s"
    )
    assert said in " ".join(slipstream(*command).stdout.split())
    (tmp_path / "job.toml").write_text(JOB + WEIGHTS + "[training]\ntensor_parallel = 4\n")
    by_rank = json.loads(slipstream(*command, "--json").stdout)
    assert by_rank["bytes_moved"] == answer["bytes_moved"]
    assert by_rank["seconds_to_move"] == answer["seconds_to_move"] / 4, (
        "four ranks send at the same time"
    )
    assert "workers of 4 ranks: times are those of a worker" in " ".join(
        slipstream(*command).stdout.split()
    )
    (tmp_path / "job.toml").write_text(JOB + WEIGHTS.replace("unit_bytes = 1e9\n", ""))
    said = f"{2 * len(moves)} bytes: say in [memory] unit_bytes what a unit of its values is"
    assert said in " ".join(slipstream(*command).stdout.split())


def test_says_what_else_could_be_done_and_what_is_best(tmp_path):
    """Two workers of one stage are dead, and moving a role gains most.

    Dropping their pipelines keeps a third of the batch.
    """
    (tmp_path / "job.toml").write_text(JOB)
    command = ["plan", tmp_path / "job.toml", "--failed", "0.1", "--failed", "1.1"]
    said = " ".join(slipstream(*command).stdout.split())
    assert "drop 2 replicas 33.3% with 33.3% of the batch" in said and "(--method 1f1b)" in said
    assert re.search(r"roles moved at least \d+\.\d%, found in [\d.]+ s \(--normalise\)", said)
    (option,) = re.findall(r"shorter: (--[a-z ]+), at least", said)
    best = " ".join(slipstream(*command, *option.split()).stdout.split())
    assert "shortest found: this plan" in best and "best: " not in best
    counted = " ".join(slipstream(*command, "--steps", "20000").stdout.split())
    assert re.search(r"(found in \d+ steps) \(--layers move\)", counted)
    assert "instead" not in slipstream("plan", tmp_path / "job.toml").stdout
    assert "instead" not in slipstream(*command, "--method", "1f1b").stdout


def test_the_shortest_plan_found_says_how_long_others_were_searched_for(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    plan = plan_with(PlanOptions(steps=2000), read_job(tmp_path / "job.toml"), [Worker(0, 1)])
    moved = Alternative(
        what="layers moved",
        option="--layers move",
        period=plan.period,
        throughput=0.9,
        effort="0.1 s",
        found=False,
    )
    plan = replace(plan, fault_free=FaultFree(period=plan.period, bound=plan.period))
    last = answer_lines(plan, [moved], [])[-1]
    assert last.endswith(
        "shortest found: this plan, 100.0% (--layers move searched for 0.1 s only, --normalise not "
        "searched)"
    )
    assert answer_lines(plan, [moved], ["--layers move"])[-1].endswith(
        "this plan (--layers move), 100.0%"
    )


def test_the_fault_free_period_is_kept_and_never_longer_than_what_a_broken_plan_implies(
    tmp_path, monkeypatch
):
    """A short command after a long one has the long one's reference."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job.toml").write_text(HARD)
    command = ["plan", tmp_path / "job.toml", "--failed", "0.3", "--json", "--time-limit"]
    short = json.loads(slipstream(*command, "0.01").stdout)
    assert short["fault_free_bound"] <= short["fault_free_period"] <= short["period"]
    whole = json.loads(
        slipstream("plan", tmp_path / "job.toml", "--json", "--time-limit", "3").stdout
    )
    again = json.loads(slipstream(*command, "0.01").stdout)
    assert again["fault_free_period"] == whole["period"] <= short["fault_free_period"]
    (kept,) = (tmp_path / "cache" / "slipstream" / "fault-free").iterdir()
    kept.write_text("{")
    assert json.loads(slipstream(*command, "0.01").stdout)["fault_free_period"] > 0


@pytest.mark.parametrize("more", [["--failed", "0.3"], ["--failed", "0.3", "--layers", "move"], []])
def test_counted_steps_depend_on_no_earlier_command(tmp_path, monkeypatch, more):
    """The fault-free period that a longer command had kept was told."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job.toml").write_text(HARD.replace("pipelines = 4", "pipelines = 2"))
    file = tmp_path / "plan.json"

    def answer(steps):
        output = json.loads(
            slipstream(
                "plan",
                tmp_path / "job.toml",
                *more,
                "--steps",
                steps,
                "--seed",
                7,
                "--out",
                file,
                "--json",
            ).stdout
        )
        return {
            key: value for key, value in output.items() if key != "solve_seconds"
        }, file.read_bytes()

    before, longer, after = (answer(steps) for steps in (200, 100_000, 200))
    assert before == after and longer[0]["fault_free_period"] < before[0]["fault_free_period"]


UNEVEN = """
pipelines = 2
stages = 2
microbatches = 2
[time]
forward = [1, 9]
backward_input = [1, 9]
backward_weight = [1, 9]
[placement]
layers = [1, 9]
"""


def test_the_reference_is_of_layers_in_place_whatever_was_planned_before(tmp_path, monkeypatch):
    """Two workers are faster than any four with layers in place.

    They share nine layers and one.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job.toml").write_text(UNEVEN)
    dead, moving = ["--failed", "0.0"], ["--layers", "move"]
    answers = [
        json.loads(
            slipstream("plan", tmp_path / "job.toml", *more, "--time-limit", "1", "--json").stdout
        )
        for more in (dead, [*dead, *moving], moving, dead, [])
    ]
    assert len({answer["fault_free_period"] for answer in answers}) == 1, answers
    assert answers[1]["period"] < answers[0]["period"] == answers[0]["fault_free_period"]


def test_a_reference_that_is_not_known_well_is_a_range(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job.toml").write_text(FOLDED)
    said = slipstream(
        "plan", tmp_path / "job.toml", "--failed", "0.3", "--time-limit", "0.01"
    ).stdout
    low, high = map(
        float, re.findall(r"throughput between ([\d.]+)% and ([\d.]+)% of fault-free", said)[0]
    )
    assert low < high <= 100 and "the shortest fault-free period is between" in said


@pytest.mark.real_clock
def test_what_is_too_large_exits_2_with_the_size_that_fits(tmp_path):
    (tmp_path / "job.toml").write_text(HARD.replace("= 16", "= 65536"))
    result = slipstream(
        "plan", tmp_path / "job.toml", "--time-limit", "0.5", "--out", tmp_path / "s.json"
    )
    assert (
        result.exit_code == 2
        and result.stderr.count("\n") == 1
        and not (tmp_path / "s.json").exists()
    )
    assert re.search(
        r"65,536 micro-batches .* (fit|use fewer).*, or --time-limit \d+ is enough", result.stderr
    )


@pytest.mark.real_clock
def test_interrupting_keeps_the_best_plan(tmp_path):
    (tmp_path / "job.toml").write_text(HARD)
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "plan",
        "job.toml",
        "--failed",
        "1.4",
        "--time-limit",
        "100",
        "--out",
        "s.json",
        "--json",
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))
    }
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    assert b"list scheduler" in process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=SECONDS)
    answer = json.loads(stdout)
    assert process.returncode == 0 and b"Traceback" not in stderr and answer["interrupted"] is True
    assert answer["solve_seconds"] < 90 and check(read(tmp_path / "s.json")) == []


UNLIKE = (
    JOB
    + "[placement]\nlayers = 2\n[layers]\n"
    + "".join(
        f"{key} = [1, 1, 1, 1, 1, 1, 1, 3]\n"
        for key in ("forward", "backward_input", "backward_weight")
    )
)


@pytest.fixture
def unlike(tmp_path):
    path = tmp_path / "unlike.toml"
    path.write_text(UNLIKE.replace("forward = 1\n", "forward = [2, 2, 2, 4]\n", 1))
    return path


def test_the_pipeline_that_is_found_is_a_job_file(unlike, tmp_path):
    result = slipstream(
        "plan",
        unlike,
        "--placement",
        "any",
        "--steps",
        "20000",
        "--job-out",
        tmp_path / "best.toml",
        "--out",
        tmp_path / "best.json",
        "--for-failures",
        "1",
    )
    assert result.exit_code == 0, result.stderr
    assert (
        "whatever the placement" in result.stdout
        and "layers = [" in result.stdout
        and "1 down" in result.stdout
    )
    schedule = read(tmp_path / "best.json")
    assert check(schedule) == [] and schedule.bound_scope == "any placement"
    assert slipstream("check", "--bound", tmp_path / "best.json").exit_code == 0
    again = slipstream(
        "plan", tmp_path / "best.toml", "--steps", "20000", "--out", tmp_path / "again.json"
    )
    assert again.exit_code == 0 and read(tmp_path / "again.json").grid == schedule.grid


def test_the_answer_of_a_pipeline_in_json(unlike):
    answer = json.loads(
        slipstream("plan", unlike, "--placement", "any", "--steps", "20000", "--json").stdout
    )
    assert answer["bound_scope"] == "any placement" and answer["mean_period"] == answer["period"]
    assert answer["own_placement_period"] >= answer["period"] and answer["with_failures"] == []
    assert sum(answer["placement"]["layers"]) == 8 and answer["placements_tried"] > 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--placement", "all"], "--placement all: expected given or any"),
        (["--for-failures", "2"], "--for-failures: only with --placement any"),
        (["--job-out", "x.toml"], "--job-out: only with --placement any"),
        (["--placement", "any", "--failed", "1.2"], "--failed comes later"),
        (["--placement", "any", "--normalise"], "not with --normalise"),
        (["--placement", "any", "--layers", "move"], "not with --layers move"),
        (["--placement", "any", "--method", "1f1b"], "not with --method 1f1b"),
    ],
)
def test_options_that_a_search_for_a_pipeline_has_not(unlike, options, says):
    result = slipstream("plan", unlike, *options)
    assert result.exit_code == 2 and says in result.stderr, result.stderr
