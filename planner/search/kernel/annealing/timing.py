"""A state timed from scratch."""

from slipstream.planner.search.kernel.annealing.arrays import FOREVER, Instance, Ints, Sorting, State, Timing
from slipstream.planner.search.kernel.annealing.cost import measure
from slipstream.planner.search.kernel.jit import borrowing, inlined, jit
from slipstream.planner.search.kernel.start_times import clear_of, close, first_awaiting, put_off


@borrowing
def _sort(instance, state, sorting):
    """Fill in `order` and `early`. False where ops wait for each other in a circle."""
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


@inlined
def _latest(instance, state, late, op):
    """The latest start of an op, given those of the ops after it:

    late[op] = min(late[next op of its worker], or the deadline of its group where there is none;
                   late[j] - hop over successors j) - duration[op],
    with a hop where j takes a tensor from another worker; interleaved, a W ends before the reductions that await it,
    and no op runs over one of its worker's.
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
            end = min(end, first_awaiting(instance.awaiting, state.begin, instance.slice[unit]))
        return clear_of(instance.between, state.begin, group, end - state.duration[op], state.duration[op])
    return end - state.duration[op]


@jit
def set_deadlines(instance: Instance, state: State, sorting: Sorting) -> bool:
    """Let every reduce group be done as early as its orders allow. False where ops wait for each other in a circle."""
    sorting.release[:] = 0
    if not _sort(instance, state, sorting):
        return False
    state.deadline[:] = 0
    for worker in range(state.size.shape[0]):
        if state.size[worker]:
            op = state.sequence[worker, state.size[worker] - 1]
            group = instance.group[worker]
            state.deadline[group] = max(state.deadline[group], sorting.early[op] + state.duration[op])
    end_with_deadlines(instance, state)
    return True


@jit
def set_heads(instance: Instance, state: State, timing: Timing, sorting: Sorting, goal: int, heads: Ints) -> None:
    """Fill in the heads of all ops of a state as timed, see `heads`; they count from the releases that are set here."""
    for worker in range(sorting.release.shape[0]):
        longest = max(timing.longest[instance.pipeline[worker]], goal)
        sorting.release[worker] = state.end[instance.group[worker]] + instance.tail[worker] - longest
    _sort(instance, state, sorting)
    heads[:] = sorting.early


@jit
def end_with_deadlines(instance: Instance, state: State) -> None:
    """Let every group end as early as its deadline and those it reduces gradients with allow; give all the time left.
    """
    if not instance.interleaved:
        close(instance.sharers, instance.ticks, state.deadline, state.end, state.begin, state.turn)
        return
    for group in range(state.end.shape[0]):
        end = state.deadline[group]
        for number in range(instance.linked.shape[1]):
            other = instance.linked[group, number]
            if other < 0:
                break
            end = max(end, state.deadline[other])
        state.end[group] = end
    _begin_with_ends(instance, state)


@jit
def keep_ends(instance: Instance, state: State) -> None:
    """The latest deadlines and reductions with which all groups end when they are to, or earlier where they can."""
    if instance.interleaved:
        _begin_with_ends(instance, state)
        return
    state.deadline[:] = state.end
    put_off(instance.sharers, instance.ticks, state.turn, state.deadline)
    end_with_deadlines(instance, state)


@jit
def _begin_with_ends(instance, state):
    """Interleaved: every reduction with the first end of its groups, which run ops until they end."""
    state.deadline[:] = state.end
    for reduction in range(instance.sharers.shape[0]):
        begin = FOREVER
        for number in range(instance.sharers.shape[1]):
            group = instance.sharers[reduction, number]
            if group >= 0:
                begin = min(begin, state.end[group])
        state.begin[reduction] = begin


@jit
def time(instance: Instance, state: State, sorting: Sorting, timing: Timing, goal: int) -> int:
    """Time a state from scratch: its period in ticks; -1 where ops wait for each other in a circle."""
    if not _sort(instance, state, sorting):
        return -1
    for index in range(state.duration.shape[0] - 1, -1, -1):
        op = sorting.order[index]
        timing.late[op] = _latest(instance, state, timing.late, op)
    for pipeline in range(timing.longest.shape[0]):
        measure(instance, state, timing, goal, pipeline)
    return int(timing.longest.max())
