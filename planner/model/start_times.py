"""From an order of ops to start times, and from start times to the period."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.model.arrays import Ints, ProblemArrays
from planner.model.problem import Problem
from planner.model.solution import Solution

NEVER = -2**60
"""Before all ticks."""


def earliest(arrays: ProblemArrays, order: Ints) -> Ints:
    """[op] start ticks: every op as early as the order allows."""
    start, free = np.zeros_like(arrays.ops.duration), np.zeros_like(arrays.group)
    _kernel().earliest(arrays.ops, order, start, free)
    return start


def latest(arrays: ProblemArrays, order: Ints, ends: Sequence[int] | Ints) -> Ints:
    """[op] start ticks: every op as late as the order and the ends of the groups allow."""
    start, ends = np.zeros_like(arrays.ops.duration), np.asarray(ends, dtype=np.int64)
    _latest(arrays, order, start, ends[arrays.group], ends)
    return start


def _latest(arrays: ProblemArrays, order: Ints, start: Ints, free: Ints, ends: Ints) -> None:
    sharers = arrays.reductions.sharers
    begin = np.where(sharers >= 0, ends[sharers], -NEVER).min(axis=1)
    _kernel().latest(arrays.ops, order, start, free, arrays.group, arrays.reductions, begin)


def _kernel() -> Any:
    from planner.search.kernel import start_times  # numba takes a third of a second to load

    return start_times


def group_ends(arrays: ProblemArrays, start: Ints) -> Ints:
    """[group] when the last compute op of its workers ends; interleaved, when the last of its reductions begins."""
    if arrays.problem.interleaved:
        return _last_reductions(arrays, reduction_begins([(arrays, start)]))
    last = np.full(len(arrays.workers), start.min())
    np.maximum.at(last, arrays.ops.worker[arrays.ops.unit], start + arrays.ops.duration)
    return _ends(arrays, last)


def common_ends(timed: Sequence[tuple[ProblemArrays, Ints]]) -> Ints:
    """`group_ends` of several pieces on one clock, each with its start ticks."""
    arrays = timed[0][0]
    if arrays.problem.interleaved:
        return _last_reductions(arrays, reduction_begins(timed))
    latest: Ints = np.max([group_ends(*one) for one in timed], axis=0)
    return latest


def reduction_begins(timed: Sequence[tuple[ProblemArrays, Ints]]) -> Ints:
    """[reduction] the first tick after W of its layers at which no worker that takes part runs an op; NEVER without W.

    Of an interleaved problem: its pieces on one clock.
    """
    begins: Ints = np.max([_awaited(*one) for one in timed], axis=0)
    for number, groups in enumerate(timed[0][0].reductions.sharers.tolist()):
        spans = [(start[held], (start + arrays.ops.duration)[held]) for arrays, start in timed
                 for held in [np.isin(arrays.group, groups)[arrays.ops.worker[arrays.ops.unit]]]]
        first, end = (np.concatenate(ticks) for ticks in zip(*spans, strict=True))
        while (over := (first < begins[number]) & (begins[number] < end)).any():
            begins[number] = end[over].max()
    return begins


def _awaited(arrays: ProblemArrays, start: Ints) -> Ints:
    """[reduction] when the last W that it awaits ends."""
    ops, (sharers, awaiting, _) = arrays.ops, arrays.reductions
    last = np.full(len(awaiting), NEVER)
    np.maximum.at(last, ops.slice, (start + ops.duration)[ops.kinds - 1::ops.kinds])
    begins = np.full(len(sharers) + 1, NEVER)
    np.maximum.at(begins, awaiting, last[:, None])
    return begins[:-1]


def _last_reductions(arrays: ProblemArrays, begins: Ints) -> Ints:
    """[group] the last of the reductions that its workers take part in."""
    between = arrays.reductions.between
    latest: Ints = np.where(between >= 0, np.append(begins, NEVER)[between], NEVER).max(axis=1)
    return latest


def _ends(arrays: ProblemArrays, last: Ints) -> Ints:
    """`group_ends` from those of the workers; NEVER for groups without any."""
    ends = np.full(len(arrays.problem.linked), NEVER)
    np.maximum.at(ends, arrays.group, last)
    return ends


def reduce_ends(problem: Problem, ends: Sequence[int] | Ints) -> Ints:
    """[group] when all compute ops are done that the all-reduces of its workers wait for."""
    ends = np.asarray(ends)
    if problem.holdings is None or problem.interleaved:
        return ends
    return np.array([ends[list(groups)].max() for groups in problem.linked])


def late_ends(problem: Problem, ends: Ints) -> Ints:
    """[group] how late its workers may end without delaying any all-reduce."""
    if problem.holdings is None or problem.interleaved:
        return ends
    latest = np.full_like(ends, ends.max())
    for _, groups in problem.reductions:
        members = list(groups)
        latest[members] = np.minimum(latest[members], ends[members].max())
    return latest


def period(arrays: ProblemArrays, start: Ints, ends: Sequence[int] | Ints | None = None) -> int:
    """The period in ticks that start times give; `ends`: those of the groups where other pieces count, too."""
    first = np.full(len(arrays.workers), start.max())
    np.minimum.at(first, arrays.ops.worker[arrays.ops.unit], start)
    return _period(arrays, first, group_ends(arrays, start) if ends is None else np.asarray(ends))


def _period(arrays: ProblemArrays, first: Ints, ends: Ints) -> int:
    """`first`: [worker] when it begins, if it runs anything."""
    closing = reduce_ends(arrays.problem, ends)[arrays.group] + arrays.tail
    if arrays.problem.optimizer == "synchronous":
        last = max(closing.max(), ends.max() + arrays.problem.longest_step)
        return int(last - first.min())
    return int((closing - first)[arrays.load > 0].max())


def period_until(arrays: ProblemArrays, start: Ints, ends: Ints) -> int:
    """The longest window in ticks, staggered, where those of [group] end at these ticks; synchronous: the last one."""
    first = np.full(len(arrays.workers), start.max())
    np.minimum.at(first, arrays.ops.worker[arrays.ops.unit], start)
    if arrays.problem.optimizer == "synchronous":
        return int(ends.max() - first.min())
    return int((ends[arrays.group] - first)[arrays.load > 0].max())


def timed(arrays: ProblemArrays, order: Ints) -> tuple[int, Ints]:
    """The best period of an order, and [op] start ticks for it.

    Staggered: first as early as possible, then as late as the groups' ends allow, which shortens their windows.
    """
    start, free = np.zeros_like(arrays.ops.duration), np.zeros_like(arrays.group)
    _kernel().earliest(arrays.ops, order, start, free)
    ends = _ends(arrays, free)
    if arrays.problem.optimizer == "synchronous":
        return _period(arrays, np.zeros_like(free), ends), start
    if arrays.problem.interleaved:  # each reduction after all that are linked to it: annealing begins them earlier
        ends = np.array([ends[list(groups)].max() for groups in arrays.problem.linked])
    ends = late_ends(arrays.problem, ends)
    free = ends[arrays.group]
    _latest(arrays, order, start, free, ends)
    return _period(arrays, free, ends), start


def solution_period(problem: Problem, solution: Solution) -> int:
    """The period in ticks that a solution gives."""
    arrays = ProblemArrays(problem, solution.hosts)
    return period(arrays, arrays.starts(solution))
