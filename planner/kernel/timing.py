"""Time a state of annealing from scratch, and measure its cost and its critical paths."""

import numpy as np

from .chains import TIMED, TOUCHED, Instance, Sorting, State, Timing
from .compiling import Ints, jit, jit_borrowing, jit_inlined
from .starts import (
    FOREVER,
    delay_deadlines,
    first_awaiting_reduction,
    latest_clear_start,
    set_latest_compute_ends,
)

# --- Random numbers, by xorshift64 (Marsaglia 2003) -----------------------------------------------


@jit_inlined
def _random_bits(random):
    """Return the next 53 random bits, as an unsigned number."""
    # 53 bits are what a float holds exactly.
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return x >> np.uint64(11)


@jit_inlined
def random_below(random, bound):
    """Return a random whole number from 0 to below `bound`."""
    return np.int64(_random_bits(random) % np.uint64(bound))


@jit_inlined
def random_uniform(random):
    """Return a random float, 0 or more and less than 1."""
    return np.int64(_random_bits(random)) / 9007199254740992.0


# --- Windows and costs ----------------------------------------------------------------------------
# The window of a worker l of group g(l) lasts from the latest start of its first op to the end of
# its iteration:
#
#     window(l) = end[g(l)] + tail[l] - late[first op of l];   0 if it runs nothing.
#
# With the goal G of the cooling cycle (a period), the cost of pipeline p is, where n is the most
# workers that any pipeline has,
#
#     cost(p) = max(0, max_l window(l) - G) + pull * sum_l max(0, window(l) - G) / n,      l in p,
#
# and that of the state is the sum of cost(p) over all pipelines. The first term alone would be flat
# where several windows are the longest, and a maximum over all pipelines would not tell of any
# other pipeline's progress. As a sum over pipelines, the cost changes by what a step changes.


@jit_inlined
def window_ticks(instance, state, late, worker):
    """Return the length, in ticks, of a worker's busy window; 0 if it runs nothing.

    The window lasts from the start of the worker's first op, by the latest starts `late` [op], to
    the end of its optimizer step.
    """
    if state.size[worker] == 0:
        return 0
    return (
        state.end[instance.group[worker]] + instance.tail[worker] - late[state.sequence[worker, 0]]
    )


@jit_inlined
def measure_pipeline(instance, state, timing, goal, pipeline):
    """Store in `timing` a pipeline's longest window, and its excess over `goal`.

    The excess is the sum of the ticks by which its workers' windows exceed `goal`, the period at
    which annealing aims.
    """
    longest, excess = 0, 0
    for number in range(instance.members.shape[1]):
        worker = instance.members[pipeline, number]
        if worker < 0:
            break
        ticks = window_ticks(instance, state, timing.late, worker)
        longest = max(longest, ticks)
        excess += max(0, ticks - goal)
    timing.longest[pipeline], timing.excess[pipeline] = longest, excess


@jit_inlined
def _pipeline_cost(instance, timing, cycle, pipeline):
    """Return a pipeline's part of the cost: its windows' weighted excess over `cycle.goal`."""
    return (
        max(0, timing.longest[pipeline] - cycle.goal)
        + cycle.pull * timing.excess[pipeline] / instance.members.shape[1]
    )


@jit_borrowing
def state_cost(instance, timing, cycle):
    """Return the cost that annealing reduces: ticks by which windows exceed `cycle.goal`.

    The windows are those in `timing`. In each pipeline the longest one has weight 1, and the mean
    excess has weight `cycle.pull`.
    """
    total = 0.0
    for pipeline in range(timing.longest.shape[0]):
        total += _pipeline_cost(instance, timing, cycle, pipeline)
    return total


@jit_inlined
def cost_after(instance, state, timing, log, cycle, before):
    """Return a state's cost after a step, in ticks, from the cost `before` it.

    Only pipelines in the log, whose busy windows the step may have changed, are measured again,
    which changes `timing`.
    """
    total = before
    for number in range(log.counters[TOUCHED]):
        pipeline = log.pipeline[number]
        total -= _pipeline_cost(instance, timing, cycle, pipeline)
        measure_pipeline(instance, state, timing, cycle.goal, pipeline)
        total += _pipeline_cost(instance, timing, cycle, pipeline)
    return total


# --- Critical workers and paths -------------------------------------------------------------------


@jit_inlined
def critical_worker(random, instance, state, timing, goal):
    """Draw a worker whose busy window is the longest of its pipeline.

    The pipeline is drawn from those with a window above `goal` ticks, the period at which annealing
    aims; it is number 0 if there is none.
    """
    # Each candidate replaces the one before it with probability 1 / seen, so that all are alike.
    pipeline, seen = 0, 0
    for other in range(timing.longest.shape[0]):
        if timing.longest[other] > goal:
            seen += 1
            if random_below(random, seen) == 0:
                pipeline = other
    worker, seen = instance.members[pipeline, 0], 0
    for number in range(instance.members.shape[1]):
        other = instance.members[pipeline, number]
        if other < 0:
            break
        if (
            state.size[other]
            and window_ticks(instance, state, timing.late, other) == timing.longest[pipeline]
        ):
            seen += 1
            if random_below(random, seen) == 0:
                worker = other
    return worker


@jit_borrowing
def critical_path(random, instance, state, late, op, within, path):
    """Follow a critical path from `op`, and return the last op of the path.

    Each op of the path is kept from starting later by the next one; the last op is kept by a
    reduction or by the tick by which its worker must end compute. `late` [op] has the latest
    starts.

    Fill `path` with the ops from which the path goes on in their worker's order, not by a wait, and
    whose latest start is in the range `within` (low, high), high excluded.
    """
    unit, start, successor, transfer = (
        instance.unit,
        instance.successors.start,
        instance.successors.op,
        instance.successors.transfer,
    )
    worker_of, duration, sequence, size, place = (
        state.worker,
        state.duration,
        state.sequence,
        state.size,
        state.place,
    )
    low, high = within
    arcs = 0
    for _ in range(late.shape[0]):  # no path is longer
        worker, after = worker_of[unit[op]], place[op] + 1
        end = late[op] + duration[op]
        # The next op of its worker, if that keeps it from starting later.
        following = sequence[worker, after] if after < size[worker] else -1
        if following >= 0 and late[following] != end:
            following = -1
        # An op that waits for it and does so.
        other = -1
        for arc in range(start[op], start[op + 1]):
            later, slack = successor[arc], late[successor[arc]] - end
            if slack <= transfer[arc] and slack == (
                transfer[arc] if worker_of[unit[later]] != worker else 0
            ):
                other = later
                break
        if following < 0 and other < 0:
            break
        # One of the two, at random; an exchange helps only where the worker's order is the reason.
        if other < 0 or (following >= 0 and random_below(random, 2) == 0):
            if following != other and low <= late[op] < high:
                path.op[arcs] = op
                arcs += 1
            op = following
        else:
            op = other
    path.size[0] = arcs
    return op


# --- A state timed from scratch -------------------------------------------------------------------


@jit_borrowing
def _sort_topologically(instance, state, sorting):
    """Sort all ops topologically, with earliest starts; return False if a wait is circular."""
    unit, successors, predecessors = instance.unit, instance.successors, instance.predecessors
    waiting, stack, order, early = sorting.waiting, sorting.stack, sorting.order, sorting.early
    # Ops that wait for nothing.
    top = done = 0
    for op in range(state.duration.shape[0]):
        early[op] = sorting.release[state.worker[unit[op]]]
        waiting[op] = predecessors.start[op + 1] - predecessors.start[op] + (state.place[op] > 0)
        if waiting[op] == 0:
            stack[top] = op
            top += 1
    # Each op that is sorted lets the next op of its worker and its successors wait for one less.
    while top > 0:
        top -= 1
        op = stack[top]
        order[done] = op
        done += 1
        worker, after = state.worker[unit[op]], state.place[op] + 1
        end = early[op] + state.duration[op]
        if after < state.size[worker]:
            later = state.sequence[worker, after]
            early[later] = max(early[later], end)
            waiting[later] -= 1
            if waiting[later] == 0:
                stack[top] = later
                top += 1
        for arc in range(successors.start[op], successors.start[op + 1]):
            later = successors.op[arc]
            hop = successors.transfer[arc] if state.worker[unit[later]] != worker else 0
            early[later] = max(early[later], end + hop)
            waiting[later] -= 1
            if waiting[later] == 0:
                stack[top] = later
                top += 1
    return done == state.duration.shape[0]


@jit_inlined
def _latest_start(instance, state, late, op):
    """Return the latest start of an op, given those of the ops after it."""
    # late[op] = min(end, late[j] - hop over successors j) - duration[op], where `end` is late[next
    # op of its worker] or, after the last op, the deadline of its group. The hop is 0 unless j
    # takes a tensor from another worker.
    successors = instance.successors
    unit, group = instance.unit[op], instance.group[state.worker[instance.unit[op]]]
    worker, after = state.worker[instance.unit[op]], state.place[op] + 1
    end = (
        late[state.sequence[worker, after]]
        if after < state.size[worker]
        else state.deadline[instance.group[worker]]
    )
    for arc in range(successors.start[op], successors.start[op + 1]):
        later = successors.op[arc]
        hop = successors.transfer[arc] if state.worker[instance.unit[later]] != worker else 0
        end = min(end, late[later] - hop)
    # A W ends before the reductions that wait for it, and no op overlaps a reduction of its worker.
    if instance.interleaved:
        if (op + 1) % instance.kinds == 0:
            end = min(
                end, first_awaiting_reduction(instance.awaiting, state.begin, instance.slice[unit])
            )
        return latest_clear_start(
            instance.between,
            instance.ticks,
            state.begin,
            group,
            end - state.duration[op],
            state.duration[op],
        )
    return end - state.duration[op]


@jit
def set_earliest_deadlines(instance: Instance, state: State, sorting: Sorting) -> bool:
    """Set groups' deadlines and ends for ops that start as early as possible.

    Deadlines are the latest ticks by which compute must end so that no group ends later, reductions
    included. Return False, and leave the deadlines as they are, if there is a circular wait.
    """
    sorting.release[:] = 0
    if not _sort_topologically(instance, state, sorting):
        return False
    # A group ends compute with the last op of any of its workers.
    state.deadline[:] = 0
    for worker in range(state.size.shape[0]):
        if state.size[worker]:
            op = state.sequence[worker, state.size[worker] - 1]
            group = instance.group[worker]
            state.deadline[group] = max(
                state.deadline[group], sorting.early[op] + state.duration[op]
            )
    set_ends_from_deadlines(instance, state)
    return True


@jit
def set_heads(
    instance: Instance, state: State, timing: Timing, sorting: Sorting, goal: int, heads: Ints
) -> None:
    """Fill `heads` [op] with the earliest starts at which no window is too long.

    A window ends with its group. It may be as long as the longest one that its pipeline has now, or
    as `goal`, the period at which annealing aims, if that is longer. `sorting.release` gets the
    tick before which each worker starts no op.
    """
    # A window ends with its group, so its greatest length says when it may begin.
    for worker in range(sorting.release.shape[0]):
        longest = max(timing.longest[instance.pipeline[worker]], goal)
        sorting.release[worker] = (
            state.end[instance.group[worker]] + instance.tail[worker] - longest
        )
    _sort_topologically(instance, state, sorting)
    heads[:] = sorting.early


@jit
def set_ends_from_deadlines(instance: Instance, state: State) -> None:
    """Set `state.end`, the ends of groups' reductions, from the deadlines of compute ops.

    `instance.interleaved` must not be TIMED. Reductions shared by several groups wait for all of
    them. `state.begin` is set, too, and the deadlines become as late as these ends allow.
    """
    if not instance.interleaved:
        delay_deadlines(
            instance.sharers, instance.ticks, state.deadline, state.end, state.begin, state.turn
        )
        return
    # Reductions take no time here: a group ends when all groups that share one with it have ended
    # compute.
    for group in range(state.end.shape[0]):
        end = state.deadline[group]
        for number in range(instance.linked.shape[1]):
            other = instance.linked[group, number]
            if other < 0:
                break
            end = max(end, state.deadline[other])
        state.end[group] = end
    _set_begins_from_ends(instance, state)


@jit
def set_deadlines_from_ends(instance: Instance, state: State) -> None:
    """Set `state.deadline`, by which groups must end compute ops, from `state.end`.

    On entry, `state.end` has the ticks by which groups must end their reductions, too. This call
    places the reductions again; if those of a group then end earlier, so does its `state.end`.
    """
    if instance.interleaved == TIMED:
        for group in range(state.end.shape[0]):
            _finish_by(instance, state, group, state.end[group])
        return
    if instance.interleaved:
        _set_begins_from_ends(instance, state)
        return
    state.deadline[:] = state.end
    set_latest_compute_ends(instance.sharers, instance.ticks, state.turn, state.deadline)
    set_ends_from_deadlines(instance, state)


@jit
def _set_begins_from_ends(instance, state):
    """Let reductions that take no time begin at the least `state.end` of their groups."""
    state.deadline[:] = state.end
    for reduction in range(instance.sharers.shape[0]):
        begin = FOREVER
        for number in range(instance.sharers.shape[1]):
            group = instance.sharers[reduction, number]
            if group >= 0:
                begin = min(begin, state.end[group])
        state.begin[reduction] = begin


@jit
def _finish_by(instance, state, group, end):
    """Let a group's reductions end by tick `end`, each no later than before."""
    free, last = end, -FOREVER
    _mark_reductions(instance, state, group)
    # The last reduction first: each must end before the next begins.
    while True:
        number = _take_marked_reduction(instance, state, group, -1)
        if number < 0:
            break
        state.begin[number] = min(state.begin[number], free - instance.ticks[number])
        free = state.begin[number]
        last = max(last, free + instance.ticks[number])
    if last > -FOREVER:
        state.end[group] = state.deadline[group] = last


@jit
def begin_reduction_at(instance, state, moved, tick):
    """Let the reduction `moved` begin at a tick; delay others of its group that overlap.

    The group's end and deadline change with its last reduction. Only if `instance.interleaved` is
    TIMED.
    """
    group, free = instance.sharers[moved, 0], -FOREVER
    state.begin[moved] = tick
    _mark_reductions(instance, state, group)
    # From the first on, a reduction begins no sooner than the one before it ends.
    while True:
        number = _take_marked_reduction(instance, state, group, 1)
        if number < 0:
            break
        state.begin[number] = max(state.begin[number], free)
        free = state.begin[number] + instance.ticks[number]
    state.end[group] = state.deadline[group] = free


@jit
def _mark_reductions(instance, state, group):
    """Set `state.turn` to 1 for all reductions of a group, for `_take_marked_reduction`."""
    # If reductions are TIMED, `state.turn` has no other use.
    for index in range(instance.between.shape[1]):
        if instance.between[group, index] >= 0:
            state.turn[instance.between[group, index]] = 1


@jit
def _take_marked_reduction(instance, state, group, direction):
    """Unmark and return a group's first marked reduction, last if `direction` is -1; -1: none."""
    found = -1
    for index in range(instance.between.shape[1]):
        number = instance.between[group, index]
        if number < 0 or not state.turn[number]:
            continue
        # Of reductions that begin together, the number decides.
        if (
            found < 0
            or (state.begin[number] - state.begin[found]) * direction < 0
            or (state.begin[number] == state.begin[found] and (number - found) * direction < 0)
        ):
            found = number
    if found >= 0:
        state.turn[found] = 0
    return found


@jit
def time_state(
    instance: Instance, state: State, sorting: Sorting, timing: Timing, goal: int
) -> int:
    """Compute the latest starts and busy windows of a state into `timing`.

    Return the period in ticks, or -1 if there is a circular wait. `timing.excess` gets the ticks of
    windows beyond `goal`, the period at which annealing aims.
    """
    if not _sort_topologically(instance, state, sorting):
        return -1
    for index in range(state.duration.shape[0] - 1, -1, -1):
        op = sorting.order[index]
        timing.late[op] = _latest_start(instance, state, timing.late, op)
    for pipeline in range(timing.longest.shape[0]):
        measure_pipeline(instance, state, timing, goal, pipeline)
    return int(timing.longest.max())
