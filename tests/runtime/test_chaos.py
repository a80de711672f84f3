"""The short form of `python -m benchmarks.chaos`: workers die at random and come back."""

import random
from dataclasses import replace

import pytest

from benchmarks.chaos import TOLERANCE, Tally, settings, train_through

ITERATIONS = 24


@pytest.mark.parametrize("seed", [1, 2])
def test_chaos(seed, fork_server, tmp_path):
    tally, plain = Tally(), settings("3x2", ITERATIONS)
    setting = replace(plain[0 if seed == 1 else 3], gap=(3, 8))
    train_through(setting, random.Random(seed), fork_server, tmp_path, tally, storm_seconds=2.0)
    assert tally.kills >= 2, tally.report()
    assert tally.deviation <= TOLERANCE
