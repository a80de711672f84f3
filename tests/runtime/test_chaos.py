"""The short form of `python -m benchmarks.chaos`: workers die at random and come back."""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks import chaos_checks
from benchmarks.chaos import TOLERANCE, switching, train_through
from benchmarks.chaos_checks import ChaosError, Leaks, Survivors, Tally, require_no_litter
from benchmarks.chaos_scenario import settings
from slipstream.runtime.events import Failed, Joined, Noted
from slipstream.runtime.processes.child_processes import ChildProcesses
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.tools.reference import ReferenceResult
from slipstream.schedules.schedule import Worker
from tests import patience
from tests.runtime.processes.child import Life

ITERATIONS = 24


pytestmark = pytest.mark.usefixtures("unhurried")


@pytest.mark.parametrize(
    ("seed", "name"),
    [
        (1, "plain"),
        pytest.param(2, "slow-settling-clipped", marks=pytest.mark.slow),
        pytest.param(3, "ranks-settling-clipped", marks=pytest.mark.slow),
        pytest.param(4, "sharded-settling-clipped", marks=pytest.mark.slow),
        pytest.param(5, "uneven-sharded-settling-clipped", marks=pytest.mark.slow),
    ],
)
def test_chaos(seed, name, fork_server, tmp_path):
    tally, setting = Tally(), replace(settings("3x2", ITERATIONS)[name], gap=(3, 8), away=(1, 4))
    train_through(setting, random.Random(seed), fork_server, tmp_path, tally, storm_seconds=2.0)
    assert tally.kills >= 2, tally.report()
    assert tally.deviation <= TOLERANCE


@pytest.mark.slow
def test_chaos_where_nodes_die(fork_server, tmp_path):
    """All workers of a machine die at once, in one recovery.

    Two are of a stage, so that roles move.
    """
    tally, setting = Tally(), replace(settings("3x2", ITERATIONS)["nodes"], gap=(5, 8), away=(1, 4))
    for seed in range(5, 12):  # a node counts only if all of its workers are members when it dies
        train_through(
            setting,
            random.Random(seed),
            fork_server,
            tmp_path / str(seed),
            tally,
            storm_seconds=4.0,
        )
        if tally.nodes:
            break
    assert tally.nodes >= 1 and tally.deviation <= TOLERANCE, tally.report()


@pytest.mark.slow
def test_chaos_where_node_0_dies_too(fork_server, tmp_path):
    """It is led by a process of its own, and then by this one."""
    tally, setting = Tally(), replace(settings("3x2", ITERATIONS)["roles-clipped"], gap=(3, 8))
    train_through(
        setting, random.Random(4), fork_server, tmp_path, tally, storm_seconds=2.0, node_0_dies=True
    )
    assert tally.leaders == 1 and tally.deviation <= TOLERANCE, tally.report()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_chaos_where_two_things_fail_at_a_time(seed, fork_server, tmp_path):
    # Node 0 dies with a worker, or while one joins; then two workers, which have just come back or
    # are of one stage.
    tally, setting = Tally(), settings("3x2", ITERATIONS)["sharded-clipped"]
    train_through(
        setting, random.Random(seed), fork_server, tmp_path, tally, node_0_dies=True, pairs=True
    )
    assert tally.leaders == 1 and tally.pairs, tally.report()
    assert tally.deviation <= TOLERANCE, tally.report()


@pytest.mark.slow
def test_chaos_where_threads_take_turns_all_the_time(tmp_path):
    tally, setting = Tally(), replace(settings("3x2", ITERATIONS)["roles"], gap=(3, 8))
    with switching(1e-6), ForkServer() as fork_server:
        train_through(setting, random.Random(3), fork_server, tmp_path, tally, storm_seconds=2.0)
    assert tally.kills >= 2, tally.report()
    assert tally.deviation <= TOLERANCE


def test_losses_that_are_missing_or_not_known_are_told(tmp_path):
    reference = ReferenceResult(losses=[4.0, 3.0, 2.0], parameters={}, digest="", evaluations={})
    for lines, message in (
        ((0, 2), "line 2 is of iteration 2, after [0]"),
        ((0, 1, 1), "line 3 is of iteration 1"),
    ):
        written(tmp_path, [(iteration, 1.0) for iteration in lines])
        with pytest.raises(ChaosError, match=re.escape(message)):
            Tally().compare_losses(tmp_path, reference)
    written(tmp_path, [(0, 4.0), (1, None)])
    with pytest.raises(ChaosError, match="the loss of iteration 1 is not known"):
        Tally().compare_losses(tmp_path, reference)
    written(tmp_path, [(0, 4.0), (1, 3.5)])
    tally = Tally()
    assert tally.compare_losses(tmp_path, reference) == 2 and tally.deviation == 0.5


def written(out, lines):
    (out / "losses.jsonl").write_text(
        "".join(
            json.dumps({"iteration": iteration, "loss": loss}) + "\n" for iteration, loss in lines
        )
    )


def test_whoever_was_not_lost_must_not_be_started_again():
    survivors = Survivors({})
    survivors.look({"0.0": 10, "1.0": 11, "1.1-1": 12})
    survivors.observe(Failed(worker=Worker(1, 0), reason="worker 1.0 was killed by SIGKILL"))
    survivors.observe(Noted(text="worker 1.1 was killed by SIGKILL, before it took part"))
    survivors.look({"0.0": 10, "1.0": 21, "1.1-1": 22})
    survivors.require()
    survivors.look({"0.0": 20, "1.0": 21})
    with pytest.raises(ChaosError, match=r"worker 0\.0 was process 10 and is 20, but was not lost"):
        survivors.require()


def test_who_was_started_and_lost_between_two_commits_may_be_started_again():
    running = {"0.0": 10, "1.0": 11}
    survivors = Survivors({}, lambda: running)
    survivors.look(running)
    survivors.observe(Failed(worker=Worker(1, 0), reason="worker 1.0 was killed by SIGKILL"))
    running["1.0"] = 21
    survivors.observe(Noted(text="worker 1.0 was killed by SIGKILL, before it took part"))
    survivors.look(running)  # the end of its process is not known yet
    running["1.0"] = 31
    survivors.look(running)
    survivors.require()


def test_a_worker_of_another_node_0_that_ends_without_a_word_is_told(monkeypatch):
    monkeypatch.setattr(chaos_checks, "NOTICED_SECONDS", -1.0)
    with subprocess.Popen(["sleep", "100"]) as lives, subprocess.Popen(["true"]) as gone:
        survivors = Survivors(
            {"fork server": os.getpid(), "0.0": lives.pid, "0.1": gone.pid, "1.0/1-3": gone.pid}
        )
        survivors.observe(Failed(worker=Worker(1, 0), reason="worker 1.0 was killed by SIGKILL"))
        gone.wait()
        survivors.look({})
        lives.kill()
    with pytest.raises(
        ChaosError, match=r"^the process of worker 0\.1 has ended, and nobody has said so$"
    ):
        survivors.require()


def test_a_worker_that_had_not_joined_when_another_node_0_died_may_end_and_be_replaced(monkeypatch):
    monkeypatch.setattr(chaos_checks, "NOTICED_SECONDS", -1.0)
    with subprocess.Popen(["true"]) as gone:
        survivors = Survivors({"1.1": gone.pid, "1.1/1": gone.pid})
        gone.wait()
        survivors.look({})
        survivors.observe(Joined(worker=Worker(1, 1)))
        survivors.look({})
    survivors.require()


def test_what_is_left_after_a_run_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(chaos_checks, "NOTICED_SECONDS", 0.1)
    leaks = Leaks()
    leaks.require({})
    leaks.require({})
    with (
        (tmp_path / ".left").open("w"),
        pytest.raises(ChaosError, match=r"1 more descriptors \(.*\.left 0 of"),
    ):
        leaks.require({})
    with subprocess.Popen(["sleep", "100"]) as lives:
        with pytest.raises(
            ChaosError, match=rf"1 more processes .*process {lives.pid} of worker 0\.1"
        ):
            leaks.require({"0.1": lives.pid})
        lives.kill()
    with pytest.raises(ChaosError, match=r"holds \.left"):
        require_no_litter(tmp_path)


def test_the_switch_interval_is_that_of_every_process():
    usual = sys.getswitchinterval()
    with (
        switching(1e-6),
        ChildProcesses("tests.runtime.processes.child:switch_interval", [Life(0.0)]) as children,
    ):
        assert (
            float(children.collect_results(patience.SECONDS)[0])
            == sys.getswitchinterval()
            == pytest.approx(1e-6)
        )
    assert sys.getswitchinterval() == usual
