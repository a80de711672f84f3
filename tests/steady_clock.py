"""A clock that goes with the steps of a search and not with the machine, for tests that plan within a time limit.

Under it the same search makes the same steps on any machine, however busy: what two plans are compared by, how much
list schedules find within a share of the time, and which layouts are tried, no longer depends on what else runs.
Everything that searches is real. Time passes by about as much as the steps take on an idle core.
"""

import importlib
import math
import pkgutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

from ortools.sat.python import cp_model

import planner
from planner.search.annealing.chain import AnnealingChain
from planner.search.annealing.cooling import OPS_PER_SLICE
from planner.search.cpsat import model as cpsat_model
from planner.search.list_scheduler import ListScheduler

READING = 1_000
"""Nanoseconds that pass when the clock is read, so that no wait for a time lasts for ever."""
LIST_SCHEDULE, LIST_SCHEDULE_OP = 100_000, 300
"""Nanoseconds of a list schedule, and of each of its ops."""
SLICE = 25_000_000
"""Nanoseconds of a slice of annealing: two chains run side by side for twice that."""
PACKAGES = ("planner", "cli", "tests")


class SteadyClock:
    """In place of the module `time`: its clocks are one, which counts steps. Whole nanoseconds, in any order."""

    def __init__(self) -> None:
        self._now, self._lock = 0, threading.Lock()

    def advance(self, nanoseconds: int) -> None:
        """So much more time is over."""
        with self._lock:
            self._now += nanoseconds

    def monotonic(self) -> float:
        """Seconds."""
        if threading.current_thread() is threading.main_thread():
            self.advance(READING)
        return self._now / 1e9

    perf_counter = process_time = thread_time = monotonic

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


@contextmanager
def steadily() -> Iterator[SteadyClock]:
    """Within it, all searches of this process go by a steady clock."""
    clock = SteadyClock()
    order, advance, solve, solve_beside = (
        ListScheduler.order, AnnealingChain.advance, cp_model.CpSolver.solve, cpsat_model._solve)

    def order_in_time(scheduler, rule):
        clock.advance(LIST_SCHEDULE + LIST_SCHEDULE_OP * len(scheduler.arrays.ops.unit))
        return order(scheduler, rule)

    def advance_in_time(chain, steps):
        before = chain.steps
        advance(chain, steps)
        ops = len(chain._arrays.ops.duration) // chain._problem.grid.pipelines
        clock.advance(SLICE * (chain.steps - before) * ops // OPS_PER_SLICE)

    def solve_in_steps(solver, *given):
        solver.parameters.max_deterministic_time = solver.parameters.max_time_in_seconds
        solver.parameters.max_time_in_seconds = math.inf
        status = solve(solver, *given)
        if threading.current_thread() is threading.main_thread():
            clock.advance(round(1e9 * solver.deterministic_time))
        return status

    def solve_beside_in_time(solver, *given):
        status = solve_beside(solver, *given)
        if threading.current_thread() is threading.main_thread():
            clock.advance(round(1e9 * solver.deterministic_time))
        return status

    with ExitStack() as replaced:
        for place, name, function in (
                (ListScheduler, "order", order_in_time), (AnnealingChain, "advance", advance_in_time),
                (cp_model.CpSolver, "solve", solve_in_steps), (cpsat_model, "_solve", solve_beside_in_time)):
            replaced.enter_context(mock.patch.object(place, name, function))
        for module in _readers():
            replaced.enter_context(mock.patch.object(module, "time", clock))
        yield clock


def _readers() -> list[object]:
    """All modules that read a clock; those of tests, too, which set deadlines."""
    _import_all()
    return [module for name, module in list(sys.modules.items())
            if name.partition(".")[0] in PACKAGES and name != __name__ and getattr(module, "time", None) is time]


@cache
def _import_all() -> None:
    """The modules of the planner that are imported when they are needed, too."""
    for found in pkgutil.walk_packages(planner.__path__, "planner."):
        importlib.import_module(found.name)
