"""The changes that annealing tries.

exchange    two neighbouring runs of ops of a worker change places, mostly at an arc of a critical path, as in job-shop
            search (van Laarhoven et al. 1992, Nowicki and Smutnicki 1996)
trade       two units of one slice trade workers and places
move        a unit moves to another worker, to where its ops fit by time
shift       a deadline, or the end of a window, shifts

The first three are drawn by their `propose` functions, which also make the change; `undo` takes it back. A shift moves
the starts of a whole group, and so is timed from scratch and undone at once where it is refused.
"""

from slipstream.planner.search.kernel.annealing.arrays import (
    EXCHANGE,
    LARGEST_RUN,
    LONGEST_JUMP,
    MOVE,
    NONE,
    TRADE,
    Move,
)
from slipstream.planner.search.kernel.annealing.cost import cost
from slipstream.planner.search.kernel.annealing.critical import critical_path, critical_worker
from slipstream.planner.search.kernel.annealing.random import below
from slipstream.planner.search.kernel.annealing.retiming import call, retime, touch, waits_for_itself
from slipstream.planner.search.kernel.annealing.timing import end_with_deadlines, keep_ends, time
from slipstream.planner.search.kernel.jit import borrowing, inlined, jit

NEVER = Move(NONE, -1, -1, -1, 0, 0, 0)


@inlined
def fits(instance, state, move):
    """Whether the workers that got other ops, or another order, keep their capacity."""
    if move.kind == EXCHANGE:
        return _keeps_capacity(instance, state, move.worker, move.end)
    if move.kind == MOVE:
        worker = state.worker[move.unit]
        return _keeps_capacity(instance, state, worker, state.size[worker])
    return True  # a trade puts ops of one slice in each other's places


@inlined
def retime_after(instance, state, timing, queue, log, limits, move, places):
    """Time a change; False where some window becomes too long to be accepted, by `retiming.retime`, or where ops wait
    for each other in a circle."""
    if move.kind == EXCHANGE:
        if move.begin:
            call(queue, timing.late, state.sequence[move.worker, move.begin - 1])
    else:
        _call_unit(instance, state, timing, queue, log, move.unit)
        if move.kind == TRADE:
            _call_unit(instance, state, timing, queue, log, move.other)
        else:
            _call_left(instance, state, timing, queue, log, move.other, places)
    return retime(instance, state, timing, queue, log, limits, (move.worker, move.begin, move.end)) and \
        _no_circle(instance, state, timing, queue, move)


@inlined
def _no_circle(instance, state, timing, queue, move):
    """Whether no op that changed its place waits for itself. Any circle would pass one of them, and take no time."""
    sequence, duration, kinds = state.sequence, state.duration, instance.kinds
    if move.kind == EXCHANGE:
        for place in range(move.begin, move.end):
            op = sequence[move.worker, place]
            if duration[op] == 0 and waits_for_itself(instance, state, timing, queue, op):
                return False
        return True
    for kind in range(kinds):
        op, twin = move.unit * kinds + kind, move.other * kinds + kind
        if duration[op] == 0 and waits_for_itself(instance, state, timing, queue, op):
            return False
        if move.kind == TRADE and duration[twin] == 0 and waits_for_itself(instance, state, timing, queue, twin):
            return False
    return True


@inlined
def undo(instance, state, run, places, move):
    """Take a change back. Its timing is undone by `retiming.revert`."""
    if move.kind == EXCHANGE:
        _exchange(state, run, move.worker, move.begin, move.begin + move.end - move.middle, move.end)
    elif move.kind == TRADE:
        _trade(instance, state, move.unit, move.other)
    else:
        _move(instance, state, move.unit, move.other, places)


# --- Exchange ---------------------------------------------------------------------------------------------------------


@inlined
def propose_exchange(random, instance, state, timing, cycle, run, path):
    """Let two runs change places; NEVER where they must not."""
    late = timing.late
    if below(random, 5):
        if path.size[0] < 0:
            worker = critical_worker(random, instance, state, timing, cycle.goal)
            critical_path(random, instance, state, late, state.sequence[worker, 0], (cycle.low, cycle.high), path)
        if path.size[0] == 0:
            path.size[0] = -1
            return NEVER
        op = path.op[below(random, path.size[0])]
        middle = state.place[op] + 1
        if below(random, 4) == 0:
            middle += below(random, 3) - 1
    else:
        op = below(random, state.duration.shape[0])
        if late[op] < cycle.low or late[op] >= cycle.high:
            return NEVER
        middle = state.place[op]
    worker = state.worker[instance.unit[op]]
    before, behind = _run_length(random), _run_length(random)
    if below(random, 4) == 0:  # one op jumps over several
        before, behind = 1, 1 + below(random, LONGEST_JUMP)
        if below(random, 2):
            before, behind = behind, before
    begin, end = middle - before, middle + behind
    if begin < 0 or end > state.size[worker]:
        return NEVER
    unit, row = instance.unit, state.sequence[worker]
    for place in range(begin, middle):
        for other in range(middle, end):
            if unit[row[place]] == unit[row[other]]:
                return NEVER  # a unit's own ops keep their order
    _exchange(state, run, worker, begin, middle, end)
    return Move(EXCHANGE, -1, -1, worker, begin, middle, end)


@inlined
def _run_length(random):
    """Ops in a run, few ones more often."""
    size = 1
    while size < LARGEST_RUN and below(random, 3) == 0:
        size += 1
    return size


@inlined
def _exchange(state, run, worker, begin, middle, end):
    """Let the runs [begin, middle) and [middle, end) of a worker change places."""
    row, size = state.sequence[worker], middle - begin
    for index in range(size):
        run[index] = row[begin + index]
    for index in range(middle, end):
        row[index - size] = row[index]
    for index in range(size):
        row[end - size + index] = run[index]
    for index in range(begin, end):
        state.place[row[index]] = index


@inlined
def _keeps_capacity(instance, state, worker, end):
    """Whether the ops of a worker before place `end` keep its capacity."""
    capacity = instance.capacity[worker]
    if capacity < 0:
        return True
    sequence, holds, used = state.sequence, instance.holds, 0
    for place in range(end):
        used += holds[sequence[worker, place]]
        if used > capacity:
            return False
    return True


# --- Trade ------------------------------------------------------------------------------------------------------------


@inlined
def propose_trade(random, instance, state, late, cycle):
    """Let two units trade places; NEVER where they must not."""
    unit = instance.movable[below(random, instance.movable.shape[0])]
    other = _partner(random, instance, state, unit)
    if other < 0 or not _within(instance, late, cycle, unit):
        return NEVER
    _trade(instance, state, unit, other)
    return Move(TRADE, unit, other, -1, 0, 0, 0)


@inlined
def _partner(random, instance, state, unit):
    """A unit to trade with, of the same slice: another movable one, or one of the same worker; -1 for none."""
    if below(random, 3) == 0:
        worker = state.worker[unit]
        other = instance.unit[state.sequence[worker, below(random, state.size[worker])]]
    else:
        other = instance.movable[below(random, instance.movable.shape[0])]
    return other if other != unit and instance.slice[other] == instance.slice[unit] else -1


@inlined
def _within(instance, late, cycle, unit):
    """Whether some op of a unit may change its place in this cycle."""
    kinds = instance.kinds
    return late[unit * kinds] < cycle.high and late[(unit + 1) * kinds - 1] >= cycle.low


@borrowing
def _trade(instance, state, unit, other):
    worker, other_worker = state.worker[unit], state.worker[other]
    for kind in range(instance.kinds):
        op, twin = unit * instance.kinds + kind, other * instance.kinds + kind
        place, twin_place = state.place[op], state.place[twin]
        state.sequence[worker, place], state.sequence[other_worker, twin_place] = twin, op
        state.place[op], state.place[twin] = twin_place, place
        state.duration[op], state.duration[twin] = state.duration[twin], state.duration[op]
    state.worker[unit], state.worker[other] = other_worker, worker


# --- Move to another worker -------------------------------------------------------------------------------------------


@borrowing
def propose_move(random, instance, state, late, cycle, places):
    """Move a unit to another worker; NEVER where there is none."""
    unit = instance.movable[below(random, instance.movable.shape[0])]
    worker = _other_worker(random, instance, state, unit)
    if worker < 0 or not _within(instance, late, cycle, unit):
        return NEVER
    left = state.worker[unit]
    _find_places(instance, state, late, unit, worker, places)
    _move(instance, state, unit, worker, places)
    return Move(MOVE, unit, left, -1, 0, 0, 0)


@borrowing
def _other_worker(random, instance, state, unit):
    """Another worker that may run a unit and has room in its row; -1 for none."""
    hosts = instance.hosts[instance.slice[unit]]
    count = 0
    while count < hosts.shape[0] and hosts[count] >= 0:
        count += 1
    worker = hosts[below(random, count)]
    full = state.size[worker] + instance.kinds > state.sequence.shape[1]
    return -1 if full or worker == state.worker[unit] else worker


@borrowing
def _find_places(instance, state, late, unit, worker, places):
    """Where the ops of a unit fit into another worker's order by the time at which they run now."""
    kinds = instance.kinds
    row, place = state.sequence[worker], 0
    for kind in range(kinds):
        while place < state.size[worker] and late[row[place]] < late[unit * kinds + kind]:
            place += 1
        places[kind] = place + kind


@borrowing
def _move(instance, state, unit, worker, places):
    """Have a worker run a unit, its ops at these places in their order; `places` becomes where they were."""
    kinds, left, number = instance.kinds, state.worker[unit], instance.slice[unit]
    for kind in range(kinds):
        _remove(state, unit * kinds + kind, left)
    for kind in range(kinds):
        op = unit * kinds + kind
        before = state.place[op] + kind  # those removed before it were in front of it
        _insert(state, op, worker, places[kind])
        state.duration[op] = instance.cost[kind, number, worker]
        places[kind] = before
    state.worker[unit] = worker


@borrowing
def _remove(state, op, worker):
    """Take an op out of a worker's order."""
    row = state.sequence[worker]
    for index in range(state.place[op], state.size[worker] - 1):
        row[index] = row[index + 1]
        state.place[row[index]] = index
    state.size[worker] -= 1


@borrowing
def _insert(state, op, worker, place):
    """Put an op into a worker's order, before the one that is at this place."""
    row = state.sequence[worker]
    for index in range(state.size[worker], place, -1):
        row[index] = row[index - 1]
        state.place[row[index]] = index
    row[place] = op
    state.place[op] = place
    state.size[worker] += 1


@borrowing
def _call_unit(instance, state, timing, queue, log, unit):
    """Call the ops of a unit that came to another worker or place, and those that they follow there."""
    worker, predecessors = state.worker[unit], instance.predecessors
    touch(timing, log, instance.pipeline[worker])
    for op in range(unit * instance.kinds, (unit + 1) * instance.kinds):
        call(queue, timing.late, op)
        for arc in range(predecessors.start[op], predecessors.start[op + 1]):
            call(queue, timing.late, predecessors.op[arc])
        call(queue, timing.late, state.sequence[worker, state.place[op] - 1] if state.place[op] else -1)


@borrowing
def _call_left(instance, state, timing, queue, log, worker, places):
    """Call the ops behind which those of a unit were taken away, at these places of a worker."""
    touch(timing, log, instance.pipeline[worker])
    for kind in range(instance.kinds):
        place = places[kind] - kind - 1
        if 0 <= place < state.size[worker]:
            call(queue, timing.late, state.sequence[worker, place])


# --- Shift a deadline -------------------------------------------------------------------------------------------------


@jit
def shift(chain, cycle, before, allowance):
    """Have the window that a critical path fills end earlier, or the deadline later that it ends at; the cost after it.

    Taken back where the cost grows by more than the allowance.
    """
    random, instance, state, timing, trial = chain.random, chain.instance, chain.state, chain.timing, chain.trial
    worker = critical_worker(random, instance, state, timing, cycle.goal)
    last = critical_path(random, instance, state, timing.late, state.sequence[worker, 0], (0, 0), chain.path)
    end, deadline, begin, turn = state.end.copy(), state.deadline.copy(), state.begin.copy(), state.turn.copy()
    ticks = 1 + below(random, 1 + int(cycle.scale))
    if below(random, 2):
        state.end[instance.group[worker]] -= ticks
        keep_ends(instance, state)
    elif instance.interleaved:
        state.end[_first_to_reduce(instance, state, timing.late, last)] += ticks
        keep_ends(instance, state)
    else:
        state.deadline[instance.group[state.worker[instance.unit[last]]]] += ticks
        end_with_deadlines(instance, state)
    period = time(instance, state, chain.sorting, trial, cycle.goal)
    after = cost(instance, trial, cycle)
    if period < 0 or after > before + allowance:
        state.end[:], state.deadline[:], state.begin[:], state.turn[:] = end, deadline, begin, turn
        return before
    timing.late[:] = trial.late
    timing.longest[:] = trial.longest
    timing.excess[:] = trial.excess
    return after


@borrowing
def _first_to_reduce(instance, state, late, op):
    """Of the groups that share a reduction with that of the last op of a path, which waits for it, one that ends then.
    """
    group, tick = instance.group[state.worker[instance.unit[op]]], late[op] + state.duration[op]
    for number in range(instance.between.shape[1]):
        reduction = instance.between[group, number]
        if reduction >= 0 and state.begin[reduction] == tick:
            for index in range(instance.sharers.shape[1]):
                other = instance.sharers[reduction, index]
                if other >= 0 and state.end[other] == tick:
                    return other
    return group
