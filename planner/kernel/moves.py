"""Draw a step of annealing, make it, and take it back.

    exchange    two neighbouring runs of ops of a worker change places, mostly at an arc of a critical path, as in
                job-shop search (van Laarhoven et al. 1992, Nowicki and Smutnicki 1996)
    trade       two units of one slice trade workers and places
    move        a unit moves to another worker, to where its ops fit by time
    shift       a deadline, or the end of a window, shifts

The first three are drawn by their `propose` functions, which also make the change; `undo_move` takes it back. A shift
moves the starts of a whole group, and so is timed from scratch and undone at once where it is refused.
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


@jit_inlined
def is_move_within_capacity(instance, state, move):
    """Return whether all workers whose ops the change `move` of the state has replaced or reordered still have enough
    memory for activations."""
    if move.kind == EXCHANGE:
        return _is_order_within_capacity(instance, state, move.worker, move.end)
    if move.kind == MOVE:
        worker = state.worker[move.unit]
        return _is_order_within_capacity(instance, state, worker, state.size[worker])
    return True  # a trade puts ops of one slice in each other's places


@jit_inlined
def retime_after(instance, state, timing, queue, log, limits, move, places):
    """Recompute the latest starts of ops after the change `move` of the state. Return False if the change must be
    undone: some busy window exceeds `limits` (`retime`), or there is a circular wait.

    Overwritten values, and the pipelines whose windows may have changed, are stored in `log`. If a unit moved to
    another worker, `places` has the places that its ops have left.
    """
    if move.kind == EXCHANGE:
        if move.begin:
            queue_op(queue, timing.late, state.sequence[move.worker, move.begin - 1])
    else:
        _queue_unit(instance, state, timing, queue, log, move.unit)
        if move.kind == TRADE:
            _queue_unit(instance, state, timing, queue, log, move.other)
        else:
            _queue_before_gaps(instance, state, timing, queue, log, move.other, places)
    return retime(instance, state, timing, queue, log, limits, (move.worker, move.begin, move.end)) and \
        _has_no_circular_wait(instance, state, timing, queue, move)


@jit_inlined
def _has_no_circular_wait(instance, state, timing, queue, move):
    """Return whether none of the ops that the change `move` put in other places is in a circular wait of ops of zero
    duration.

    Any circular wait that `retime` does not detect includes one of these ops.
    """
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


@jit_inlined
def undo_move(instance, state, run, places, move):
    """Undo the change `move` of the state's orders and workers; `places` are those of `propose_move`, `run` is a
    working array. The timing is undone by `revert_timing`."""
    if move.kind == EXCHANGE:
        _exchange_runs(state, run, move.worker, move.begin, move.begin + move.end - move.middle, move.end)
    elif move.kind == TRADE:
        _trade_units(instance, state, move.unit, move.other)
    else:
        _move_unit(instance, state, move.unit, move.other, places)


# --- Exchange ---------------------------------------------------------------------------------------------------------


@jit_inlined
def propose_exchange(random, instance, state, timing, cycle, run, path):
    """Exchange two neighbouring runs of ops in a worker's order, and return the change. The place is mostly drawn from
    a critical path, which `path` keeps for further steps; `run` is a working array.

    If the drawn runs must not change places, the state stays as it is, and NEVER (a `Move` without a change) is
    returned.
    """
    late = timing.late
    if random_below(random, 5):
        if path.size[0] < 0:
            worker = critical_worker(random, instance, state, timing, cycle.goal)
            critical_path(random, instance, state, late, state.sequence[worker, 0], (cycle.low, cycle.high), path)
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
def _run_length(random, most):
    """Draw the number of ops, from 1 to `most`, in a run of consecutive ops that changes places; small numbers are more
    frequent."""
    size = 1
    while size < most and random_below(random, 3) == 0:
        size += 1
    return size


@jit_inlined
def _exchange_runs(state, run, worker, begin, middle, end):
    """Exchange the ops of a worker at places [begin, middle) with those at [middle, end). `run` is a working array."""
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
    """Return whether a worker's ops at places before `end`, run in the state's order, keep within its memory."""
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


@jit_inlined
def propose_trade(random, instance, state, late, cycle):
    """Let two random units of a slice trade workers and places, and return the change.

    Change nothing and return NEVER (a `Move` without a change) if the drawn units cannot trade (`_draw_partner`), or if
    the first one, by the latest starts `late` [op], is outside of the cycle's range (`_is_unit_in_range`).
    """
    unit = instance.movable[random_below(random, instance.movable.shape[0])]
    other = _draw_partner(random, instance, state, unit)
    if other < 0 or not _is_unit_in_range(instance, late, cycle, unit):
        return NEVER
    _trade_units(instance, state, unit, other)
    return Move(TRADE, unit, other, -1, 0, 0, 0)


@jit_inlined
def _draw_partner(random, instance, state, unit):
    """Draw a unit for `unit` to trade places with, from those of its worker or from all; return -1 if the drawn unit is
    `unit` itself or of another slice."""
    if random_below(random, 3) == 0:
        worker = state.worker[unit]
        other = instance.unit[state.sequence[worker, random_below(random, state.size[worker])]]
    else:
        other = instance.movable[random_below(random, instance.movable.shape[0])]
    return other if other != unit and instance.slice[other] == instance.slice[unit] else -1


@jit_inlined
def _is_unit_in_range(instance, late, cycle, unit):
    """Return whether a unit's ops, by their latest starts `late` [op], reach into the ticks from `cycle.low` to below
    `cycle.high`, in which this cycle puts ops in other places."""
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


# --- Move to another worker -------------------------------------------------------------------------------------------


@jit_borrowing
def propose_move(random, instance, state, late, cycle, places):
    """Move a random unit to another worker in the state, fill `places` with the places that its ops have left, and
    return the change.

    Change nothing and return NEVER if no worker is drawn (`_draw_other_worker`), or if the latest starts of the unit's
    ops, in `late` [op], are all before `cycle.low`, or none is before `cycle.high`.
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
    """Draw a worker that may run a unit; return -1 if the drawn one runs it already or has no space for more ops."""
    hosts = instance.hosts[instance.slice[unit]]
    count = 0
    while count < hosts.shape[0] and hosts[count] >= 0:
        count += 1
    worker = hosts[random_below(random, count)]
    full = state.size[worker] + instance.kinds > state.sequence.shape[1]
    return -1 if full or worker == state.worker[unit] else worker


@jit_borrowing
def _find_places(instance, state, late, unit, worker, places):
    """Find the places in another worker's order where a unit's ops fit by their latest starts, `late` [op]; store them
    in `places` [kind]."""
    kinds = instance.kinds
    row, place = state.sequence[worker], 0
    for kind in range(kinds):
        while place < state.size[worker] and late[row[place]] < late[unit * kinds + kind]:
            place += 1
        places[kind] = place + kind


@jit_borrowing
def _move_unit(instance, state, unit, worker, places):
    """Assign a unit to a worker and insert its ops at `places` [kind] of the worker's order; then fill `places` with
    those that they had before."""
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
    """Remove an op from a worker's order."""
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
    """Queue for `retime` the ops of a unit that came to another worker or place, and the ops that must end before
    them."""
    worker, predecessors = state.worker[unit], instance.predecessors
    touch_pipeline(timing, log, instance.pipeline[worker])
    for op in range(unit * instance.kinds, (unit + 1) * instance.kinds):
        queue_op(queue, timing.late, op)
        for arc in range(predecessors.start[op], predecessors.start[op + 1]):
            queue_op(queue, timing.late, predecessors.op[arc])
        queue_op(queue, timing.late, state.sequence[worker, state.place[op] - 1] if state.place[op] else -1)


@jit_borrowing
def _queue_before_gaps(instance, state, timing, queue, log, worker, places):
    """Queue for `retime` the ops of a worker that came directly before the ops of a unit that has left the worker;
    `places` has the places that the unit's ops had there."""
    touch_pipeline(timing, log, instance.pipeline[worker])
    for kind in range(instance.kinds):
        place = places[kind] - kind - 1
        if 0 <= place < state.size[worker]:
            queue_op(queue, timing.late, state.sequence[worker, place])


# --- Shift a deadline -------------------------------------------------------------------------------------------------


@jit
def shift_deadline(chain, cycle, before, allowance):
    """Shift the tick at which a group (workers that hold the same layers) ends by a random number of ticks so that a
    longest busy window may become shorter.

    Either the group of the window's worker must end earlier, or the group at which the window's critical path ends may
    end its compute ops later. The shift is undone if the cost that annealing reduces, `before` in ticks, grows by more
    than `allowance`. Return the cost afterwards.
    """
    random, instance, state, timing, trial = chain.random, chain.instance, chain.state, chain.timing, chain.trial
    worker = critical_worker(random, instance, state, timing, cycle.goal)
    last = critical_path(random, instance, state, timing.late, state.sequence[worker, 0], (0, 0), chain.path)
    end, deadline, begin, turn = state.end.copy(), state.deadline.copy(), state.begin.copy(), state.turn.copy()
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
    """Let a reduction that keeps the op `last` from starting later begin `ticks` later or, half of the time and if
    there is none, put a random reduction of the worker's group directly before a random op of it. TIMED only."""
    group = instance.group[state.worker[instance.unit[last]]]
    tick = late[last] + state.duration[last]
    for index in range(instance.between.shape[1]):
        number = instance.between[group, index]
        if number >= 0 and state.begin[number] == tick and random_below(random, 2):
            begin_reduction_at(instance, state, number, tick + ticks)
            return
    group, count = instance.group[worker], 0
    while count < instance.between.shape[1] and instance.between[group, count] >= 0:
        count += 1
    number = instance.between[group, random_below(random, count)]
    op = state.sequence[worker, random_below(random, state.size[worker])]
    begin_reduction_at(instance, state, number, late[op] - instance.ticks[number])


@jit_borrowing
def _group_ending_with(instance, state, late, op):
    """Return the group (workers that hold the same layers) whose end keeps `op`, the last op of a critical path, from
    starting later.

    A reduction between compute ops begins at the earliest end of its groups. If one that the group of `op` shares
    begins when `op` ends, return a group with that earliest end; otherwise, the group of `op`. Latest starts are in
    `late` [op].
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
