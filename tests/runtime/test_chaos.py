"""The short form of `python -m benchmarks.chaos`: workers die at random and come back."""

import random
import sys
from dataclasses import replace

import pytest

from benchmarks.chaos import TOLERANCE, Tally, settings, switching, train_through
from runtime.processes.children import Children
from runtime.processes.fork_server import ForkServer
from tests.runtime.processes.child import Life

ITERATIONS = 24


@pytest.mark.parametrize("seed", [1, 2])
def test_chaos(seed, fork_server, tmp_path):
    tally, plain = Tally(), settings("3x2", ITERATIONS)
    setting = replace(plain[0 if seed == 1 else 3], gap=(3, 8))
    train_through(setting, random.Random(seed), fork_server, tmp_path, tally, storm_seconds=2.0)
    assert tally.kills >= 2, tally.report()
    assert tally.deviation <= TOLERANCE


def test_chaos_where_node_0_dies_too(fork_server, tmp_path):
    """It is led by a process of its own, and then by this one."""
    tally, setting = Tally(), replace(settings("3x2", ITERATIONS)[3], gap=(3, 8))
    train_through(setting, random.Random(4), fork_server, tmp_path, tally, storm_seconds=2.0, node_0_dies=True)
    assert tally.leaders == 1 and tally.deviation <= TOLERANCE, tally.report()


def test_chaos_where_threads_take_turns_all_the_time(tmp_path):
    tally, setting = Tally(), replace(settings("3x2", ITERATIONS)[1], gap=(3, 8))
    with switching(1e-6), ForkServer() as fork_server:
        train_through(setting, random.Random(3), fork_server, tmp_path, tally, storm_seconds=2.0)
    assert tally.kills >= 2, tally.report()
    assert tally.deviation <= TOLERANCE


def test_the_switch_interval_is_that_of_every_process():
    usual = sys.getswitchinterval()
    with switching(1e-6), Children("tests.runtime.processes.child:switch_interval", [Life(0.0)]) as children:
        assert float(children.answers(60)[0]) == sys.getswitchinterval() == pytest.approx(1e-6)
    assert sys.getswitchinterval() == usual
