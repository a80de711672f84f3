"""`slipstream train` that ends early says how to go on, and the command that it prints does."""

import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.runtime import launch
from slipstream.runtime.model.checkpoints.checkpoint import latest
from slipstream.runtime.protocol.authentication import VARIABLE
from tests.runtime.forked import own_fork_server
from tests.runtime.launchers import SECRET, Launcher, command
from tests.runtime.pacing import after_each_iteration, hold_at
from tests.runtime.running import free_port, judge_of_text, losses_in, tiny_text

JOB = tiny_text(pipelines=2, iterations=40)
COMMON = ("--method", "greedy", "--json")


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv(VARIABLE, SECRET)
    monkeypatch.setattr(launch, "ForkServer", own_fork_server)


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def train(*arguments: object):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def end_after_five(iteration: int, _: float) -> None:
    if iteration == 4:
        os.kill(os.getpid(), signal.SIGTERM)


def losses_in_lines(out: Path) -> list[bytes]:
    path = out / "losses.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def test_the_command_that_is_printed_goes_on_and_a_run_that_is_done_has_nothing_left(job, tmp_path, monkeypatch):
    out = tmp_path / "with a space"
    with monkeypatch.context() as patched:
        after_each_iteration(patched, end_after_five)
        first = train(job, *COMMON, "--out", out, "--resume", out)  # what schedulers repeat: begins here, goes on later
    assert first.exit_code == 143 and "nothing is there to go on from; starts with iteration 0" in first.stderr
    told = re.search(r"interrupted by SIGTERM; .*; go on from its checkpoint of iteration (\d+): (slipstream train .*)",
                     first.stderr)
    assert told is not None, first.stderr
    done = len(losses_in(out))
    assert int(told[1]) == done < 40
    program, *arguments = shlex.split(told[2])
    assert program == "slipstream" and "--json" in arguments

    second = CliRunner().invoke(app, arguments)
    assert second.exit_code == 0, second.output
    answer = json.loads(second.stdout)
    assert answer["first_iteration"] == done
    assert losses_in(out) == pytest.approx(judge_of_text(JOB).losses, rel=0, abs=1e-9)

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    third = CliRunner().invoke(app, arguments)
    assert third.exit_code == 0 and "has seen 40 iterations of 40: nothing is left to do; --iterations" in third.stderr
    again = json.loads(third.stdout)
    assert again.keys() == answer.keys() and again["parameter_digest"] == answer["parameter_digest"]
    assert again["losses"] == [] and again["first_iteration"] == 40
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    other = train(job, "--nodes", 2, "--node", 1, "--rendezvous", f"127.0.0.1:{free_port()}", "--json", "--out", out,
                  "--resume", out, "--join-timeout", 1)
    assert other.exit_code == 0 and json.loads(other.stdout) == {"node": 1}, "it does not wait for a node 0"

    next((out / "parameters").iterdir()).unlink()
    fourth = CliRunner().invoke(app, arguments)
    assert fourth.exit_code == 0 and "nothing is left to do but to write the parameters" in fourth.stderr
    assert json.loads(fourth.stdout)["parameter_digest"] == answer["parameter_digest"]


def held_command(path: str, *words: str) -> int:
    """`slipstream`, which waits after five iterations until a file is there."""
    hold_at(4, Path(path))
    return command(*words)


def test_a_folder_with_results_is_refused_in_one_line_and_forced(job, tmp_path):
    out = tmp_path / "out"
    assert train(job, *COMMON, "--iterations", 3, "--out", out).exit_code == 0
    newest = latest(out / "checkpoints")
    assert newest is not None and newest.iteration == 3, "checkpoints are on by default, one at the end"
    for every in (0, 2):
        refused = train(job, *COMMON, "--iterations", 2, "--seed", 1, "--out", out, "--checkpoint-every", every)
        assert refused.exit_code == 2 and refused.stderr.count("\n") <= 20
        assert re.search(r"holds the results of another run \(.*\): its checkpoint is of another job \(its "
                         r"training.seed is 0, here it is 1\); give another --out, or start anew with --force$",
                         refused.stderr, re.M)
    same = train(job, *COMMON, "--iterations", 4, "--out", out)
    assert same.exit_code == 2 and f": go on from its checkpoint with --resume {out}, give another" in same.stderr
    assert "list scheduler" not in same.stderr, "what is refused is not planned first"
    forced = train(job, *COMMON, "--iterations", 2, "--seed", 1, "--out", out, "--checkpoint-every", 0, "--force")
    assert forced.exit_code == 0, forced.output
    assert not list((out / "checkpoints").glob("*")) and len(losses_in(out)) == 2

    saved = train(job, *COMMON, "--iterations", 2, "--out", out, "--resume", out)
    assert saved.exit_code == 2 and "no checkpoint is there" in saved.stderr
    for path in (out / "parameters").iterdir():
        path.unlink()
    again = train(job, *COMMON, "--iterations", 1, "--out", out, "--resume", out)  # as after a first minute
    assert again.exit_code == 0, again.output
    assert "was ended before its first checkpoint: does its 2 iterations again, from iteration 0" in again.stderr
    assert len(losses_in(out)) == 1


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_node_that_is_told_to_end_leaves_and_the_others_go_on(job, tmp_path):
    """SIGTERM at the launcher of node 1; node 0 trains to the end."""
    meeting, nodes = f"127.0.0.1:{free_port()}", []
    try:
        for node in (0, 1):
            nodes.append(Launcher(
                f"{__name__}:held_command", tmp_path / "told", "train", job, "--nodes", 2, "--node", node,
                "--rendezvous", meeting, "--method", "greedy", "--iterations", 300, "--out", tmp_path / "out",
                log=tmp_path / f"{node}.log"))
        deadline = time.monotonic() + 200
        while len(losses_in_lines(tmp_path / "out")) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        nodes[1].send_signal(signal.SIGTERM)
        (tmp_path / "told").touch()
        assert nodes[1].wait(120) == 143
        assert nodes[0].wait(240) == 0, (tmp_path / "0.log").read_text()
    finally:
        for one in nodes:
            one.kill()
            one.wait(60)
    lead, other = ((tmp_path / f"{node}.log").read_text() for node in (0, 1))
    assert "interrupted by SIGTERM; the workers of node 1 have left" in other and "Traceback" not in lead + other
    assert "worker 1.0 has left, as it was told to" in lead and "runs on 2 workers" in lead
