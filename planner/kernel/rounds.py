"""Make orders in rounds: in each, every worker runs one I (or B) and one F, so that as many micro-batches are in flight
as before it; W fill the gaps.

Such are the schedules of zero bubble (Qi et al. 2024, arXiv 2401.10241, and its V, 2405.15362).
"""

from typing import NamedTuple

import numpy as np

from .compiling import Ints, jit, jit_borrowing
from .lists import BACKWARD, FORWARD, NEEDED, WEIGHT, MemoryLimits
from .starts import FOREVER, Ops


class Lanes(NamedTuple):
    """Queues of ops in the order in which a worker runs them: a lane for each worker, slice and kind, F or I (or B)."""

    start: Ints
    """Index in `op` of the lane's first op, [lanes + 1]."""
    op: Ints
    """Ops of all lanes, one lane after the other."""
    lane: Ints
    """Lane of the op, [op]; -1 for a W."""
    worker: Ints
    """Worker that runs the lane's ops, [lane]; ascending."""
    of_worker: Ints
    """First lane of the worker, [workers + 1]."""
    forward: Ints
    """Lanes of F, those of the first slices first."""
    gradient: Ints
    """Lanes of I or B, those of the last slices first."""
    first: Ints
    """Tick at which the lane's first op starts if nothing delays the first micro-batch, [lane]."""


class RoundRule(NamedTuple):
    """Rule by which orders in rounds are made; `planner.search.round_scheduler.RoundRule` explains the fields."""

    limit: Ints
    """Most F of the lane before the worker's first I, [lane]."""
    tolerance: int
    even: bool
    patience: float
    fill_forward: bool
    skip: bool
    cascade_forward: bool
    cascade_gradient: bool
    pass_on: bool
    approved: Ints
    """Idle ticks that the worker may have, [worker]: those that it had in an order made before, or -1."""


class Progress(NamedTuple):
    """State of an order, in rounds or in turn, that is being made."""

    order: Ints
    end: Ints
    """Tick at which the op ends, [op]; -1 before it is placed."""
    next: Ints
    """Index in `Lanes.op` of the lane's next op, [lane]; of an order in turn, in `turn`, [worker]."""
    free: Ints
    """Tick at which the worker ends its last op, [worker]."""
    used: Ints
    """Memory that the worker's micro-batches take, [worker]."""
    idle: Ints
    """Idle ticks of the worker between its ops, less the work that the busiest worker has more, [worker]."""
    weights: Ints
    """W that may run, [worker, number], the oldest first."""
    weight_bounds: Ints
    """First number of a W in `weights` that has not run, and the number after the last, [worker, 2]."""
    chosen: Ints
    """Lane from which the worker takes its next op in this half of the round, [worker]; -1 if it has none, -2 if it
    has run one."""
    skipped: Ints
    """1 if the lane's next F waits for the round after this one, [lane]."""
    counters: Ints
    """Number of placed ops (PLACED), and the most idle ticks of a worker (IDLE)."""


PLACED, IDLE = range(2)


@jit_borrowing
def _arrival(ops: "Ops", end: Ints, op: int) -> int:
    """Return the tick at which all ops for which an op waits have reached it; -1 if one of them is not placed."""
    tick, arcs = 0, ops.predecessors
    for arc in range(arcs.start[op], arcs.start[op + 1]):
        if end[arcs.op[arc]] < 0:
            return -1
        tick = max(tick, end[arcs.op[arc]] + arcs.hop[arc])
    return tick


@jit_borrowing
def _place_op(ops: "Ops", memory: MemoryLimits, state: Progress, worker: int, op: int, tick: int) -> None:
    """Append an op that starts at `tick` to the order of its worker."""
    kind, number = op % ops.kinds, ops.slice[ops.unit[op]]
    state.order[state.counters[PLACED]] = op
    state.counters[PLACED] += 1
    state.free[worker] = tick + ops.duration[op]
    state.end[op] = state.free[worker]
    state.used[worker] += memory.room[number, kind]
    if kind == BACKWARD and ops.kinds > WEIGHT:
        state.weights[worker, state.weight_bounds[worker, 1]] = op + 1
        state.weight_bounds[worker, 1] += 1


@jit_borrowing
def _waiting_weight(state: Progress, worker: int) -> int:
    """Return the worker's oldest W that may run, or -1."""
    first = state.weight_bounds[worker, 0]
    return state.weights[worker, first] if first < state.weight_bounds[worker, 1] else -1


@jit_borrowing
def _place_weight(ops: "Ops", memory: MemoryLimits, state: Progress, worker: int) -> None:
    op = _waiting_weight(state, worker)
    state.weight_bounds[worker, 0] += 1
    _place_op(ops, memory, state, worker, op, state.free[worker])


@jit_borrowing
def _free_after_weights(ops: "Ops", memory: MemoryLimits, state: Progress, worker: int, needed: int) -> int:
    """Return the tick at which a worker could have run as many W as it takes to have `needed` memory; -1 if all of its
    W are not enough."""
    tick, free = state.free[worker], memory.capacity[worker] - state.used[worker]
    for number in range(state.weight_bounds[worker, 0], state.weight_bounds[worker, 1]):
        if free >= needed:
            return tick
        op = state.weights[worker, number]
        tick += ops.duration[op]
        free -= memory.room[ops.slice[ops.unit[op]], WEIGHT]
    return tick if free >= needed else -1


@jit_borrowing
def _memory_needed(ops: "Ops", memory: MemoryLimits, op: int) -> int:
    number = ops.slice[ops.unit[op]]
    return memory.room[number, NEEDED if op % ops.kinds == FORWARD else BACKWARD]


@jit_borrowing
def _count_idle(state: Progress, worker: int, tick: int) -> None:
    state.idle[worker] += tick - state.free[worker]
    state.counters[IDLE] = max(state.counters[IDLE], state.idle[worker])


@jit_borrowing
def _delays_first(lanes: Lanes, state: Progress, lane: int, end: int) -> bool:
    """Return whether an F of a lane that ends at tick `end` delays the first micro-batch in another lane of the
    worker."""
    worker = lanes.worker[lane]
    for other in range(lanes.of_worker[worker], lanes.of_worker[worker + 1]):
        if other != lane and state.next[other] == lanes.start[other] and end > lanes.first[other]:
            return True
    return False


@jit
def _warm_up(ops: "Ops", lanes: Lanes, memory: MemoryLimits, rule: RoundRule, state: Progress, tolerance: int,
             most: int) -> None:
    """Place F before the first I of each worker, in the order of their starts: as many as memory allows, at most `most`
    of a worker, and none that delays the first micro-batch by more than `tolerance`."""
    while True:
        best, start = -1, FOREVER
        for index in range(lanes.forward.shape[0] - 1, -1, -1):
            lane = lanes.forward[index]
            place, worker = state.next[lane], lanes.worker[lane]
            if place == lanes.start[lane + 1] or place - lanes.start[lane] >= rule.limit[lane] \
                    or _count_forwards(lanes, state, worker) >= most:
                continue
            op = lanes.op[place]
            tick = _arrival(ops, state.end, op)
            if tick < 0 or max(tick, state.free[worker]) >= start:
                continue
            tick = max(tick, state.free[worker])
            if state.used[worker] + _memory_needed(ops, memory, op) <= memory.capacity[worker] \
                    and not _delays_first(lanes, state, lane, tick + ops.duration[op] - tolerance):
                best, start = lane, tick
        if best < 0:
            return
        worker = lanes.worker[best]
        if state.free[worker]:
            _count_idle(state, worker, start)
        _place_op(ops, memory, state, worker, lanes.op[state.next[best]], start)
        state.next[best] += 1


@jit_borrowing
def _count_forwards(lanes: Lanes, state: Progress, worker: int) -> int:
    """Return how many F of a worker are placed, before its first I or B."""
    count = 0
    for lane in range(lanes.of_worker[worker], lanes.of_worker[worker + 1]):
        count += state.next[lane] - lanes.start[lane]
    return count


@jit_borrowing
def _next_gradient(ops: "Ops", lanes: Lanes, state: Progress, worker: int) -> int:
    """Return the tick at which a worker's next I or B is expected to arrive, if the workers before it run an F first;
    FOREVER if none is to come."""
    earliest, arcs = FOREVER, ops.predecessors
    for lane in range(lanes.of_worker[worker], lanes.of_worker[worker + 1]):
        if state.next[lane] == lanes.start[lane + 1] or lanes.op[state.next[lane]] % ops.kinds == FORWARD:
            continue
        op, tick = lanes.op[state.next[lane]], 0
        for arc in range(arcs.start[op], arcs.start[op + 1]):
            before = arcs.op[arc]
            source = ops.worker[ops.unit[before]]
            if state.end[before] >= 0:
                tick = max(tick, state.end[before] + arcs.hop[arc])
            elif source == worker:
                tick = FOREVER
            else:
                forward = ops.unit[before] * ops.kinds
                tick = max(tick, state.free[source] + ops.duration[forward] + ops.duration[before] + arcs.hop[arc])
        earliest = min(earliest, tick)
    return earliest


@jit
def _mark_skipped(ops: "Ops", lanes: Lanes, memory: MemoryLimits, state: Progress) -> None:
    """Mark the lanes whose next F would delay the worker's next I, if the worker may be idle instead and the next slice
    has enough F to run."""
    for index in range(lanes.forward.shape[0] - 1, -1, -1):
        lane = lanes.forward[index]
        place, worker = state.next[lane], lanes.worker[lane]
        state.skipped[lane] = 0
        if place == lanes.start[lane + 1] or ops.back[ops.unit[lanes.op[place]]] == 0:
            continue
        op = lanes.op[place]
        following = lanes.lane[op + ops.kinds]  # the same micro-batch at the next slice
        if state.skipped[following] and state.next[following] < lanes.start[following + 1]:
            state.skipped[lane] = 1
            continue
        if place - lanes.start[lane] < 2 or state.end[lanes.op[place - 2] + ops.kinds] >= 0:
            continue
        expected = _next_gradient(ops, lanes, state, worker)
        begin = _free_after_weights(ops, memory, state, worker, _memory_needed(ops, memory, op))
        if expected == FOREVER or (begin >= 0 and begin + ops.duration[op] <= expected):
            continue
        if expected - state.free[worker] <= max(0, state.counters[IDLE] - state.idle[worker]):
            state.skipped[lane] = 1


@jit
def _choose_lanes(ops: "Ops", lanes: Lanes, memory: MemoryLimits, state: Progress, half: Ints) -> None:
    """Choose for each worker the lane of `half` furthest along the route whose next op can be placed now."""
    state.chosen[:] = -1
    for index in range(half.shape[0] - 1, -1, -1):
        lane = half[index]
        worker = lanes.worker[lane]
        if state.chosen[worker] < 0 and _can_place(ops, lanes, memory, state, lane):
            state.chosen[worker] = lane


@jit_borrowing
def _can_place(ops: "Ops", lanes: Lanes, memory: MemoryLimits, state: Progress, lane: int) -> bool:
    if state.next[lane] == lanes.start[lane + 1] or state.skipped[lane]:
        return False
    op = lanes.op[state.next[lane]]
    return _arrival(ops, state.end, op) >= 0 and _free_after_weights(
        ops, memory, state, lanes.worker[lane], _memory_needed(ops, memory, op)) >= 0


@jit
def _run_half(ops: "Ops", lanes: Lanes, memory: MemoryLimits, rule: RoundRule, state: Progress, half: Ints,
              cascade: Ints, fill: bool) -> None:
    """Place one op of each worker from the lanes `half` (those of F, or those of I or B), with W before it.

    A worker without a chosen lane takes an op that another one makes ready in this half, from a lane with 1 in
    `cascade`.
    """
    _choose_lanes(ops, lanes, memory, state, half)
    spare = rule.approved.max()
    for lane in half:
        worker = lanes.worker[lane]
        if state.chosen[worker] != lane and (state.chosen[worker] != -1 or not cascade[lane]):
            continue
        if not _can_place(ops, lanes, memory, state, lane):
            continue
        op = lanes.op[state.next[lane]]
        needed, tick = _memory_needed(ops, memory, op), _arrival(ops, state.end, op)
        while state.used[worker] + needed > memory.capacity[worker]:
            _place_weight(ops, memory, state, worker)
        weight = _waiting_weight(state, worker)
        while weight >= 0 and state.free[worker] + ops.duration[weight] <= tick:
            _place_weight(ops, memory, state, worker)
            weight = _waiting_weight(state, worker)
        if weight >= 0 and fill and tick > state.free[worker]:
            most = max(state.counters[IDLE], spare - rule.approved[worker])
            if tick - state.free[worker] > most - state.idle[worker] + rule.patience * ops.duration[weight]:
                _place_weight(ops, memory, state, worker)
        tick = max(tick, state.free[worker])
        if state.free[worker]:
            _count_idle(state, worker, tick)
        _place_op(ops, memory, state, worker, op, tick)
        state.next[lane] += 1
        state.chosen[worker] = -2
        if rule.pass_on and cascade[lane] and state.next[lane] == lanes.start[lane + 1]:
            _pass_on_cascade(lanes, state, half, cascade, worker)


@jit_borrowing
def _pass_on_cascade(lanes: Lanes, state: Progress, half: Ints, cascade: Ints, worker: int) -> None:
    """Mark the worker's first lane of `half` that still has ops in `cascade`."""
    for lane in half:
        if lanes.worker[lane] == worker and state.next[lane] < lanes.start[lane + 1]:
            cascade[lane] = 1
            return


@jit
def _begin_order(ops: "Ops", memory: MemoryLimits, next: Ints, idle: Ints, order: Ints) -> Progress:
    """Return the state before the first op is placed; `next` and `idle` are those of `Progress`."""
    workers = memory.capacity.shape[0]
    load = np.zeros(workers, np.int64)
    for worker in ops.worker:
        load[worker] += 1
    return Progress(order, np.full(order.shape[0], -1, np.int64), next, np.zeros(workers, np.int64),
                    np.zeros(workers, np.int64), idle, np.zeros((workers, load.max()), np.int64),
                    np.zeros((workers, 2), np.int64), np.zeros(workers, np.int64), np.zeros(next.shape[0], np.int64),
                    np.zeros(2, np.int64))


@jit_borrowing
def _place_left_weights(ops: "Ops", memory: MemoryLimits, state: Progress) -> None:
    """Place all W that have waited until the end."""
    for worker in range(memory.capacity.shape[0]):
        while _waiting_weight(state, worker) >= 0:
            _place_weight(ops, memory, state, worker)


@jit
def order_in_rounds(ops: "Ops", lanes: Lanes, memory: MemoryLimits, rule: RoundRule, idle: Ints, order: Ints) -> int:
    """Write the ops to `order` as the rounds of a rule place them, and return their number: fewer than all if no worker
    can go on for lack of memory.

    On entry `idle` [worker] has the work that the busiest worker has more, as a negative number; on return, the idle
    ticks of the workers in addition.
    """
    workers, count = memory.capacity.shape[0], lanes.worker.shape[0]
    state = _begin_order(ops, memory, lanes.start[:-1].copy(), idle, order)
    cascade = np.zeros(count, np.int64)
    for half, allowed in ((lanes.forward, rule.cascade_forward), (lanes.gradient, rule.cascade_gradient)):
        state.chosen[:] = -1
        for lane in half:
            if allowed and state.chosen[lanes.worker[lane]] < 0:
                cascade[lane] = 1
            state.chosen[lanes.worker[lane]] = lane
    _warm_up(ops, lanes, memory, rule, state, rule.tolerance, FOREVER)
    if rule.even:
        most = 0
        for worker in range(workers):
            most = max(most, _count_forwards(lanes, state, worker))
        _warm_up(ops, lanes, memory, rule, state, FOREVER, most)
    stuck = 0
    while stuck < 2:
        placed = state.counters[PLACED]
        _run_half(ops, lanes, memory, rule, state, lanes.gradient, cascade, True)
        if rule.skip and not stuck:
            _mark_skipped(ops, lanes, memory, state)
        _run_half(ops, lanes, memory, rule, state, lanes.forward, cascade, rule.fill_forward)
        state.skipped[:] = 0
        stuck = 0 if state.counters[PLACED] > placed else stuck + 1
    _place_left_weights(ops, memory, state)
    return state.counters[PLACED]


@jit
def order_in_turn(ops: "Ops", memory: MemoryLimits, begin: Ints, turn: Ints, waiting: Ints, late_drain: bool,
                  patience: float, order: Ints) -> int:
    """Write the ops to `order`, with F and I (or B) as `turn` says, and return their number: fewer than all if memory
    is lacking.

    The F and I of worker w are those from index begin[w] to below begin[w + 1] of `turn`, in this order; -1 is the
    oldest W that waits. At most waiting[w] of its W wait after an I; with `late_drain`, any number do after the I that
    follows its last F. W also run where memory is needed, or where the worker would else be idle for `patience`
    durations of a W.
    """
    workers = memory.capacity.shape[0]
    drain = np.zeros(workers, np.int64)
    for worker in range(workers):
        for index in range(begin[worker], begin[worker + 1]):
            if turn[index] >= 0 and turn[index] % ops.kinds == FORWARD:
                drain[worker] = index + 2
    state = _begin_order(ops, memory, begin[:-1].copy(), np.zeros(workers, np.int64), order)
    placed = -1
    while placed < state.counters[PLACED]:
        placed = state.counters[PLACED]
        for worker in range(workers):
            while state.next[worker] < begin[worker + 1]:
                op = turn[state.next[worker]]
                if op < 0:
                    if _waiting_weight(state, worker) >= 0:
                        _place_weight(ops, memory, state, worker)
                    state.next[worker] += 1
                    continue
                tick, needed = _arrival(ops, state.end, op), _memory_needed(ops, memory, op)
                if tick < 0 or _free_after_weights(ops, memory, state, worker, needed) < 0:
                    break
                while state.used[worker] + needed > memory.capacity[worker]:
                    _place_weight(ops, memory, state, worker)
                weight = _waiting_weight(state, worker)
                while weight >= 0 and tick - state.free[worker] >= patience * ops.duration[weight]:
                    _place_weight(ops, memory, state, worker)
                    weight = _waiting_weight(state, worker)
                _place_op(ops, memory, state, worker, op, max(tick, state.free[worker]))
                state.next[worker] += 1
                if not late_drain or state.next[worker] <= drain[worker]:
                    first, last = state.weight_bounds[worker]
                    for _ in range(last - first - waiting[worker]):
                        _place_weight(ops, memory, state, worker)
    _place_left_weights(ops, memory, state)
    return state.counters[PLACED]
