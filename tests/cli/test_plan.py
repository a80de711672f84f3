"""`slipstream plan` as a user meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from schedules.check import check
from schedules.codec import read

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
HARD = JOB.replace("pipelines = 3", "pipelines = 4").replace("= 6", "= 16").replace("stages = 4", "stages = 8") \
    + "[memory]\ncapacity = 8\nweight_stash = 1\n"


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def slipstream(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_json_has_the_stable_keys(job, tmp_path):
    result = slipstream("plan", job, "--failed", "1.2", "--json", "--out", tmp_path / "s.json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0 and set(answer) >= {"period", "lower_bound", "gap", "status", "solve_seconds",
                                                     "fault_free_period", "rerouted", "peak_memory", "moves"}
    assert (answer["period"], answer["lower_bound"], answer["gap"], answer["status"]) == (30, 30, 0, "optimal")
    assert (answer["fault_free_period"], answer["rerouted"], answer["moves"]) == (22, 6, [])
    assert check(read(tmp_path / "s.json")) == []


def test_prints_a_timeline_and_what_it_means(job):
    result = slipstream("plan", job, "--failed", "1.2")
    assert "1.2  ╳ down" in result.stdout and "period 30 s, proven optimal" in result.stdout
    assert "11 of 12 workers" in result.stdout


def test_methods_and_modes(job):
    for arguments, period in ((["--method", "1f1b"], 30), (["--method", "greedy"], 22),
                              (["--failed", "1.2", "--optimizer", "synchronous"], 32)):
        assert json.loads(slipstream("plan", job, "--json", *arguments).stdout)["period"] == period


@pytest.mark.parametrize(("arguments", "says"), [
    (["--failed", "9.9"], "--failed: the job has no worker 9.9"),
    (["--failed", "x"], "'x' is no worker: write PIPELINE.STAGE"),
    (["--backward", "both"], "--backward both: expected split or fused"),
    (["--optimizer", "lazy"], "--optimizer lazy: expected staggered or synchronous"),
    (["--method", "magic"], "--method magic: expected cp-sat or greedy or 1f1b"),
    (["--out", "/dev/null/s.json"], "/dev/null/s.json: cannot be written"),
    (["--time-limit", "-1"], "--time-limit"),
])
def test_bad_options_exit_2(job, arguments, says):
    result = slipstream("plan", job, *arguments)
    assert result.exit_code == 2 and says in result.stderr and "Traceback" not in result.stderr


def test_a_bad_job_exits_2_in_one_line(tmp_path):
    (tmp_path / "job.toml").write_text(JOB.replace("stages", "stagess"))
    result = slipstream("plan", tmp_path / "job.toml")
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert "key 'stages' is missing" in result.stderr


def test_no_plan_exits_1_with_the_reason(job, tmp_path):
    out = tmp_path / "s.json"
    result = slipstream("plan", job, "--failed", "0.1", "--failed", "1.1", "--failed", "2.1", "--out", out)
    assert result.exit_code == 1 and "stage 1 has no live worker" in result.stderr and not out.exists()


def test_interrupting_keeps_the_best_plan(tmp_path):
    (tmp_path / "job.toml").write_text(HARD)
    command = [sys.executable, "-c", "from cli.app import main; main()", "plan", "job.toml", "--failed", "1.4",
               "--time-limit", "100", "--out", "s.json", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert b"list scheduler" in process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    answer = json.loads(stdout)
    assert process.returncode == 0 and b"Traceback" not in stderr and answer["interrupted"] is True
    assert answer["solve_seconds"] < 90 and check(read(tmp_path / "s.json")) == []
