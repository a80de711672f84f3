"""The pool of processes that tables are planned in."""

import os
import signal
from concurrent.futures import ProcessPoolExecutor

import pytest

from slipstream.planner.tables.process_pool import PoolError, run_all


def _double(task):
    if task == 13:
        raise ValueError("unlucky")
    if task == 666:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * task


def test_pool_gives_all_results():
    assert sorted(run_all(_double, range(7), 2)) == [(task, 2 * task) for task in range(7)]
    assert list(run_all(_double, [], 2)) == []


def test_an_executor_of_ones_own_gives_all_results_and_keeps_state():
    """As one of many machines would: with processes that know nothing of ours."""
    with ProcessPoolExecutor(1) as executor:
        for _ in range(2):
            assert sorted(run_all(Counting(), [5, 6, 7], 9, executor=executor)) == [
                (5, 1),
                (6, 2),
                (7, 3),
            ]
        with pytest.raises(ValueError, match=r"^unlucky$"):
            list(run_all(_double, [13], 1, (ValueError,), executor=executor))
        with pytest.raises(PoolError, match="666: its process died"):
            list(run_all(_double, [666], 1, executor=executor))


class Counting:
    def __init__(self):
        self.calls = 0

    def __call__(self, task):
        self.calls += 1
        return self.calls


def test_pool_tells_of_failures_and_deaths():
    with pytest.raises(PoolError, match=r"13: Traceback.*\n(.*\n)*ValueError: unlucky"):
        list(run_all(_double, [1, 13], 1))
    with pytest.raises(PoolError, match="666: its process died"):
        list(run_all(_double, [666], 1))


def test_what_is_refused_comes_as_it_was_raised():
    with pytest.raises(ValueError, match=r"^unlucky$"):
        list(run_all(_double, [1, 13], 1, (ValueError,)))
