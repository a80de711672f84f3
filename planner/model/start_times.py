"""From an order of ops to start times, and from start times to the period."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.model.arrays import Ints, ProblemArrays, ints
from planner.model.problem import Problem
from planner.model.solution import Solution


def earliest(arrays: ProblemArrays, order: Ints) -> Ints:
    """[op] start ticks: every op as early as the order allows."""
    start, free = np.zeros_like(arrays.ops.duration), np.zeros_like(arrays.column)
    _kernel().earliest(arrays.ops, order, start, free)
    return start


def latest(arrays: ProblemArrays, order: Ints, ends: Sequence[int] | Ints) -> Ints:
    """[op] start ticks: every op as late as the order and the ends of the columns allow."""
    start, free = np.zeros_like(arrays.ops.duration), np.asarray(ends, dtype=np.int64)[arrays.column]
    _kernel().latest(arrays.ops, order, start, free)
    return start


def _kernel() -> Any:
    from planner.search.kernel import start_times  # numba takes a third of a second to load

    return start_times


def column_ends(arrays: ProblemArrays, start: Ints) -> Ints:
    """[column] when the last op ends there, and on columns that reduce gradients together with it."""
    last = np.full(len(arrays.workers), start.min())
    np.maximum.at(last, arrays.ops.worker[arrays.ops.unit], start + arrays.ops.duration)
    return _ends(arrays, last)


def _ends(arrays: ProblemArrays, last: Ints) -> Ints:
    """`column_ends` from those of the workers."""
    ends = np.full(len(arrays.tied), last.min())
    np.maximum.at(ends, arrays.tied[arrays.column], last)
    return ends[arrays.tied]


def period(arrays: ProblemArrays, start: Ints, ends: Sequence[int] | Ints | None = None) -> int:
    """The period in ticks that start times give; `ends`: those of the columns where other pieces count, too."""
    first = np.full(len(arrays.workers), start.max())
    np.minimum.at(first, arrays.ops.worker[arrays.ops.unit], start)
    return _period(arrays, first, column_ends(arrays, start) if ends is None else np.asarray(ends))


def _period(arrays: ProblemArrays, first: Ints, ends: Ints) -> int:
    """`first`: [worker] when it begins, if it runs anything."""
    if arrays.problem.optimizer == "synchronous":
        closing = np.maximum(ends + arrays.tail, ends.max() + ints(arrays.problem.times.optimizer))
        return int(closing.max() - first.min())
    return int(((ends + arrays.tail)[arrays.column] - first)[arrays.load > 0].max())


def timed(arrays: ProblemArrays, order: Ints) -> tuple[int, Ints]:
    """The best period of an order, and [op] start ticks for it.

    Staggered: first as early as possible, then as late as the columns' ends allow, which shortens their windows.
    """
    start, free = np.zeros_like(arrays.ops.duration), np.zeros_like(arrays.column)
    _kernel().earliest(arrays.ops, order, start, free)
    ends = _ends(arrays, free)
    if arrays.problem.optimizer == "synchronous":
        return _period(arrays, np.zeros_like(free), ends), start
    free = ends[arrays.column]
    _kernel().latest(arrays.ops, order, start, free)
    return _period(arrays, free, ends), start


def solution_period(problem: Problem, solution: Solution) -> int:
    """The period in ticks that a solution gives."""
    arrays = ProblemArrays(problem, solution.hosts)
    return period(arrays, arrays.starts(solution))
