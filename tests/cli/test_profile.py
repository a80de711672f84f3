"""`slipstream profile`: a job file that is complete, says what was measured, and can be planned."""

import json
import tomllib

import pytest
from typer.testing import CliRunner

from cli.app import app
from planner.job import Job, parse_job, read_job
from planner.jobtext import job_text
from planner.plan import plan_job
from runtime.config import parse_run_config

JOB = """
name = "tiny \\"quoted\\" é"
pipelines = 2
stages = 2
microbatches = [2, 3]
[time]
forward = 1
backward_input = 1
backward_weight = 1
[placement]
order = "v"
chunks = 2
layers = [1, 2, 1, 2]
[model]
blocks = 4
width = 16
heads = 2
context = 16
[training]
batch = 2
clip_norm = 1.0
betas = [0.8, 0.9]
device = "cpu"
"""


def test_a_job_is_measured(tmp_path) -> None:
    """One test, because measuring takes seconds."""
    (tmp_path / "job.toml").write_text(JOB)
    result = CliRunner().invoke(app, ["profile", "--job", str(tmp_path / "job.toml"), "--rounds", "2", "--json",
                                      "--out", str(tmp_path / "out.toml")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out.toml").read_text()
    assert tomllib.loads(text) == json.loads(result.stdout)["job"]
    assert "2 of 2 pipelines" in text and "MiB a stage" in text and "over gloo" in text
    before, after = parse_job(JOB), read_job(tmp_path / "out.toml")
    for name in ("name", "pipelines", "stages", "microbatches", "columns", "layers", "model", "training"):
        assert getattr(after, name) == getattr(before, name)
    assert parse_run_config(after.model, after.training) == parse_run_config(before.model, before.training)
    assert plan_job(after, time_limit=1).schedule.period_ticks > 0
    require_sense(after)


def require_sense(job: Job) -> None:
    time, memory = job.time, job.memory
    assert memory is not None
    assert all(seconds > 0 for seconds in (*time.forward, *time.backward_weight, time.transfer))
    assert time.backward_input[0] < min(time.backward_input[1:]), "the first stage has no input gradient"
    assert all(seconds > 0 for seconds in (*time.optimizer, *time.all_reduce))
    block = 2 * 16 * 16 * 4 / 1024
    assert 10 * block < memory.activation[2] < 60 * block, "one block, KiB"
    assert 2 * block < memory.weight_stash[2] < 1.2 * memory.activation[2]
    assert memory.activation[1] == pytest.approx(2 * memory.activation[2], rel=0.15), "two blocks hold twice as much"
    assert min(memory.capacity) > 1024


def test_what_cannot_be_measured_is_refused(tmp_path) -> None:
    for change, message in ((("blocks = 4", "blocks = 5"), "placement.layers is [1, 2, 1, 2]"),
                            (("[model]", "[model]\nname = 'nowhere:Model'"), "No module named 'nowhere'"),
                            (("width = 16", "widht = 16"), "did you mean model.width?")):
        (tmp_path / "job.toml").write_text(JOB.replace(*change))
        result = CliRunner().invoke(app, ["profile", "--job", str(tmp_path / "job.toml")])
        assert result.exit_code == 2 and message in " ".join(result.stderr.split()) and result.stdout == ""


def test_values_as_toml() -> None:
    tables = {"a": 1, "b": 'x"\\\n\t', "t": {"f": 1e-9, "yes": True, "l": [1, "two"], "d": {"1.2": 1.5}}}
    assert tomllib.loads(job_text(tables, {"": ["one"], "t": ["two"]})) == tables
