"""The inner loops are compiled before the first plan, and a line says so.

All planning commands have this in common.
"""

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.planner import compiled
from slipstream.planner.failures import FailurePlanner
from slipstream.planner.job.file import read_job
from slipstream.planner.plan import plan_job

pytestmark = pytest.mark.usefixtures("counted_steps")

JOB = (
    "pipelines = 2\nstages = 2\nmicrobatches = 2\n[time]\nforward = 1\nbackward_input = 1\n"
    "backward_weight = 1\n"
)
LINE = "compiling the planner's inner loops"


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    assert (
        CliRunner()
        .invoke(app, ["table", "job.toml", "--max-failures", "0", "--out", "table"])
        .exit_code
        == 0
    )
    plan = plan_job(read_job(tmp_path / "job.toml"), backward="fused")
    assert (
        CliRunner()
        .invoke(app, ["plan", "job.toml", "--backward", "fused", "--out", "plan.json"])
        .exit_code
        == 0
    )
    assert (
        CliRunner()
        .invoke(app, ["export", "plan.json", "--to", "torch-csv", "--out", "order.csv"])
        .exit_code
        == 0
    )
    return plan.schedule


@pytest.fixture
def not_compiled(tmp_path, monkeypatch):
    """As on a new installation; what is compiled in truth is used."""
    compilations = []
    monkeypatch.setattr(compiled, "is_compiled", lambda: bool(compilations))
    monkeypatch.setattr(compiled, "load_kernel", lambda: compilations.append(True))


@pytest.mark.parametrize(
    "arguments",
    [
        "plan job.toml",
        "table job.toml --max-failures 1 --jobs 1 --out other",
        "lookup table --failed 0.1",
        "simulate job.toml --policy recycle --days 1 --json",
    ],
)
def test_commands_that_plan_say_that_they_compile_first(job, not_compiled, tmp_path, arguments):
    first, second = (CliRunner().invoke(app, arguments.split()) for _ in range(2))
    assert first.exit_code == second.exit_code == 0
    assert first.stderr.count(LINE) == 1 and second.stderr.count(LINE) == 0
    assert LINE not in first.stdout


def test_a_run_compiles_before_its_first_failure(job, not_compiled, tmp_path):
    said = []
    FailurePlanner(read_job(tmp_path / "job.toml"), job, progress=said.append)
    assert len(said) == 1 and LINE in said[0]


def test_times_that_look_like_milliseconds_are_remarked(tmp_path):
    (tmp_path / "job.toml").write_text(JOB.replace("forward = 1", "forward = 47"))
    shown = CliRunner().invoke(app, ["plan", str(tmp_path / "job.toml"), "--json"])
    assert shown.exit_code == 0
    assert "a forward takes 47 s: times are in seconds, not in milliseconds" in " ".join(
        shown.stderr.split()
    )
    (tmp_path / "job.toml").write_text(JOB)
    assert (
        "milliseconds"
        not in CliRunner().invoke(app, ["plan", str(tmp_path / "job.toml"), "--json"]).stderr
    )
