"""`slipstream jitter`: noise, stragglers, and bad input."""

import json

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.planner.plan import plan_job
from slipstream.schedules.codec import write
from tests.jobs import grid

pytestmark = pytest.mark.usefixtures("counted_steps")


def slipstream(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Write plan.json, with a period of 19 s.

    It has 3 pipelines x 2 stages x 6 micro-batches; all ops and the optimizer take 1 s.
    """
    monkeypatch.chdir(tmp_path)
    job = grid(3, 2, 6, times="forward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = 1")
    write(plan_job(job, method="greedy").schedule, tmp_path / "plan.json")


def test_noise_and_stragglers(plan):
    calm = json.loads(
        slipstream("jitter", "plan.json", "--noise", 0, "--replays", 10, "--json").stdout
    )
    assert calm["mean"] <= calm["planned"] == 19 and calm["p5"] == calm["p95"]
    noisy = json.loads(
        slipstream("jitter", "plan.json", "--noise", 0.2, "--slow", "0.1=1.5", "--json").stdout
    )
    assert noisy["replays"] == 10_000 and calm["mean"] < noisy["p5"] < noisy["p50"] < noisy["p95"]
    assert "over 100 replays" in slipstream("jitter", "plan.json", "--replays", 100).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.json"], "none.json"),
        (["plan.json", "--slow", "0.1"], "--slow: '0.1': expected D.S=FACTOR"),
        (["plan.json", "--slow", "0.1=two"], "--slow: '0.1=two': expected D.S=FACTOR"),
        (["plan.json", "--slow", "9.9=2"], "no live worker 9.9"),
        (["plan.json", "--slow", "0.1=-1"], "factor of -1"),
    ],
)
def test_noise_on_bad_input_exits_2(plan, arguments, says):
    result = slipstream("jitter", *arguments)
    assert result.exit_code == 2 and says in result.stderr and "Traceback" not in result.stderr
