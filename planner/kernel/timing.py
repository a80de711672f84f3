"""Time a state of annealing from scratch, and measure its cost and its critical paths."""

import numpy as np

from .chains import TIMED, TOUCHED, Instance, Sorting, State, Timing
from .compiling import Ints, jit, jit_borrowing, jit_inlined
from .starts import FOREVER, delay_deadlines, first_awaiting_reduction, latest_clear_start, set_latest_compute_ends

# --- Random numbers, by xorshift64 (Marsaglia 2003) -------------------------------------------------------------------


@jit_inlined
def _random_bits(random):
    """Return the next 53 random bits, as an unsigned number."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return x >> np.uint64(11)


@jit_inlined
def random_below(random, bound):
    """Return a random whole number from 0 to below the bound."""
    return np.int64(_random_bits(random) % np.uint64(bound))


@jit_inlined
def random_uniform(random):
    """Return a random float, 0 or more and less than 1."""
    return np.int64(_random_bits(random)) / 9007199254740992.0


# --- Windows and costs ------------------------------------------------------------------------------------------------
# The window of a worker l of reduce group g(l) lasts from the latest start of its first op to the end of its iteration:
#
#     window(l) = end[g(l)] + tail[l] - late[first op of l];   0 if it runs nothing.
#
# With the goal G of the cooling cycle (a period), the cost of pipeline p with n(p) workers, where n is the most that
# any pipeline has, is
#
#     cost(p) = max(0, max_l window(l) - G) + pull * sum_l max(0, window(l) - G) / n,      l in p,
#
# and that of the state is the sum of cost(p) over all pipelines. The first term alone would be flat where several
# windows are the longest, and a maximum over all pipelines would not tell of any other pipeline's progress. As a sum
# over pipelines, the cost changes by what a step changes.


@jit_inlined
def window_ticks(instance, state, late, worker):
    """Return the ticks of a worker's busy window, from the start of its first op by `late` [op], the latest starts, to
    the end of its optimizer step."""
    if state.size[worker] == 0:
        return 0
    return state.end[instance.group[worker]] + instance.tail[worker] - late[state.sequence[worker, 0]]


@jit_inlined
def measure_pipeline(instance, state, timing, goal, pipeline):
    """Store in `timing` the longest busy window of a pipeline's workers, and the sum of the ticks by which their
    windows exceed `goal`, the period at which annealing aims."""
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
    """Return a pipeline's share of the cost that annealing reduces, in ticks, from the windows stored in `timing`.

    It is the excess of its longest window over `cycle.goal`, plus `cycle.pull` times the mean excess of its windows.
    """
    return max(0, timing.longest[pipeline] - cycle.goal) + \
        cycle.pull * timing.excess[pipeline] / instance.members.shape[1]


@jit_borrowing
def state_cost(instance, timing, cycle):
    """Return the cost that annealing reduces, in ticks: the sum of `_pipeline_cost` over all pipelines, from the
    windows stored in `timing`."""
    total = 0.0
    for pipeline in range(timing.longest.shape[0]):
        total += _pipeline_cost(instance, timing, cycle, pipeline)
    return total


@jit_inlined
def cost_after(instance, state, timing, log, cycle, before):
    """Return the cost (`state_cost`, in ticks) of a state after a step, given its cost before the step, `before`.

    Only pipelines in the log, whose busy windows the step may have changed, are measured again, which changes `timing`.
    """
    total = before
    for number in range(log.counters[TOUCHED]):
        pipeline = log.pipeline[number]
        total -= _pipeline_cost(instance, timing, cycle, pipeline)
        measure_pipeline(instance, state, timing, cycle.goal, pipeline)
        total += _pipeline_cost(instance, timing, cycle, pipeline)
    return total


# --- Critical workers and paths ---------------------------------------------------------------------------------------


@jit_inlined
def critical_worker(random, instance, state, timing, goal):
    """Draw a pipeline whose longest busy window exceeds `goal` ticks, the period at which annealing aims, and return
    one of its workers with that window, also drawn at random."""
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
        if state.size[other] and window_ticks(instance, state, timing.late, other) == timing.longest[pipeline]:
            seen += 1
            if random_below(random, seen) == 0:
                worker = other
    return worker


@jit_borrowing
def critical_path(random, instance, state, late, op, within, path):
    """Follow a critical path from `op` by the latest starts `late` [op], and return its last op. Each op on it is kept
    from starting later by the next one; the last op, by the tick by which its worker must end compute.

    Fill `path` with the ops whose next op on the path follows them only in their worker's order, without waiting for
    them, if their latest start is in the range `within` (low, high), high excluded.
    """
    unit, start, successor, transfer = instance.unit, instance.successors.start, instance.successors.op, \
        instance.successors.transfer
    worker_of, duration, sequence, size, place = state.worker, state.duration, state.sequence, state.size, state.place
    low, high = within
    arcs = 0
    for _ in range(late.shape[0]):  # no path is longer
        worker, after = worker_of[unit[op]], place[op] + 1
        end = late[op] + duration[op]
        own = sequence[worker, after] if after < size[worker] else -1
        if own >= 0 and late[own] != end:
            own = -1
        other = -1
        for arc in range(start[op], start[op + 1]):
            later, slack = successor[arc], late[successor[arc]] - end
            if slack <= transfer[arc] and slack == (transfer[arc] if worker_of[unit[later]] != worker else 0):
                other = later
                break
        if own < 0 and other < 0:
            break
        if other < 0 or (own >= 0 and random_below(random, 2) == 0):
            if own != other and low <= late[op] < high:
                path.op[arcs] = op
                arcs += 1
            op = own
        else:
            op = other
    path.size[0] = arcs
    return op


# --- A state timed from scratch ---------------------------------------------------------------------------------------


@jit_borrowing
def _sort_topologically(instance, state, sorting):
    """Sort all ops so that each comes after those for which it waits, and compute their earliest starts, into
    `sorting`.

    Return False if there is a circular wait.
    """
    unit, successors, predecessors = instance.unit, instance.successors, instance.predecessors
    waiting, stack, order, early = sorting.waiting, sorting.stack, sorting.order, sorting.early
    top = done = 0
    for op in range(state.duration.shape[0]):
        early[op] = sorting.release[state.worker[unit[op]]]
        waiting[op] = predecessors.start[op + 1] - predecessors.start[op] + (state.place[op] > 0)
        if waiting[op] == 0:
            stack[top] = op
            top += 1
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
    """Return the latest tick at which an op can start, given `late`, the latest starts of the ops after it.

    The rule is late[op] = min(end, late[j] - hop over successors j) - duration[op]. Here `end` is late[next op of its
    worker] or, after the last op, the deadline of its group (workers that hold the same layers); the hop is 0 unless j
    takes a tensor from another worker. If interleaved (reductions lie between compute ops), a W ends before the
    reductions that wait for it, and no op overlaps a reduction of its worker.
    """
    successors = instance.successors
    unit, group = instance.unit[op], instance.group[state.worker[instance.unit[op]]]
    worker, after = state.worker[instance.unit[op]], state.place[op] + 1
    end = late[state.sequence[worker, after]] if after < state.size[worker] else state.deadline[instance.group[worker]]
    for arc in range(successors.start[op], successors.start[op + 1]):
        later = successors.op[arc]
        hop = successors.transfer[arc] if state.worker[instance.unit[later]] != worker else 0
        end = min(end, late[later] - hop)
    if instance.interleaved:
        if (op + 1) % instance.kinds == 0:
            end = min(end, first_awaiting_reduction(instance.awaiting, state.begin, instance.slice[unit]))
        return latest_clear_start(instance.between, instance.ticks, state.begin, group, end - state.duration[op],
                                  state.duration[op])
    return end - state.duration[op]


@jit
def set_earliest_deadlines(instance: Instance, state: State, sorting: Sorting) -> bool:
    """Let ops start as early as the state's orders allow, set the ends of all groups (workers that hold the same
    layers) accordingly, reductions included, and set their deadlines to the latest ticks by which compute must end for
    that.

    Return False, and leave the state as it is, if there is a circular wait.
    """
    sorting.release[:] = 0
    if not _sort_topologically(instance, state, sorting):
        return False
    state.deadline[:] = 0
    for worker in range(state.size.shape[0]):
        if state.size[worker]:
            op = state.sequence[worker, state.size[worker] - 1]
            group = instance.group[worker]
            state.deadline[group] = max(state.deadline[group], sorting.early[op] + state.duration[op])
    set_ends_from_deadlines(instance, state)
    return True


@jit
def set_heads(instance: Instance, state: State, timing: Timing, sorting: Sorting, goal: int, heads: Ints) -> None:
    """Fill `heads` with the earliest tick at which each op can start if no busy window becomes too long.

    A window is too long if it exceeds both the longest one of its pipeline and `goal`, the period at which annealing
    aims. This gives each worker a tick before which it starts no op, stored in `sorting.release`.
    """
    for worker in range(sorting.release.shape[0]):
        longest = max(timing.longest[instance.pipeline[worker]], goal)
        sorting.release[worker] = state.end[instance.group[worker]] + instance.tail[worker] - longest
    _sort_topologically(instance, state, sorting)
    heads[:] = sorting.early


@jit
def set_ends_from_deadlines(instance: Instance, state: State) -> None:
    """Compute the tick at which each group (workers that hold the same layers) ends its last reduction, given the
    deadlines of all groups' compute ops, and store it in `state.end`.

    Reductions shared by several groups wait for all of them. Then set deadlines as late as these ends allow.
    """
    if not instance.interleaved:
        delay_deadlines(instance.sharers, instance.ticks, state.deadline, state.end, state.begin, state.turn)
        return
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
    """Compute the tick by which each group (workers that hold the same layers) must end its compute ops so that its
    last reduction ends by `state.end`, and store it in `state.deadline`.

    Reductions are then scheduled again by these deadlines; where they end earlier, `state.end` is updated.
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
    """Let each reduction begin at the earliest end of the groups (workers that hold the same layers) that share it, and
    set the deadline of each group's compute ops to the group's end.

    This is right only if reductions take no time.
    """
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
    """Let the reductions of a group (workers that hold the same layers) keep their order, begin no later than before,
    and end by tick `end`; then set the end and the deadline of the group. TIMED only."""
    free, last = end, -FOREVER
    _mark_reductions(instance, state, group)
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
    """Let a reduction begin at a tick, and all reductions of its group in their order as late as needed not to overlap;
    then set the end and the deadline of the group. TIMED only."""
    group, free = instance.sharers[moved, 0], -FOREVER
    state.begin[moved] = tick
    _mark_reductions(instance, state, group)
    while True:
        number = _take_marked_reduction(instance, state, group, 1)
        if number < 0:
            break
        state.begin[number] = max(state.begin[number], free)
        free = state.begin[number] + instance.ticks[number]
    state.end[group] = state.deadline[group] = free


@jit
def _mark_reductions(instance, state, group):
    """Mark all reductions of a group in `state.turn`, which has no other use if TIMED."""
    for index in range(instance.between.shape[1]):
        if instance.between[group, index] >= 0:
            state.turn[instance.between[group, index]] = 1


@jit
def _take_marked_reduction(instance, state, group, direction):
    """Unmark and return the marked reduction of a group that begins first or, if `direction` is -1, last; of several,
    that with the lowest or highest number. Return -1 if none is marked."""
    found = -1
    for index in range(instance.between.shape[1]):
        number = instance.between[group, index]
        if number < 0 or not state.turn[number]:
            continue
        if found < 0 or (state.begin[number] - state.begin[found]) * direction < 0 or (
                state.begin[number] == state.begin[found] and (number - found) * direction < 0):
            found = number
    if found >= 0:
        state.turn[found] = 0
    return found


@jit
def time_state(instance: Instance, state: State, sorting: Sorting, timing: Timing, goal: int) -> int:
    """Compute the latest starts of all ops of a state, and its busy windows, into `timing`; return its period in ticks,
    or -1 if there is a circular wait.

    In `timing.excess`, the ticks of windows beyond `goal`, the period at which annealing aims, are added up.
    """
    if not _sort_topologically(instance, state, sorting):
        return -1
    for index in range(state.duration.shape[0] - 1, -1, -1):
        op = sorting.order[index]
        timing.late[op] = _latest_start(instance, state, timing.late, op)
    for pipeline in range(timing.longest.shape[0]):
        measure_pipeline(instance, state, timing, goal, pipeline)
    return int(timing.longest.max())
