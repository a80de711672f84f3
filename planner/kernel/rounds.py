"""Make orders in rounds: in each, every worker runs one gradient and one F.

A gradient is an I or B. A round has two halves, for the gradients and for the F. As many
micro-batches are in flight as before a round; W fill the gaps. Such are the schedules of zero
bubble (Qi et al. 2024, arXiv 2401.10241, and its V, 2405.15362).
"""

from typing import NamedTuple

import numpy as np

from .compiling import Ints, jit, jit_borrowing
from .lists import BACKWARD, FORWARD, NEEDED, WEIGHT, MemoryLimits
from .starts import FOREVER, Ops


class Lanes(NamedTuple):
    """Queues of ops, or lanes, in the order in which a worker runs them.

    Each worker has a lane for each of its slices and each of the kinds F and I (or B).
    """

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
    """Start tick of the lane's first op if nothing delays the first micro-batch, [lane]."""


class RoundRule(NamedTuple):
    """Rule by which orders in rounds are made, as numbers.

    `planner.search.round_scheduler.RoundRule` explains the fields.
    """

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
    """Value of `Progress.idle` in this rule's previous order, 0 at least, [worker].

    All are -1 for the first order. A worker may be idle for as long as the idlest one so far, or as
    its value is below the largest.
    """


class Progress(NamedTuple):
    """State of an order, in rounds or in turn, that is being made."""

    order: Ints
    end: Ints
    """Tick at which the op ends, [op]; -1 before it is placed."""
    next: Ints
    """Index in `Lanes.op` of the lane's next op, [lane].

    For an order in turn, index in its `turn` of the worker's next op, [worker].
    """
    free: Ints
    """Tick at which the worker ends its last op, [worker]."""
    used: Ints
    """Memory that the worker's micro-batches take, [worker]."""
    idle: Ints
    """Idle ticks of the worker less its spare ticks, [worker].

    The spare ticks are those by which its work is less than the busiest worker's.
    """
    weights: Ints
    """W of the worker whose I has been placed, [worker, number], the oldest first."""
    weight_bounds: Ints
    """Bounds in `weights` of the worker's W that wait: first and end, [worker, 2]."""
    chosen: Ints
    """Lane of the worker's next op in this half of the round, [worker].

    -1 if there is none; -2 once the worker has run an op in this half.
    """
    skipped: Ints
    """1 if the lane's next F is postponed to the next round, [lane]."""
    counters: Ints
    """Number of placed ops (at PLACED), and largest `idle`, at least 0 (at IDLE)."""


PLACED, IDLE = range(2)


@jit_borrowing
def _arrival(ops: "Ops", end: Ints, op: int) -> int:
    """Return the tick at which an op's inputs have come; -1 if still unknown."""
    # The hop is the transfer, if another worker ran the op before.
    tick, arcs = 0, ops.predecessors
    for arc in range(arcs.start[op], arcs.start[op + 1]):
        if end[arcs.op[arc]] < 0:
            return -1
        tick = max(tick, end[arcs.op[arc]] + arcs.hop[arc])
    return tick


@jit_borrowing
def _place_op(
    ops: "Ops", memory: MemoryLimits, state: Progress, worker: int, op: int, tick: int
) -> None:
    """Append an op that starts at `tick` to the order of its worker."""
    kind, number = op % ops.kinds, ops.slice[ops.unit[op]]
    state.order[state.counters[PLACED]] = op
    state.counters[PLACED] += 1
    state.free[worker] = tick + ops.duration[op]
    state.end[op] = state.free[worker]
    state.used[worker] += memory.room[number, kind]
    # I leaves a W, which has the next number of its unit.
    if kind == BACKWARD and ops.kinds > WEIGHT:
        state.weights[worker, state.weight_bounds[worker, 1]] = op + 1
        state.weight_bounds[worker, 1] += 1


@jit_borrowing
def _waiting_weight(state: Progress, worker: int) -> int:
    """Return the worker's oldest W whose I is placed; -1 if none waits."""
    first = state.weight_bounds[worker, 0]
    return state.weights[worker, first] if first < state.weight_bounds[worker, 1] else -1


@jit_borrowing
def _place_weight(ops: "Ops", memory: MemoryLimits, state: Progress, worker: int) -> None:
    op = _waiting_weight(state, worker)
    state.weight_bounds[worker, 0] += 1
    _place_op(ops, memory, state, worker, op, state.free[worker])


@jit_borrowing
def _free_after_weights(
    ops: "Ops", memory: MemoryLimits, state: Progress, worker: int, needed: int
) -> int:
    """Return the tick at which a worker can have `needed` memory free; -1 if never."""
    # As many waiting W as this takes, the oldest first, as they would run.
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
    """Return whether an F of `lane` that ends at `end` delays another lane's first op."""
    # Only lanes of the same worker that have not begun can be delayed by it.
    worker = lanes.worker[lane]
    for other in range(lanes.of_worker[worker], lanes.of_worker[worker + 1]):
        if other != lane and state.next[other] == lanes.start[other] and end > lanes.first[other]:
            return True
    return False


@jit
def _warm_up(
    ops: "Ops",
    lanes: Lanes,
    memory: MemoryLimits,
    rule: RoundRule,
    state: Progress,
    tolerance: int,
    limit: int,
) -> None:
    """Place at most `limit` F before each worker's first I, the earliest one each time."""
    while True:
        # The F that could start first, of the deepest lanes if several could.
        best, start = -1, FOREVER
        for index in range(lanes.forward.shape[0] - 1, -1, -1):
            lane = lanes.forward[index]
            place, worker = state.next[lane], lanes.worker[lane]
            if (
                place == lanes.start[lane + 1]
                or place - lanes.start[lane] >= rule.limit[lane]
                or _count_forwards(lanes, state, worker) >= limit
            ):
                continue
            op = lanes.op[place]
            tick = _arrival(ops, state.end, op)
            if tick < 0 or max(tick, state.free[worker]) >= start:
                continue
            tick = max(tick, state.free[worker])
            if state.used[worker] + _memory_needed(ops, memory, op) <= memory.capacity[
                worker
            ] and not _delays_first(lanes, state, lane, tick + ops.duration[op] - tolerance):
                best, start = lane, tick
        if best < 0:
            return
        # A worker does not idle before its first op: its window begins with it.
        worker = lanes.worker[best]
        if state.free[worker]:
            _count_idle(state, worker, start)
        _place_op(ops, memory, state, worker, lanes.op[state.next[best]], start)
        state.next[best] += 1


@jit_borrowing
def _count_forwards(lanes: Lanes, state: Progress, worker: int) -> int:
    """Return how many F of a worker are placed before its first I or B."""
    count = 0
    for lane in range(lanes.of_worker[worker], lanes.of_worker[worker + 1]):
        count += state.next[lane] - lanes.start[lane]
    return count


@jit_borrowing
def _next_gradient(ops: "Ops", lanes: Lanes, state: Progress, worker: int) -> int:
    """Return when a worker's next I or B is expected; FOREVER if none is."""
    earliest, arcs = FOREVER, ops.predecessors
    for lane in range(lanes.of_worker[worker], lanes.of_worker[worker + 1]):
        if (
            state.next[lane] == lanes.start[lane + 1]
            or lanes.op[state.next[lane]] % ops.kinds == FORWARD
        ):
            continue
        # An input that is not placed comes after an F and itself, on another worker.
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
                tick = max(
                    tick,
                    state.free[source]
                    + ops.duration[forward]
                    + ops.duration[before]
                    + arcs.hop[arc],
                )
        # A worker has a lane for each of its slices; the first gradient of any counts.
        earliest = min(earliest, tick)
    return earliest


@jit
def _mark_skipped(ops: "Ops", lanes: Lanes, memory: MemoryLimits, state: Progress) -> None:
    """Mark as skipped the lanes whose next F would delay the worker's next I."""
    # From the last slices on, since a lane looks at the lane that it feeds.
    for index in range(lanes.forward.shape[0] - 1, -1, -1):
        lane = lanes.forward[index]
        place, worker = state.next[lane], lanes.worker[lane]
        state.skipped[lane] = 0
        if place == lanes.start[lane + 1] or ops.back[ops.unit[lanes.op[place]]] == 0:
            continue
        op = lanes.op[place]
        # A lane also waits if the one that it feeds does.
        following = lanes.lane[op + ops.kinds]  # the same micro-batch at the next slice
        if state.skipped[following] and state.next[following] < lanes.start[following + 1]:
            state.skipped[lane] = 1
            continue
        # Only if the next slice has other F to run meanwhile: two that it has not begun.
        if place - lanes.start[lane] < 2 or state.end[lanes.op[place - 2] + ops.kinds] >= 0:
            continue
        # Skip it if it would end after the I comes, and the worker has idle ticks to spare.
        expected = _next_gradient(ops, lanes, state, worker)
        begin = _free_after_weights(ops, memory, state, worker, _memory_needed(ops, memory, op))
        if expected == FOREVER or (begin >= 0 and begin + ops.duration[op] <= expected):
            continue
        if expected - state.free[worker] <= max(0, state.counters[IDLE] - state.idle[worker]):
            state.skipped[lane] = 1


@jit
def _choose_lanes(
    ops: "Ops", lanes: Lanes, memory: MemoryLimits, state: Progress, half: Ints
) -> None:
    """Choose for each worker a lane of `half` whose next op can be placed."""
    # Of several lanes, the one furthest along the route, so that micro-batches finish.
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
    return (
        _arrival(ops, state.end, op) >= 0
        and _free_after_weights(
            ops, memory, state, lanes.worker[lane], _memory_needed(ops, memory, op)
        )
        >= 0
    )


@jit
def _run_half(
    ops: "Ops",
    lanes: Lanes,
    memory: MemoryLimits,
    rule: RoundRule,
    state: Progress,
    half: Ints,
    cascade: Ints,
    fill: bool,
) -> None:
    """Place W and an op of each worker from the lanes of a half round."""
    _choose_lanes(ops, lanes, memory, state, half)
    spare = rule.approved.max()
    # A worker without a chosen lane runs an op that becomes ready in this half of the round, if
    # `cascade` allows it for the lane.
    for lane in half:
        worker = lanes.worker[lane]
        if state.chosen[worker] != lane and (state.chosen[worker] != -1 or not cascade[lane]):
            continue
        if not _can_place(ops, lanes, memory, state, lane):
            continue
        op = lanes.op[state.next[lane]]
        # W first: those that free the memory, then those that end before the op's inputs come.
        needed, tick = _memory_needed(ops, memory, op), _arrival(ops, state.end, op)
        while state.used[worker] + needed > memory.capacity[worker]:
            _place_weight(ops, memory, state, worker)
        weight = _waiting_weight(state, worker)
        while weight >= 0 and state.free[worker] + ops.duration[weight] <= tick:
            _place_weight(ops, memory, state, worker)
            weight = _waiting_weight(state, worker)
        # One more W delays the op; it runs if the worker would else be idle too long.
        if weight >= 0 and fill and tick > state.free[worker]:
            allowed = max(state.counters[IDLE], spare - rule.approved[worker])
            if (
                tick - state.free[worker]
                > allowed - state.idle[worker] + rule.patience * ops.duration[weight]
            ):
                _place_weight(ops, memory, state, worker)
        # The op itself.
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
    """Set `cascade` to 1 for the worker's first lane in `half` that has ops left."""
    for lane in half:
        if lanes.worker[lane] == worker and state.next[lane] < lanes.start[lane + 1]:
            cascade[lane] = 1
            return


@jit
def _begin_order(ops: "Ops", memory: MemoryLimits, next: Ints, idle: Ints, order: Ints) -> Progress:
    """Return the state of an order before its first op is placed."""
    workers = memory.capacity.shape[0]
    # No worker has more W than units.
    load = np.zeros(workers, np.int64)
    for worker in ops.worker:
        load[worker] += 1
    return Progress(
        order,
        np.full(order.shape[0], -1, np.int64),
        next,
        np.zeros(workers, np.int64),
        np.zeros(workers, np.int64),
        idle,
        np.zeros((workers, load.max()), np.int64),
        np.zeros((workers, 2), np.int64),
        np.zeros(workers, np.int64),
        np.zeros(next.shape[0], np.int64),
        np.zeros(2, np.int64),
    )


@jit_borrowing
def _place_left_weights(ops: "Ops", memory: MemoryLimits, state: Progress) -> None:
    """Place all W that still wait, after all other ops."""
    for worker in range(memory.capacity.shape[0]):
        while _waiting_weight(state, worker) >= 0:
            _place_weight(ops, memory, state, worker)


@jit
def order_in_rounds(
    ops: "Ops", lanes: Lanes, memory: MemoryLimits, rule: RoundRule, idle: Ints, order: Ints
) -> int:
    """Write the numbers of all ops to `order`, in rounds by a rule.

    Return how many were placed: fewer than all if no worker can go on for lack of memory. On entry,
    `idle` [worker] has the ticks by which the busiest worker has more work, as negative numbers;
    the ticks for which the worker is idle are added to them.
    """
    workers, count = memory.capacity.shape[0], lanes.worker.shape[0]
    state = _begin_order(ops, memory, lanes.start[:-1].copy(), idle, order)
    # Lanes that may follow in the same half: all but the last of a worker on the way.
    cascade = np.zeros(count, np.int64)
    for half, allowed in (
        (lanes.forward, rule.cascade_forward),
        (lanes.gradient, rule.cascade_gradient),
    ):
        state.chosen[:] = -1
        for lane in half:
            if allowed and state.chosen[lanes.worker[lane]] < 0:
                cascade[lane] = 1
            state.chosen[lanes.worker[lane]] = lane
    # The F before the first I.
    _warm_up(ops, lanes, memory, rule, state, rule.tolerance, FOREVER)
    # Others then get as many F as the worker with the most, even if that delays first
    # micro-batches.
    if rule.even:
        largest = 0
        for worker in range(workers):
            largest = max(largest, _count_forwards(lanes, state, worker))
        _warm_up(ops, lanes, memory, rule, state, FOREVER, largest)
    # The rounds. Where nothing can be placed, one more is tried without skipped lanes.
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
def order_in_turn(
    ops: "Ops",
    memory: MemoryLimits,
    begin: Ints,
    turn: Ints,
    waiting: Ints,
    late_drain: bool,
    patience: float,
    order: Ints,
) -> int:
    """Write all ops to `order`; each worker's F and I (or B) follow `turn`.

    Return how many were placed: fewer than all if ops wait for each other, or for memory. Worker w
    runs the ops from index begin[w] to below begin[w + 1] of `turn`; -1 stands for its oldest W
    that waits. At most waiting[w] of its W wait after an I; with `late_drain`, any number may after
    the I that follows its last F. W also run where memory is needed, or where the worker would else
    be idle for at least `patience` durations of a W.
    """
    workers = memory.capacity.shape[0]
    # The index in `turn` behind the I that follows each worker's last F.
    drain = np.zeros(workers, np.int64)
    for worker in range(workers):
        for index in range(begin[worker], begin[worker + 1]):
            if turn[index] >= 0 and turn[index] % ops.kinds == FORWARD:
                drain[worker] = index + 2
    state = _begin_order(ops, memory, begin[:-1].copy(), np.zeros(workers, np.int64), order)
    # Place what can be placed, worker by worker, until nothing more can.
    placed = -1
    while placed < state.counters[PLACED]:
        placed = state.counters[PLACED]
        for worker in range(workers):
            while state.next[worker] < begin[worker + 1]:
                op = turn[state.next[worker]]
                # The sequence asks for a W here; if none waits, it goes on.
                if op < 0:
                    if _waiting_weight(state, worker) >= 0:
                        _place_weight(ops, memory, state, worker)
                    state.next[worker] += 1
                    continue
                tick, needed = _arrival(ops, state.end, op), _memory_needed(ops, memory, op)
                if tick < 0 or _free_after_weights(ops, memory, state, worker, needed) < 0:
                    break
                # W that free memory, then W in the time that the worker would be idle.
                while state.used[worker] + needed > memory.capacity[worker]:
                    _place_weight(ops, memory, state, worker)
                weight = _waiting_weight(state, worker)
                while weight >= 0 and tick - state.free[worker] >= patience * ops.duration[weight]:
                    _place_weight(ops, memory, state, worker)
                    weight = _waiting_weight(state, worker)
                _place_op(ops, memory, state, worker, op, max(tick, state.free[worker]))
                state.next[worker] += 1
                # W that may wait no longer.
                if not late_drain or state.next[worker] <= drain[worker]:
                    first, last = state.weight_bounds[worker]
                    for _ in range(last - first - waiting[worker]):
                        _place_weight(ops, memory, state, worker)
    _place_left_weights(ops, memory, state)
    return state.counters[PLACED]
