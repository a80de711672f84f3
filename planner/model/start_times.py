"""Compute start times from an order of ops, and the period from start times."""

import itertools
from bisect import insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from slipstream.planner.loops import kernel_loops
from slipstream.planner.model.arrays import Ints, ProblemArrays, Solution, to_ints
from slipstream.planner.model.problem import Problem

NEVER = -(2**60)
"""Tick before those of any plan, used as the end of a group without workers."""


def with_latest_starts(solution: Solution, ends: Sequence[int] | Ints) -> Solution:
    """Return a copy of the solution in which every op starts as late as possible.

    Ops keep their order. `ends` has the tick by which each group must end its compute ops; if
    `Problem.anneals_reductions`, the tick at which each reduction begins.
    """
    arrays, start = solution.arrays, np.zeros_like(solution.start)
    ends = np.asarray(ends, dtype=np.int64)
    begin = None
    if arrays.problem.anneals_reductions:
        begin, ends = ends, ends_of_reductions(arrays, ends)
    _compute_latest(arrays, solution.order, start, ends[arrays.group], ends, begin)
    return solution.with_starts(start)


def ends_of_reductions(arrays: ProblemArrays, begin: Ints) -> Ints:
    """Return the end tick of each group's last reduction; NEVER if it has none.

    `begin` has the tick at which each reduction begins.
    """
    between, last = arrays.reductions.between, begin + arrays.reductions.ticks
    latest: Ints = np.where(between >= 0, np.append(last, NEVER)[between], NEVER).max(axis=1)
    return latest


def get_deadlines(*pieces: Solution) -> Ints:
    """Return the ticks at which groups end compute, on which all subproblems must agree.

    They are those of `compute_group_ends`. If `Problem.reduces_in_bubbles`, return the ticks at
    which reductions begin instead. The solutions of all subproblems, `pieces`, must be on one
    clock.
    """
    if pieces[0].arrays.problem.reduces_in_bubbles:
        return place_in_bubbles(pieces).begin
    return compute_group_ends(*pieces)


def _compute_latest(
    arrays: ProblemArrays,
    order: Ints,
    start: Ints,
    free: Ints,
    ends: Ints,
    begin: Ints | None = None,
) -> None:
    begin = to_ints([]) if begin is None else begin
    if arrays.problem.can_reduce_early:
        # Here reductions take no time: one begins at the earliest end of the groups that share it.
        sharers = arrays.reductions.sharers
        begin = np.where(sharers >= 0, ends[sharers], -NEVER).min(axis=1)
    kernel_loops().set_latest_starts(
        arrays.ops, order, start, free, arrays.group, arrays.reductions, begin
    )


def compute_group_ends(*pieces: Solution) -> Ints:
    """Return the tick at which the last compute op of each group ends.

    The `pieces` are the solutions of all subproblems, on one clock. A group whose workers are in
    none of them gets NEVER. With `Problem.can_reduce_early`, return the start of each group's last
    reduction instead.
    """
    ends_by_piece = []
    for solution in pieces:
        arrays = solution.arrays
        if arrays.problem.can_reduce_early:
            return _last_reductions(arrays, compute_reduction_begins(pieces))
        ends_by_piece.append(_ends_by_group(arrays, _last_ends(arrays, solution.start)))
    latest: Ints = np.max(ends_by_piece, axis=0)
    return latest


def compute_reduction_begins(pieces: Sequence[Solution]) -> Ints:
    """Return the start tick of each reduction if it may lie between compute ops.

    The solutions of all subproblems, `pieces`, must be on one clock, and `Problem.can_reduce_early`
    true. A reduction starts at the first tick after the last W of its layers at which no worker
    that takes part runs an op; NEVER if there is no such W.
    """
    # Not before the last W of its layers in any subproblem.
    begins: Ints = np.max(
        [_last_awaited_ends(piece.arrays, piece.start) for piece in pieces], axis=0
    )
    for number, groups in enumerate(pieces[0].arrays.reductions.sharers.tolist()):
        firsts, ends = [], []
        for piece in pieces:
            ops = piece.arrays.ops
            takes_part = np.isin(piece.arrays.group, groups)[ops.worker[ops.unit]]
            firsts.append(piece.start[takes_part])
            ends.append(piece.end[takes_part])
        first, end = np.concatenate(firsts), np.concatenate(ends)
        # Move the reduction behind each op that runs at its start.
        while (running := (first < begins[number]) & (begins[number] < end)).any():
            begins[number] = end[running].max()
    return begins


MAX_PERMUTED = 4
"""Largest number of reductions of a group of which all orders are tried."""


class BubblePlaces(NamedTuple):
    """Ticks at which reductions run if they may lie in bubbles between compute ops."""

    begin: Ints
    """Start tick of each reduction; NEVER if no W precedes it."""
    done: Ints
    """Tick at which each group has finished compute and reductions; NEVER if none is placed."""


def place_in_bubbles(pieces: Sequence[Solution]) -> BubblePlaces:
    """Place all reductions, in bubbles where they fit, so that their groups finish early.

    Compute ops stay as they are. A reduction follows the last W of its layers, where all workers of
    its group are idle for as long as it takes. The solutions of all subproblems, `pieces`, must be
    on one clock, and `Problem.reduces_in_bubbles` must be true.
    """
    timed = [(piece.arrays, piece.start) for piece in pieces]
    return _place_in_bubbles(pieces[0].arrays.problem, timed)


def _place_in_bubbles(
    problem: Problem, pieces: Sequence[tuple[ProblemArrays, Ints]]
) -> BubblePlaces:
    # A reduction may begin after the last W of its layers, wherever that runs.
    ready = np.max([_last_awaited_ends(arrays, start) for arrays, start in pieces], axis=0).tolist()
    ticks = [problem.reduction_ticks(layers) for layers, _ in problem.groups.reductions]
    begin, done = np.full(len(ticks), NEVER), np.full(len(problem.groups.held), NEVER)
    for group in range(len(done)):
        numbers = [
            number
            for number, (_, groups) in enumerate(problem.groups.reductions)
            if group in groups
        ]
        if not numbers or ready[numbers[0]] == NEVER:
            continue
        # Few reductions are placed in all orders, many in the order in which they become ready.
        busy = _busy_spans(pieces, group, min(ready[number] for number in numbers))
        orders: Iterable[Sequence[int]] = [sorted(numbers, key=ready.__getitem__)]
        if len(numbers) <= MAX_PERMUTED:
            orders = itertools.permutations(numbers)
        best = min(
            (_fill_gaps(order, ready, ticks, busy) for order in orders),
            key=lambda placed: placed[0],
        )
        done[group] = best[0]
        for number, tick in best[1].items():
            begin[number] = tick
    return BubblePlaces(begin, done)


def _busy_spans(
    pieces: Sequence[tuple[ProblemArrays, Ints]], group: int, after: int
) -> list[tuple[int, int]]:
    """Return the ascending (start, end) of a group's ops that end after tick `after`."""
    spans: list[tuple[int, int]] = []
    for arrays, start in pieces:
        end = start + arrays.ops.duration
        wanted = (arrays.group[arrays.ops.worker[arrays.ops.unit]] == group) & (end > after)
        spans += zip(start[wanted].tolist(), end[wanted].tolist(), strict=True)
    return sorted(spans)


def _fill_gaps(
    order: Sequence[int],
    ready: Sequence[int],
    ticks: Sequence[int],
    busy: Sequence[tuple[int, int]],
) -> tuple[int, dict[int, int]]:
    """Place reductions in this order; return the last end, and each reduction's start."""
    spans, begins, done = list(busy), dict[int, int](), max((end for _, end in busy), default=NEVER)
    for number in order:
        tick = ready[number]
        # The first gap after the last W in which all workers of the group are idle for long enough.
        for first, end in spans:
            if first >= tick + ticks[number] and end > tick:
                break
            tick = max(tick, end)
        begins[number] = tick
        insort(spans, (tick, tick + ticks[number]))
        done = max(done, tick + ticks[number])
    return done, begins


def _ticks_saved(problem: Problem, pieces: Sequence[tuple[ProblemArrays, Ints]]) -> Ints:
    """Return by how many ticks each group finishes earlier because reductions lie in bubbles."""
    saved = np.zeros(len(problem.groups.held), dtype=np.int64)
    if not problem.reduces_in_bubbles:
        return saved
    done = _place_in_bubbles(problem, pieces).done
    # Without bubbles, all reductions would follow the last compute op.
    last = np.max(
        [_ends_by_group(arrays, _last_ends(arrays, start)) for arrays, start in pieces], axis=0
    )
    for group, end in enumerate(done.tolist()):
        if end > NEVER:
            saved[group] = last[group] + problem.ticks_of_reductions(group) - end
    return saved


def compute_ticks_saved(pieces: Sequence[Solution]) -> Ints:
    """Return by how many ticks each group finishes earlier because reductions lie in bubbles.

    The comparison is with reductions that all follow the group's compute ops; 0 unless
    `Problem.reduces_in_bubbles`. The solutions of all subproblems, `pieces`, must be on one clock.
    """
    return _ticks_saved(pieces[0].arrays.problem, [(piece.arrays, piece.start) for piece in pieces])


def _last_ends(arrays: ProblemArrays, start: Ints) -> Ints:
    """Return each worker's last end of an op; without one, the first start of all."""
    last = np.full(len(arrays.workers), start.min())
    np.maximum.at(last, arrays.ops.worker[arrays.ops.unit], start + arrays.ops.duration)
    return last


def _last_awaited_ends(arrays: ProblemArrays, start: Ints) -> Ints:
    """Return, for each reduction, the tick at which the last W of its layers ends."""
    ops, (sharers, _, awaiting, _) = arrays.ops, arrays.reductions
    last = np.full(len(awaiting), NEVER)
    np.maximum.at(last, ops.slice, (start + ops.duration)[ops.kinds - 1 :: ops.kinds])
    begins = np.full(len(sharers) + 1, NEVER)
    np.maximum.at(begins, awaiting, last[:, None])
    return begins[:-1]


def _last_reductions(arrays: ProblemArrays, begins: Ints) -> Ints:
    """Return the start tick of each group's last reduction."""
    between = arrays.reductions.between
    latest: Ints = np.where(between >= 0, np.append(begins, NEVER)[between], NEVER).max(axis=1)
    return latest


def _ends_by_group(arrays: ProblemArrays, last: Ints) -> Ints:
    """Return, for each group, the largest of its workers' ticks in `last`."""
    ends = np.full(len(arrays.problem.groups.linked), NEVER)
    np.maximum.at(ends, arrays.group, last)
    return ends


def place_reductions(arrays: ProblemArrays, ends: Sequence[int] | Ints) -> tuple[Ints, Ints]:
    """Return the start tick of each reduction, and the end tick of each group.

    Reductions follow the compute ops, which end at `ends` [group]; a group ends with its last
    reduction. `Problem.can_reduce_early` must be false. Unless `Problem.times_each_reduction`,
    there are no reductions in the arrays, and each group ends at `ends`.
    """
    sharers, ticks, *_ = arrays.reductions
    done, begin = np.array(ends, dtype=np.int64), np.zeros_like(ticks)
    kernel_loops().run_reductions(sharers, ticks, done, begin, np.zeros_like(ticks))
    return begin, done


def latest_group_ends(arrays: ProblemArrays, ends: Sequence[int] | Ints) -> Ints:
    """Return how late, in ticks, each group may end compute without delaying a reduction.

    The comparison is with groups that end compute at `ends`; these ends are returned unchanged if
    `Problem.can_reduce_early` or `Problem.anneals_reductions`.
    """
    late = np.array(ends, dtype=np.int64)
    if not (arrays.problem.can_reduce_early or arrays.problem.anneals_reductions):
        sharers, ticks, *_ = arrays.reductions
        kernel_loops().delay_deadlines(
            sharers, ticks, late, np.zeros_like(late), np.zeros_like(ticks), np.zeros_like(ticks)
        )
    return late


def solution_period(
    solution: Solution, ends: Sequence[int] | Ints | None = None, saved: Ints | None = None
) -> int:
    """Return the period of a solution, in ticks.

    `ends` has the ticks at which groups end compute in all subproblems, and `saved` what
    `compute_ticks_saved` returns for all of them; None: this solution is the only one.
    """
    arrays, start = solution.arrays, solution.start
    first = np.full(len(arrays.workers), start.max())
    np.minimum.at(first, arrays.ops.worker[arrays.ops.unit], start)
    group_ends = compute_group_ends(solution) if ends is None else np.asarray(ends)
    if saved is None:
        saved = compute_ticks_saved([solution])
    return _period_of_windows(arrays, first, group_ends, saved)


def _period_of_windows(arrays: ProblemArrays, first: Ints, ends: Ints, saved: Ints) -> int:
    """Return the period, in ticks, given workers' first starts and groups' compute ends."""
    done = ends if arrays.problem.can_reduce_early else place_reductions(arrays, ends)[1]
    closing = (done - saved)[arrays.group] + arrays.ticks_after_group
    # All windows then begin together with the first op, and end after the last op of the job.
    if arrays.problem.optimizer == "synchronous":
        last = max(closing[arrays.load > 0].max(), ends.max() + arrays.problem.max_optimizer_ticks)
        return int(last - first.min())
    return int((closing - first)[arrays.load > 0].max())


def delayed_group_ends(arrays: ProblemArrays, ends: Ints) -> Ints:
    """Return the latest ticks at which groups may end compute without delaying the iteration.

    The optimizer is synchronous. `ends` has the ticks in the plan; the result counts from the end
    of the iteration, at tick 0. If later ends would reorder and so delay reductions, the ends of
    the plan are kept.
    """
    sharers, ticks, *_ = arrays.reductions
    # Forward: when the iteration ends if compute ends at `ends`, and the order of the reductions.
    done, turn, step = ends.copy(), np.zeros_like(ticks), arrays.problem.max_optimizer_ticks
    kernel_loops().run_reductions(sharers, ticks, done, np.zeros_like(ticks), turn)
    last = max((done[arrays.group] + arrays.ticks_after_group).max(), ends.max() + step)
    # Backward: how late compute may end for that, with the reductions in the same order.
    allowed = np.full_like(ends, last)
    allowed[arrays.group] = last - arrays.ticks_after_group
    late = allowed.copy()
    kernel_loops().set_latest_compute_ends(sharers, ticks, turn, late)
    late = np.minimum(late, last - step)
    # Later ends may change the order; then keep those of the plan.
    if (place_reductions(arrays, late)[1] > allowed).any():
        late = ends
    return late - np.int64(last)


def time_order(arrays: ProblemArrays, order: Ints) -> tuple[int, Ints]:
    """Return the period and each op's start, in ticks, if workers follow `order`.

    Each op starts as early as possible. With a staggered optimizer, ops then start as late as the
    ends of the groups allow, which shortens the busy windows.
    """
    # Forward: as early as possible, which gives the earliest ends of the groups.
    start, free = np.zeros_like(arrays.ops.duration), np.zeros_like(arrays.group)
    kernel_loops().set_earliest_starts(arrays.ops, order, start, free)
    ends = _ends_by_group(arrays, free)
    if arrays.problem.optimizer == "synchronous":
        return _period_of_windows(
            arrays, np.zeros_like(free), ends, _ticks_saved(arrays.problem, [(arrays, start)])
        ), start
    if arrays.problem.can_reduce_early:  # linked groups end together here; annealing separates them
        ends = np.array([ends[list(groups)].max() for groups in arrays.problem.groups.linked])
    if arrays.problem.anneals_reductions:  # those that fit a bubble now keep it
        begin = _place_in_bubbles(arrays.problem, [(arrays, start)]).begin
        free = ends_of_reductions(arrays, begin)[arrays.group]
        _compute_latest(arrays, order, start, free, ends, begin)
        ends = _ends_by_group(arrays, _last_ends(arrays, start))
        return _period_of_windows(
            arrays, free, ends, _ticks_saved(arrays.problem, [(arrays, start)])
        ), start
    # Backward: as late as these ends allow.
    ends = latest_group_ends(arrays, ends)
    free = ends[arrays.group]
    _compute_latest(arrays, order, start, free, ends)
    return _period_of_windows(arrays, free, ends, np.zeros_like(ends)), start
