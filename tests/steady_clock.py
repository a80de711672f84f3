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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

from ortools.sat.python import cp_model

import planner
from planner.layout import cuts, division
from planner.search.annealing.chain import AnnealingChain
from planner.search.cpsat import model as cpsat_model
from planner.search.list_scheduler import ListScheduler

READING = 1_000
"""Nanoseconds that pass when the clock is read, so that no wait for a time lasts for ever."""
LIST_SCHEDULE, LIST_SCHEDULE_OP = 100_000, 300
"""Nanoseconds of a list schedule, and of each of its ops."""
SCHEDULER_OP = 600
"""Nanoseconds for each op to make a list scheduler."""
CUT_LAYER = 3_000
"""Nanoseconds for each layer to cut a line of workers."""
ANNEALING_STEP = 2_500
"""Nanoseconds of a step of annealing: two chains run side by side for twice that."""
SOLVER_UNITS = 0.2
"""Units of CP-SAT's own count of its steps in a second, where it is asked for little."""
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
    solve = cp_model.CpSolver.solve

    def solve_in_steps(solver, *given):
        solver.parameters.max_deterministic_time = SOLVER_UNITS * solver.parameters.max_time_in_seconds
        solver.parameters.max_time_in_seconds = math.inf
        return solve(solver, *given)

    with ExitStack() as replaced:
        replaced.enter_context(mock.patch.object(cp_model.CpSolver, "solve", solve_in_steps))
        for place, name, cost in STEPS:
            step = _counted(clock, getattr(place, name), cost)
            replaced.enter_context(mock.patch.object(place, name, step))
        for module in _readers():
            replaced.enter_context(mock.patch.object(module, "time", clock))
        yield clock


def _counted(clock: SteadyClock, function: Callable[..., object], cost: Callable[..., float]) -> Callable[..., object]:
    """The function, which takes time by its arguments."""
    def counted(*given, **how):
        answer = function(*given, **how)
        clock.advance(round(cost(*given)))
        return answer

    return counted


def _solver_cost(solver: cp_model.CpSolver, *_: object) -> float:
    """CP-SAT's own count, where it is waited for: beside annealing it takes no time of its own."""
    waited_for = threading.current_thread() is threading.main_thread()
    return 1e9 / SOLVER_UNITS * solver.deterministic_time if waited_for else 0


STEPS: tuple[tuple[object, str, Callable[..., float]], ...] = (
    (ListScheduler, "__init__", lambda _, arrays: SCHEDULER_OP * len(arrays.ops.unit)),
    (ListScheduler, "order", lambda made, _: LIST_SCHEDULE + LIST_SCHEDULE_OP * len(made.arrays.ops.unit)),
    (AnnealingChain, "advance", lambda _, steps: ANNEALING_STEP * steps),
    (cuts, "cut", lambda problem, *_: CUT_LAYER * problem.layer_count),
    (division, "cut", lambda problem, *_: CUT_LAYER * problem.layer_count),
    (cp_model.CpSolver, "solve", _solver_cost), (cpsat_model, "_solve", _solver_cost))
"""What searches consist of, and the nanoseconds that each takes, by its arguments."""


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
