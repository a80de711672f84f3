"""Plans in torchtitan: its own command line and code run them.

Gradients are those of one process.

torchtitan needs triton, which takes a gigabyte: `make neighbours` installs both, and the older
version beside them.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.planner.plan import plan_job
from slipstream.schedules import codec
from slipstream.schedules.schedule import Worker
from tests import general
from tests.generate import SHED, by_hand
from tests.interop.running import run_ranks
from tests.jobs import grid

TIMEOUT_SECONDS = 240
PLANS = {
    "one-stage-a-rank": ("layers = [3, 3]", 4, []),
    "v": ("order = 'v'\nchunks = 2\nlayers = [2, 1, 1, 2]", 5, ["--decoder-layers", 6]),
    "three-stages-a-rank": (
        "order = 'interleaved'\nchunks = 3\nlayers = [2, 2, 1, 1, 1, 1]",
        3,
        ["--decoder-layers", 6],
    ),
}
"""A placement, micro-batches, and options. In the last plan embedding and head are layers."""


def export(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def plan_file(path, job, failed=()):
    codec.write(plan_job(job, failed, method="greedy", optimizer="synchronous").schedule, path)
    return path


installed = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torchtitan", "triton"))),
    reason="torchtitan is not installed: make neighbours",
)
OLDER = Path(__file__).parents[2] / "out" / "neighbours" / "torchtitan-0.2.2"
"""Where `make neighbours` installs that version."""
PARSE = """
import shlex, sys
from torchtitan.config import ConfigManager
config = ConfigManager().parse_args([*sys.argv[2:], *shlex.split(open(sys.argv[1]).read())])
degrees = config.parallelism
print(degrees.pipeline_parallel_degree, degrees.pipeline_parallel_schedule,
      degrees.module_fqns_per_model_part[-1][-1], config.training.local_batch_size)
"""


@installed
@pytest.mark.parametrize(
    ("version", "model", "head"),
    [
        ("0.3.0", ["--module", "llama3", "--config", "llama3_debugmodel"], "lm_head"),
        pytest.param(
            "0.2.2",
            ["--model.name", "llama3"],
            "output",
            marks=pytest.mark.skipif(
                not OLDER.exists(), reason="0.2.2 is not installed: make neighbours"
            ),
        ),
    ],
)
def test_each_version_reads_its_flags(tmp_path, version, model, head):
    plan = plan_file(tmp_path / "plan.json", grid(2, 2, 3, more="[placement]\nlayers = [3, 3]\n"))
    done = export(
        plan,
        tmp_path / "titan",
        "--to",
        "torchtitan",
        "--decoder-layers",
        6,
        "--titan-version",
        version,
    )
    assert done.exit_code == 0, done.stderr
    path = os.pathsep.join([*([str(OLDER)] if version == "0.2.2" else []), *sys.path])
    parsed = subprocess.run(
        [sys.executable, "-c", PARSE, tmp_path / "titan" / "flags", *model],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=TIMEOUT_SECONDS,
    )
    assert parsed.stdout.split() == ["2", "PipelineScheduleSingle", head, "3"], parsed.stderr


@installed
def test_torchtitan_runs_plans_with_the_gradients_of_one_process(tmp_path):
    for name, (placement, microbatches, options) in PLANS.items():
        plan = plan_file(
            tmp_path / f"{name}.json", grid(1, 2, microbatches, more=f"[placement]\n{placement}\n")
        )
        assert export(plan, tmp_path / name, "--to", "torchtitan", *options).exit_code == 0
    run_ranks(
        "tests.interop.titan_ranks",
        2,
        *(str(tmp_path / name) for name in PLANS),
        seconds=TIMEOUT_SECONDS,
    )


def test_the_folder_holds_the_order_and_its_flags(tmp_path):
    plan = plan_file(tmp_path / "plan.json", grid(2, 2, 3))
    done = export(plan, tmp_path / "a folder", "--to", "torchtitan", "--json")
    assert done.exit_code == 0 and done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["flags"][-3:] == [
        "--training.local_batch_size",
        "3",
        "--training.disable_cuda_graphs",
    ]
    assert (tmp_path / "a folder" / "schedule.csv").read_text() == export(plan).stdout
    listed = subprocess.run(
        ["xargs", "-a", tmp_path / "a folder" / "flags", "printf", "%s\\n"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert listed == answer["flags"] and str(tmp_path / "a folder" / "schedule.csv") in listed
    again = export(plan, tmp_path / "a folder", "--to", "torchtitan")
    assert again.exit_code == 2 and "exists already; name a folder" in again.stderr


def test_a_staggered_plan_is_told_of(tmp_path):
    codec.write(plan_job(grid(1, 2, 3), method="greedy").schedule, tmp_path / "plan.json")
    done = export(tmp_path / "plan.json", tmp_path / "out", "--to", "torchtitan")
    assert done.exit_code == 0 and "plan with --optimizer synchronous" in done.stderr


LINEAR_PAIRS = "[placement]\nchunks = 2\nlayers = [1, 1, 1, 1]"


@pytest.mark.parametrize(
    ("schedule", "options", "says"),
    [
        (
            plan_job(grid(2, 2, 3), [Worker(1, 0)], method="greedy").schedule,
            [],
            "worker 1.0 is down, and torchtitan runs whole pipelines: export a plan with all "
            "workers alive",
        ),
        (
            by_hand(SHED),
            [],
            "shed to worker 1.0, of another pipeline; torch's runtime knows one pipeline: plan "
            "with --method 1f1b",
        ),
        (general.floating_layer(), [], "holds layers of its own choice"),
        (
            plan_job(grid(2, 2, [3, 4]), method="greedy").schedule,
            [],
            "pipelines have 3 to 4 micro-batches",
        ),
        (
            plan_job(grid(1, 1, 3), method="greedy").schedule,
            [],
            "torchtitan does not run pipelines of one rank",
        ),
        (
            plan_job(grid(1, 2, 3, more=LINEAR_PAIRS), method="greedy").schedule,
            [],
            r"stages are on ranks \[0, 0, 1, 1\]; torchtitan puts them round-robin, or 2 per "
            r"rank as a V: plan with",
        ),
        (
            plan_job(
                grid(1, 2, 3, more="[placement]\nchunks = 3\norder = 'interleaved'"),
                method="greedy",
            ).schedule,
            [],
            "into 3 stages per rank by itself: give --decoder-layers",
        ),
        (
            plan_job(grid(1, 2, 3, more="[placement]\nlayers = [4, 4]"), method="greedy").schedule,
            ["--decoder-layers", 7],
            "--decoder-layers 7: the plan has 8 layers; expected 8, or 6 where embedding and "
            "head are layers of it",
        ),
    ],
)
def test_what_torchtitan_cannot_run_is_answered_no_in_one_line(tmp_path, schedule, options, says):
    codec.write(schedule, tmp_path / "plan.json")
    done = export(tmp_path / "plan.json", tmp_path / "out", "--to", "torchtitan", *options)
    assert done.exit_code == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert re.search(says, done.stderr), done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--to", "torchtitan"],
            "name the folder to write: slipstream export PLAN --to torchtitan DIR",
        ),
        (["--to", "torchtitan", "--communication"], "--communication: only with --to torch-csv"),
        (["--titan-version", "0.2.2"], "--titan-version: only with --to torchtitan"),
        (
            ["--to", "torchtitan", "--titan-version", "1.0"],
            "--titan-version 1.0: expected 0.3.0 or 0.2.2",
        ),
        (["--decoder-layers", "3"], "--decoder-layers: only with --to torchtitan"),
    ],
)
def test_options_of_other_formats_are_refused(tmp_path, arguments, says):
    plan = plan_file(tmp_path / "plan.json", grid(1, 2, 3))
    done = export(plan, *arguments)
    assert done.exit_code == 2 and says in done.stderr and done.stderr.count("\n") == 1
