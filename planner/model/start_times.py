"""From an order of ops to start times, and from start times to the period."""

from collections.abc import Sequence

import numpy as np

from slipstream.planner.loops import loops
from slipstream.planner.model.arrays import Ints, ProblemArrays, Solution, ints

NEVER = -2**60
"""Before all ticks."""


def earliest(arrays: ProblemArrays, order: Ints) -> Ints:
    """[op] start ticks: every op as early as the order allows."""
    start, free = np.zeros_like(arrays.ops.duration), np.zeros_like(arrays.group)
    loops().earliest(arrays.ops, order, start, free)
    return start


def latest(solution: Solution, ends: Sequence[int] | Ints) -> Solution:
    """The same order, every op as late as that and the ends of the groups allow."""
    start, ends = np.zeros_like(solution.start), np.asarray(ends, dtype=np.int64)
    _latest(solution.arrays, solution.order, start, ends[solution.arrays.group], ends)
    return solution.at(start)


def _latest(arrays: ProblemArrays, order: Ints, start: Ints, free: Ints, ends: Ints) -> None:
    begin = ints([])
    if arrays.problem.interleaved:
        sharers = arrays.reductions.sharers
        begin = np.where(sharers >= 0, ends[sharers], -NEVER).min(axis=1)
    loops().latest(arrays.ops, order, start, free, arrays.group, arrays.reductions, begin)


def group_ends(*pieces: Solution) -> Ints:
    """[group] when the last compute op of its workers ends; interleaved, when the last of its reductions begins.

    In pieces on one clock.
    """
    found = []
    for one in pieces:
        arrays = one.arrays
        if arrays.problem.interleaved:
            return _last_reductions(arrays, reduction_begins(pieces))
        last = np.full(len(arrays.workers), one.start.min())
        np.maximum.at(last, arrays.ops.worker[arrays.ops.unit], one.end)
        found.append(_ends(arrays, last))
    latest: Ints = np.max(found, axis=0)
    return latest


def reduction_begins(pieces: Sequence[Solution]) -> Ints:
    """[reduction] the first tick after W of its layers at which no worker that takes part runs an op; NEVER without W.

    Of an interleaved problem: its pieces on one clock.
    """
    begins: Ints = np.max([_awaited(one) for one in pieces], axis=0)
    for number, groups in enumerate(pieces[0].arrays.reductions.sharers.tolist()):
        spans = [(one.start[held], one.end[held]) for one in pieces
                 for held in [np.isin(one.arrays.group, groups)[one.arrays.ops.worker[one.arrays.ops.unit]]]]
        first, end = (np.concatenate(ticks) for ticks in zip(*spans, strict=True))
        while (over := (first < begins[number]) & (begins[number] < end)).any():
            begins[number] = end[over].max()
    return begins


def _awaited(solution: Solution) -> Ints:
    """[reduction] when the last W that it awaits ends."""
    ops, (sharers, _, awaiting, _) = solution.arrays.ops, solution.arrays.reductions
    last = np.full(len(awaiting), NEVER)
    np.maximum.at(last, ops.slice, solution.end[ops.kinds - 1::ops.kinds])
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


def reduced(arrays: ProblemArrays, ends: Sequence[int] | Ints) -> tuple[Ints, Ints]:
    """([reduction] when it begins, [group] when its last one is done) where compute ops of groups end at these ticks.

    Of a problem that is not interleaved. Where layers are held by column, there are none: a group is done at its end.
    """
    sharers, ticks, *_ = arrays.reductions
    done, begin = np.array(ends, dtype=np.int64), np.zeros_like(ticks)
    loops().reduce(sharers, ticks, done, begin, np.zeros_like(ticks))
    return begin, done


def late_ends(arrays: ProblemArrays, ends: Sequence[int] | Ints) -> Ints:
    """[group] how late its compute ops may end without delaying the end of any reduction."""
    late = np.array(ends, dtype=np.int64)
    if not arrays.problem.interleaved:
        sharers, ticks, *_ = arrays.reductions
        loops().close(sharers, ticks, late, np.zeros_like(late), np.zeros_like(ticks), np.zeros_like(ticks))
    return late


def solution_period(solution: Solution, ends: Sequence[int] | Ints | None = None) -> int:
    """The period in ticks that a solution gives; `ends`: those of the groups where other pieces count, too."""
    arrays, start = solution.arrays, solution.start
    first = np.full(len(arrays.workers), start.max())
    np.minimum.at(first, arrays.ops.worker[arrays.ops.unit], start)
    return _period(arrays, first, group_ends(solution) if ends is None else np.asarray(ends))


def _period(arrays: ProblemArrays, first: Ints, ends: Ints) -> int:
    """`first`: [worker] when it begins, if it runs anything."""
    done = ends if arrays.problem.interleaved else reduced(arrays, ends)[1]
    closing = done[arrays.group] + arrays.after_group
    if arrays.problem.optimizer == "synchronous":
        last = max(closing.max(), ends.max() + arrays.problem.longest_step)
        return int(last - first.min())
    return int((closing - first)[arrays.load > 0].max())


def ends_before_last(arrays: ProblemArrays, ends: Ints) -> Ints:
    """[group] how late its compute ops may end without delaying the end of the job, which is 0.

    Synchronous; `ends` are those of a plan in which the job ends when it does. Where reductions would then come in
    another order, and some be late, ends stay as they are.
    """
    sharers, ticks, *_ = arrays.reductions
    done, turn, step = ends.copy(), np.zeros_like(ticks), arrays.problem.longest_step
    loops().reduce(sharers, ticks, done, np.zeros_like(ticks), turn)
    last = max((done[arrays.group] + arrays.after_group).max(), ends.max() + step)
    allowed = np.full_like(ends, last)
    allowed[arrays.group] = last - arrays.after_group
    late = allowed.copy()
    loops().put_off(sharers, ticks, turn, late)
    late = np.minimum(late, last - step)
    if (reduced(arrays, late)[1] > allowed).any():
        late = ends
    return late - np.int64(last)


def timed(arrays: ProblemArrays, order: Ints) -> tuple[int, Ints]:
    """The best period of an order, and [op] start ticks for it.

    Staggered: first as early as possible, then as late as the groups' ends allow, which shortens their windows.
    """
    start, free = np.zeros_like(arrays.ops.duration), np.zeros_like(arrays.group)
    loops().earliest(arrays.ops, order, start, free)
    ends = _ends(arrays, free)
    if arrays.problem.optimizer == "synchronous":
        return _period(arrays, np.zeros_like(free), ends), start
    if arrays.problem.interleaved:  # each reduction after all that are linked to it: annealing begins them earlier
        ends = np.array([ends[list(groups)].max() for groups in arrays.problem.linked])
    ends = late_ends(arrays, ends)
    free = ends[arrays.group]
    _latest(arrays, order, start, free, ends)
    return _period(arrays, free, ends), start
