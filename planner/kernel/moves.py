"""Draw a step of annealing, make it, and take it back.

    exchange    two neighbouring runs of ops of a worker change places, mostly at an arc of a
                critical path
    trade       two units of one slice trade workers and places
    move        a unit moves to another worker, to where its ops fit by time
    shift       the deadline or the end of a group shifts, or a reduction

The first three are drawn by their `propose` functions, which also make the change; `undo_move`
takes it back. A shift moves the starts of a whole group, and so is timed from scratch and undone at
once where it is refused.
"""

from .chains import EXCHANGE, MOVE, NONE, TIMED, TRADE, Move
from .compiling import jit, jit_borrowing, jit_inlined
from .retiming import queue_op, retime, touch_pipeline, waits_for_itself
from .timing import (
    begin_reduction_at,
    critical_path,
    critical_worker,
    random_below,
    set_deadlines_from_ends,
    set_ends_from_deadlines,
    state_cost,
    time_state,
)

NEVER = Move(NONE, -1, -1, -1, 0, 0, 0)
"""Move of a step that changes nothing."""


@jit_inlined
def is_move_within_capacity(instance, state, move):
    """Return whether workers keep within their memory in a state that `move` has changed."""
    if move.kind == EXCHANGE:
        return _is_order_within_capacity(instance, state, move.worker, move.end)
    if move.kind == MOVE:
        worker = state.worker[move.unit]
        return _is_order_within_capacity(instance, state, worker, state.size[worker])
    return True  # a trade puts ops of one slice in each other's places


@jit_inlined
def retime_after(instance, state, timing, queue, log, limits, move, places):
    """Recompute latest starts, and busy windows, in a state that `move` has changed.

    Return False if the change must be undone: some busy window exceeds `limits` (of `retime`),
    `log` is full, or there is a circular wait. Overwritten values, and the pipelines whose windows
    may have changed, are stored in `log`. If a unit moved to another worker, `places` has the
    places that its ops have left.
    """
    # What must be timed again at first: ops whose next op has changed. `retime` finds the rest.
    if move.kind == EXCHANGE:
        if move.begin:
            queue_op(queue, timing.late, state.sequence[move.worker, move.begin - 1])
    else:
        _queue_unit(instance, state, timing, queue, log, move.unit)
        if move.kind == TRADE:
            _queue_unit(instance, state, timing, queue, log, move.other)
        else:
            _queue_before_gaps(instance, state, timing, queue, log, move.other, places)
    return retime(
        instance, state, timing, queue, log, limits, (move.worker, move.begin, move.end)
    ) and _has_no_circular_wait(instance, state, timing, queue, move)


@jit_inlined
def _has_no_circular_wait(instance, state, timing, queue, move):
    """Return whether no op that `move` put elsewhere waits for itself."""
    # Only ops of zero duration are checked: any circular wait that `retime` does not detect
    # includes one of them.
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
        if (
            move.kind == TRADE
            and duration[twin] == 0
            and waits_for_itself(instance, state, timing, queue, twin)
        ):
            return False
    return True


@jit_inlined
def undo_move(instance, state, run, places, move):
    """Undo the change `move` of the state's orders and workers, but not of its timing.

    `places` has the places that a moved unit's ops had; `run` is a working array. For the timing,
    there is `revert_timing`.
    """
    if move.kind == EXCHANGE:
        _exchange_runs(
            state, run, move.worker, move.begin, move.begin + move.end - move.middle, move.end
        )
    elif move.kind == TRADE:
        _trade_units(instance, state, move.unit, move.other)
    else:
        _move_unit(instance, state, move.unit, move.other, places)


# --- Exchange -------------------------------------------------------------------------------------


@jit_inlined
def propose_exchange(random, instance, state, timing, cycle, run, path):
    """Exchange two neighbouring runs of ops in a worker's order; return the Move.

    The ops are mostly drawn from a critical path, which `path` keeps for further steps; `run` is a
    working array. If the drawn runs must not be exchanged, the state stays as it is, and NEVER is
    returned.
    """
    late = timing.late
    # Mostly at an op of a critical path, as in job-shop search (van Laarhoven et al. 1992,
    # Nowicki and Smutnicki 1996): elsewhere an exchange shortens no longest window.
    if random_below(random, 5):
        if path.size[0] < 0:
            worker = critical_worker(random, instance, state, timing, cycle.goal)
            critical_path(
                random,
                instance,
                state,
                late,
                state.sequence[worker, 0],
                (cycle.low, cycle.high),
                path,
            )
        if path.size[0] == 0:
            path.size[0] = -1
            return NEVER
        op = path.op[random_below(random, path.size[0])]
        middle = state.place[op] + 1
        if random_below(random, 4) == 0:
            middle += random_below(random, 3) - 1
    else:
        op = random_below(random, state.duration.shape[0])
        if late[op] < cycle.low or late[op] >= cycle.high:
            return NEVER
        middle = state.place[op]
    # Runs of ops on both sides of the drawn place.
    worker = state.worker[instance.unit[op]]
    before, behind = _run_length(random, cycle.largest_run), _run_length(random, cycle.largest_run)
    if random_below(random, 4) == 0:  # one op jumps over several
        before, behind = 1, 1 + random_below(random, cycle.longest_jump)
        if random_below(random, 2):
            before, behind = behind, before
    begin, end = middle - before, middle + behind
    if begin < 0 or end > state.size[worker]:
        return NEVER
    unit, row = instance.unit, state.sequence[worker]
    for place in range(begin, middle):
        for other in range(middle, end):
            if unit[row[place]] == unit[row[other]]:
                return NEVER  # a unit's own ops keep their order
    _exchange_runs(state, run, worker, begin, middle, end)
    return Move(EXCHANGE, -1, -1, worker, begin, middle, end)


@jit_inlined
def _run_length(random, largest):
    """Draw the number of a run's ops, 1 to `largest`; small ones more often."""
    size = 1
    while size < largest and random_below(random, 3) == 0:
        size += 1
    return size


@jit_inlined
def _exchange_runs(state, run, worker, begin, middle, end):
    """Exchange the ops of a worker at places [begin, middle) with those at [middle, end)."""
    row, size = state.sequence[worker], middle - begin
    for index in range(size):
        run[index] = row[begin + index]
    for index in range(middle, end):
        row[index - size] = row[index]
    for index in range(size):
        row[end - size + index] = run[index]
    for index in range(begin, end):
        state.place[row[index]] = index


@jit_inlined
def _is_order_within_capacity(instance, state, worker, end):
    """Return whether a worker's ops at places before `end` keep within its memory."""
    capacity = instance.capacity[worker]
    if capacity < 0:
        return True
    # Memory changes only at a worker's own ops, so that their order alone decides.
    sequence, holds, used = state.sequence, instance.holds, 0
    for place in range(end):
        used += holds[sequence[worker, place]]
        if used > capacity:
            return False
    return True


# --- Trade ----------------------------------------------------------------------------------------


@jit_inlined
def propose_trade(random, instance, state, late, cycle):
    """Let two random units of a slice trade workers and places; return the Move.

    Each takes the other's places in the workers' orders. Change nothing and return NEVER if the
    drawn units cannot trade, or if the first one's latest starts, `late` [op], are outside the
    ticks from `cycle.low` to below `cycle.high`.
    """
    unit = instance.movable[random_below(random, instance.movable.shape[0])]
    other = _draw_partner(random, instance, state, unit)
    if other < 0 or not _is_unit_in_range(instance, late, cycle, unit):
        return NEVER
    _trade_units(instance, state, unit, other)
    return Move(TRADE, unit, other, -1, 0, 0, 0)


@jit_inlined
def _draw_partner(random, instance, state, unit):
    """Draw a unit that `unit` may trade with; -1 if the drawn one cannot."""
    # A third of the time of the same worker: such a trade changes only its order.
    if random_below(random, 3) == 0:
        worker = state.worker[unit]
        other = instance.unit[state.sequence[worker, random_below(random, state.size[worker])]]
    else:
        other = instance.movable[random_below(random, instance.movable.shape[0])]
    return other if other != unit and instance.slice[other] == instance.slice[unit] else -1


@jit_inlined
def _is_unit_in_range(instance, late, cycle, unit):
    """Return whether a unit's latest starts reach into the ticks in which the cycle works."""
    kinds = instance.kinds
    return late[unit * kinds] < cycle.high and late[(unit + 1) * kinds - 1] >= cycle.low


@jit_borrowing
def _trade_units(instance, state, unit, other):
    worker, other_worker = state.worker[unit], state.worker[other]
    for kind in range(instance.kinds):
        op, twin = unit * instance.kinds + kind, other * instance.kinds + kind
        place, twin_place = state.place[op], state.place[twin]
        state.sequence[worker, place], state.sequence[other_worker, twin_place] = twin, op
        state.place[op], state.place[twin] = twin_place, place
        state.duration[op], state.duration[twin] = state.duration[twin], state.duration[op]
    state.worker[unit], state.worker[other] = other_worker, worker


# --- Move to another worker -----------------------------------------------------------------------


@jit_borrowing
def propose_move(random, instance, state, late, cycle, places):
    """Move a random unit to another random worker; return the Move.

    Fill `places` with the places that its ops have left. Change nothing and return NEVER if the
    drawn worker runs the unit already or has no place for it, or if the unit's latest starts,
    `late` [op], are outside the ticks from `cycle.low` to below `cycle.high`.
    """
    unit = instance.movable[random_below(random, instance.movable.shape[0])]
    worker = _draw_other_worker(random, instance, state, unit)
    if worker < 0 or not _is_unit_in_range(instance, late, cycle, unit):
        return NEVER
    old_worker = state.worker[unit]
    _find_places(instance, state, late, unit, worker, places)
    _move_unit(instance, state, unit, worker, places)
    return Move(MOVE, unit, old_worker, -1, 0, 0, 0)


@jit_borrowing
def _draw_other_worker(random, instance, state, unit):
    """Draw a worker for a unit; -1 if it is the present one or full."""
    hosts = instance.hosts[instance.slice[unit]]
    count = 0
    while count < hosts.shape[0] and hosts[count] >= 0:
        count += 1
    worker = hosts[random_below(random, count)]
    full = state.size[worker] + instance.kinds > state.sequence.shape[1]
    return -1 if full or worker == state.worker[unit] else worker


@jit_borrowing
def _find_places(instance, state, late, unit, worker, places):
    """Fill `places` [kind] with the places of a unit's ops in `worker`'s order, once inserted."""
    # Ops of the worker that start before the unit's op stay before it.
    kinds = instance.kinds
    row, place = state.sequence[worker], 0
    for kind in range(kinds):
        while place < state.size[worker] and late[row[place]] < late[unit * kinds + kind]:
            place += 1
        places[kind] = place + kind


@jit_borrowing
def _move_unit(instance, state, unit, worker, places):
    """Insert a unit's ops at `places` [kind] of another worker; return there the old places."""
    kinds, old_worker, number = instance.kinds, state.worker[unit], instance.slice[unit]
    for kind in range(kinds):
        _remove_op(state, unit * kinds + kind, old_worker)
    for kind in range(kinds):
        op = unit * kinds + kind
        before = state.place[op] + kind  # those removed before it were in front of it
        _insert_op(state, op, worker, places[kind])
        state.duration[op] = instance.cost[kind, number, worker]
        places[kind] = before
    state.worker[unit] = worker


@jit_borrowing
def _remove_op(state, op, worker):
    row = state.sequence[worker]
    for index in range(state.place[op], state.size[worker] - 1):
        row[index] = row[index + 1]
        state.place[row[index]] = index
    state.size[worker] -= 1


@jit_borrowing
def _insert_op(state, op, worker, place):
    """Insert an op into a worker's order, before the op at index `place`."""
    row = state.sequence[worker]
    for index in range(state.size[worker], place, -1):
        row[index] = row[index - 1]
        state.place[row[index]] = index
    row[place] = op
    state.place[op] = place
    state.size[worker] += 1


@jit_borrowing
def _queue_unit(instance, state, timing, queue, log, unit):
    """Queue for `retime` a moved unit's ops, and those that directly precede them."""
    worker, predecessors = state.worker[unit], instance.predecessors
    touch_pipeline(timing, log, instance.pipeline[worker])
    for op in range(unit * instance.kinds, (unit + 1) * instance.kinds):
        queue_op(queue, timing.late, op)
        for arc in range(predecessors.start[op], predecessors.start[op + 1]):
            queue_op(queue, timing.late, predecessors.op[arc])
        queue_op(
            queue,
            timing.late,
            state.sequence[worker, state.place[op] - 1] if state.place[op] else -1,
        )


@jit_borrowing
def _queue_before_gaps(instance, state, timing, queue, log, worker, places):
    """Queue for `retime` the ops before the gaps, at `places`, that a unit left."""
    touch_pipeline(timing, log, instance.pipeline[worker])
    # Places count from before the unit left, so those of its earlier kinds are taken off.
    for kind in range(instance.kinds):
        place = places[kind] - kind - 1
        if 0 <= place < state.size[worker]:
            queue_op(queue, timing.late, state.sequence[worker, place])


# --- Shift a deadline -----------------------------------------------------------------------------


@jit
def shift_deadline(chain, cycle, before, allowance):
    """Shift a group's end, or a reduction, so that a longest window may become shorter.

    Either the group of the window's worker must end earlier, or the group at which the window's
    critical path ends may end later, or, if reductions are TIMED, one of them begins at another
    tick. The shift is undone if it raises the cost by more than `allowance` or makes a wait
    circular. Return the cost afterwards; `before` is the cost now. Costs and `allowance` are in
    ticks.
    """
    random, instance, state, timing, trial = (
        chain.random,
        chain.instance,
        chain.state,
        chain.timing,
        chain.trial,
    )
    worker = critical_worker(random, instance, state, timing, cycle.goal)
    last = critical_path(
        random, instance, state, timing.late, state.sequence[worker, 0], (0, 0), chain.path
    )
    end, deadline, begin, turn = (
        state.end.copy(),
        state.deadline.copy(),
        state.begin.copy(),
        state.turn.copy(),
    )
    # Shift the beginning of a reduction, the end of a group, or the deadline of its compute.
    ticks = 1 + random_below(random, 1 + int(cycle.scale))
    if instance.interleaved == TIMED and random_below(random, 2):
        _shift_reduction(random, instance, state, timing.late, worker, last, ticks)
    elif instance.interleaved == TIMED or random_below(random, 2):
        state.end[instance.group[worker]] -= ticks
        set_deadlines_from_ends(instance, state)
    elif instance.interleaved:
        state.end[_group_ending_with(instance, state, timing.late, last)] += ticks
        set_deadlines_from_ends(instance, state)
    else:
        state.deadline[instance.group[state.worker[instance.unit[last]]]] += ticks
        set_ends_from_deadlines(instance, state)
    # All starts change, so the state is timed from scratch.
    period = time_state(instance, state, chain.sorting, trial, cycle.goal)
    after = state_cost(instance, trial, cycle)
    if period < 0 or after > before + allowance:
        state.end[:], state.deadline[:], state.begin[:], state.turn[:] = end, deadline, begin, turn
        return before
    timing.late[:] = trial.late
    timing.longest[:] = trial.longest
    timing.excess[:] = trial.excess
    return after


@jit
def _shift_reduction(random, instance, state, late, worker, last, ticks):
    """Begin a reduction later that the op `last` must precede, or move another one."""
    # A reduction that begins where the path ends may begin later.
    group = instance.group[state.worker[instance.unit[last]]]
    tick = late[last] + state.duration[last]
    for index in range(instance.between.shape[1]):
        number = instance.between[group, index]
        if number >= 0 and state.begin[number] == tick and random_below(random, 2):
            begin_reduction_at(instance, state, number, tick + ticks)
            return
    # Else, put any reduction of the group before any op.
    group, count = instance.group[worker], 0
    while count < instance.between.shape[1] and instance.between[group, count] >= 0:
        count += 1
    number = instance.between[group, random_below(random, count)]
    op = state.sequence[worker, random_below(random, state.size[worker])]
    begin_reduction_at(instance, state, number, late[op] - instance.ticks[number])


@jit_borrowing
def _group_ending_with(instance, state, late, op):
    """Return the group whose end keeps a critical path's last op from starting later."""
    # The op's own group, unless a reduction between compute ops begins when the op ends. Such a
    # reduction begins at the earliest end of its groups: then the group with that end.
    group, tick = instance.group[state.worker[instance.unit[op]]], late[op] + state.duration[op]
    for number in range(instance.between.shape[1]):
        reduction = instance.between[group, number]
        if reduction >= 0 and state.begin[reduction] == tick:
            for index in range(instance.sharers.shape[1]):
                other = instance.sharers[reduction, index]
                if other >= 0 and state.end[other] == tick:
                    return other
    return group
