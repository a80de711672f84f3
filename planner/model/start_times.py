"""Compute start times from an order of ops, and the period from start times."""

from collections.abc import Sequence

import numpy as np

from slipstream.planner.loops import kernel_loops
from slipstream.planner.model.arrays import Ints, ProblemArrays, Solution, to_ints

NEVER = -2**60
"""Tick that is earlier than those of any plan; the end of a group without workers."""


def with_latest_starts(solution: Solution, ends: Sequence[int] | Ints) -> Solution:
    """Return a copy of the solution in which every op starts as late as its order and the ends of groups allow.

    The argument `ends` has the tick by which each group (workers that hold the same layers) must end its compute ops.
    """
    start, ends = np.zeros_like(solution.start), np.asarray(ends, dtype=np.int64)
    _compute_latest(solution.arrays, solution.order, start, ends[solution.arrays.group], ends)
    return solution.with_starts(start)


def _compute_latest(arrays: ProblemArrays, order: Ints, start: Ints, free: Ints, ends: Ints) -> None:
    begin = to_ints([])
    if arrays.problem.can_reduce_early:
        sharers = arrays.reductions.sharers
        begin = np.where(sharers >= 0, ends[sharers], -NEVER).min(axis=1)
    kernel_loops().set_latest_starts(arrays.ops, order, start, free, arrays.group, arrays.reductions, begin)


def compute_group_ends(*pieces: Solution) -> Ints:
    """Return the tick at which the last compute op of each group (workers that hold the same layers) ends.

    The solutions of all subproblems, `pieces`, must be on one clock. If reductions may lie between compute ops
    (`Problem.can_reduce_early`), return the start of each group's last reduction instead.
    """
    ends_by_piece = []
    for solution in pieces:
        arrays = solution.arrays
        if arrays.problem.can_reduce_early:
            return _last_reductions(arrays, compute_reduction_begins(pieces))
        last = np.full(len(arrays.workers), solution.start.min())
        np.maximum.at(last, arrays.ops.worker[arrays.ops.unit], solution.end)
        ends_by_piece.append(_ends_by_group(arrays, last))
    latest: Ints = np.max(ends_by_piece, axis=0)
    return latest


def compute_reduction_begins(pieces: Sequence[Solution]) -> Ints:
    """Return the start tick of each reduction, or NEVER if no subproblem has a W of its layers.

    The solutions of all subproblems, `pieces`, must be on one clock. The problem must be one in which reductions may
    lie between compute ops (`Problem.can_reduce_early`). A reduction starts at the first tick after the last W of its
    layers at which no worker that takes part runs an op.
    """
    begins: Ints = np.max([_last_awaited_ends(one) for one in pieces], axis=0)
    for number, groups in enumerate(pieces[0].arrays.reductions.sharers.tolist()):
        spans = [(one.start[held], one.end[held]) for one in pieces
                 for held in [np.isin(one.arrays.group, groups)[one.arrays.ops.worker[one.arrays.ops.unit]]]]
        first, end = (np.concatenate(ticks) for ticks in zip(*spans, strict=True))
        while (running := (first < begins[number]) & (begins[number] < end)).any():
            begins[number] = end[running].max()
    return begins


def _last_awaited_ends(solution: Solution) -> Ints:
    """Return, for each reduction, the tick at which the last W of its layers ends."""
    ops, (sharers, _, awaiting, _) = solution.arrays.ops, solution.arrays.reductions
    last = np.full(len(awaiting), NEVER)
    np.maximum.at(last, ops.slice, solution.end[ops.kinds - 1::ops.kinds])
    begins = np.full(len(sharers) + 1, NEVER)
    np.maximum.at(begins, awaiting, last[:, None])
    return begins[:-1]


def _last_reductions(arrays: ProblemArrays, begins: Ints) -> Ints:
    """Return, for each group (workers that hold the same layers), the start tick of its last reduction, given those of
    all reductions, `begins`."""
    between = arrays.reductions.between
    latest: Ints = np.where(between >= 0, np.append(begins, NEVER)[between], NEVER).max(axis=1)
    return latest


def _ends_by_group(arrays: ProblemArrays, last: Ints) -> Ints:
    """Return, for each group (workers that hold the same layers), the largest of its workers' ticks in `last`, one for
    each live worker; NEVER for a group without workers."""
    ends = np.full(len(arrays.problem.groups.linked), NEVER)
    np.maximum.at(ends, arrays.group, last)
    return ends


def place_reductions(arrays: ProblemArrays, ends: Sequence[int] | Ints) -> tuple[Ints, Ints]:
    """Return the start tick of each shared reduction, and the tick at which each group has finished its last one.

    A group is the workers that hold the same layers; `ends` has the end of its last compute op. All reductions must
    follow these ops: `Problem.can_reduce_early` must be false. If layers are held by column, there are no shared
    reductions, and a group is finished at its end.
    """
    sharers, ticks, *_ = arrays.reductions
    done, begin = np.array(ends, dtype=np.int64), np.zeros_like(ticks)
    kernel_loops().run_reductions(sharers, ticks, done, begin, np.zeros_like(ticks))
    return begin, done


def latest_group_ends(arrays: ProblemArrays, ends: Sequence[int] | Ints) -> Ints:
    """Return the latest tick at which the compute ops of each group (workers that hold the same layers) may end so that
    no reduction ends later than if they end at `ends`."""
    late = np.array(ends, dtype=np.int64)
    if not arrays.problem.can_reduce_early:
        sharers, ticks, *_ = arrays.reductions
        kernel_loops().delay_deadlines(sharers, ticks, late, np.zeros_like(late), np.zeros_like(ticks),
                                       np.zeros_like(ticks))
    return late


def solution_period(solution: Solution, ends: Sequence[int] | Ints | None = None) -> int:
    """Return the period of a solution, in ticks.

    The argument `ends` has the ticks by which groups (workers that hold the same layers) end their compute ops in all
    subproblems; None: those at which they do so in this solution.
    """
    arrays, start = solution.arrays, solution.start
    first = np.full(len(arrays.workers), start.max())
    np.minimum.at(first, arrays.ops.worker[arrays.ops.unit], start)
    return _period_of_windows(arrays, first, compute_group_ends(solution) if ends is None else np.asarray(ends))


def _period_of_windows(arrays: ProblemArrays, first: Ints, ends: Ints) -> int:
    """Return the period in ticks if workers first start at `first` and groups (workers that hold the same layers) end
    their compute ops at `ends`. Workers without ops are ignored."""
    done = ends if arrays.problem.can_reduce_early else place_reductions(arrays, ends)[1]
    closing = done[arrays.group] + arrays.ticks_after_group
    if arrays.problem.optimizer == "synchronous":
        last = max(closing.max(), ends.max() + arrays.problem.max_optimizer_ticks)
        return int(last - first.min())
    return int((closing - first)[arrays.load > 0].max())


def delayed_group_ends(arrays: ProblemArrays, ends: Ints) -> Ints:
    """Return the latest tick at which the compute ops of each group (workers that hold the same layers) may end without
    delaying the end of the iteration, which becomes tick 0. The optimizer must be synchronous.

    The argument `ends` has the ticks at which groups end their compute ops in a plan, by the plan's own clock. If later
    ends would change the order of the reductions and delay some of them, these ends are kept.
    """
    sharers, ticks, *_ = arrays.reductions
    done, turn, step = ends.copy(), np.zeros_like(ticks), arrays.problem.max_optimizer_ticks
    kernel_loops().run_reductions(sharers, ticks, done, np.zeros_like(ticks), turn)
    last = max((done[arrays.group] + arrays.ticks_after_group).max(), ends.max() + step)
    allowed = np.full_like(ends, last)
    allowed[arrays.group] = last - arrays.ticks_after_group
    late = allowed.copy()
    kernel_loops().set_latest_compute_ends(sharers, ticks, turn, late)
    late = np.minimum(late, last - step)
    if (place_reductions(arrays, late)[1] > allowed).any():
        late = ends
    return late - np.int64(last)


def time_order(arrays: ProblemArrays, order: Ints) -> tuple[int, Ints]:
    """Return the period, in ticks, and the start tick of each op, if workers run the ops in the sequence `order`.

    Ops start as early as possible. With a staggered optimizer, they then start as late as the ends of the groups
    (workers that hold the same layers) allow, which shortens the windows.
    """
    start, free = np.zeros_like(arrays.ops.duration), np.zeros_like(arrays.group)
    kernel_loops().set_earliest_starts(arrays.ops, order, start, free)
    ends = _ends_by_group(arrays, free)
    if arrays.problem.optimizer == "synchronous":
        return _period_of_windows(arrays, np.zeros_like(free), ends), start
    if arrays.problem.can_reduce_early:  # linked groups end together here; annealing separates them
        ends = np.array([ends[list(groups)].max() for groups in arrays.problem.groups.linked])
    ends = latest_group_ends(arrays, ends)
    free = ends[arrays.group]
    _compute_latest(arrays, order, start, free, ends)
    return _period_of_windows(arrays, free, ends), start
