"""Make list schedules: a worker that becomes idle takes the most urgent ready op.

Gradients come first (they free memory and others wait for them), then forwards while memory lasts, then weight
gradients. An op is ready when all its predecessors have ended and their tensors have come.
"""

from typing import NamedTuple

import numpy as np

from .compiling import Ints, jit
from .starts import Ops

# Every worker has five heaps: forwards, gradients and weights that are ready, and the times when those that are known
# to come will be. All lie in one array; a key is a rank that is different for every unit, with the unit as its
# remainder. Arrays are passed one by one: taking one out of a named tuple costs as much as a step on a heap.

FORWARD, BACKWARD, WEIGHT, ARRIVAL, GRADIENT, HEAPS = 0, 1, 2, 3, 4, 5
"""Numbers of the heaps of a worker. The first three are also the kinds of op: F; I or B; W. They hold ops that are
ready; the other two the ticks at which ops will become ready: F, I and B in ARRIVAL, I and B in GRADIENT."""
READY, END, EVENTS = (0, 1, 3), 2, 4
"""Codes that order simultaneous events of a list schedule: READY[kind], an op of this kind becomes ready; END, an op
ends. EVENTS is the number of codes."""
BUSY, AWAKE, USED, CAPACITY, FILLED, HEAP, SIZE, SLOTS = 0, 1, 2, 3, 4, 5, 5 + HEAPS, 5 + 2 * HEAPS
"""Columns of the state of a worker. They are: whether it runs an op, whether something has just happened to it, the
memory used, its capacity, whether it has begun a gradient, where its heaps begin, how many keys they hold, and how many
more micro-batches it may have in flight at each slice."""
NEEDED = 3


class MemoryLimits(NamedTuple):
    """Memory of the workers for activations, and what the ops of each slice take of it, in units of memory."""

    capacity: Ints
    """Units of memory for activations that the worker has, [worker]."""
    room: Ints
    """Units of memory for a micro-batch. [slice, kind] is what the op takes: F when it starts, I, B and W when they
    end. [slice, NEEDED] must be free when an F starts (`planner.search.list_scheduler.ReservedMemory`)."""


class Dispatch(NamedTuple):
    """Dispatch rule of a list schedule as numbers; see `planner.search.list_scheduler.DispatchRule` for its
    parameters."""

    rank: Ints
    """Urgency of the unit's F, [unit]: the lower the more urgent; all different among the units of a slice."""
    gradient_rank: Ints
    """Urgency of the unit's I, B and W, [unit]: a lower number is more urgent; all differ among the units of a
    slice."""
    slots: Ints
    """Largest number of micro-batches that a worker may have between the start of F and the end of I, [worker,
    slice]."""
    lookahead: float
    forward_wait: Ints
    """Ticks for which a worker waits for an I or B rather than start an F, [before | after its first I or B, slice]."""
    deepest_first: bool
    eager_weights: bool
    make_room: bool
    transfers: bool
    """True if transfers between workers take time; otherwise tensors arrive at once."""


class Choices(NamedTuple):
    """Scalar values of the problem and of the dispatch rule by which `_pick_op` chooses a worker's next op."""

    kinds: int
    mixed: bool
    """True if workers hold several slices, so that a less urgent op may have room if the first has none."""
    lookahead: float
    eager_weights: bool
    make_room: bool


@jit
def _push(heap: Ints, base: int, size: int, key: int) -> None:
    """Insert a key into the binary heap of `size` keys that begins at index `base` of `heap`."""
    at = size
    while at > 0:
        above = (at - 1) // 2
        if heap[base + above] <= key:
            break
        heap[base + at] = heap[base + above]
        at = above
    heap[base + at] = key


@jit
def _pop(heap: Ints, base: int, size: int) -> int:
    """Remove and return the least key of the binary heap of `size` keys that begins at index `base` of `heap`."""
    least, key = heap[base], heap[base + size - 1]
    last = size - 1
    at = 0
    while 2 * at + 1 < last:
        below = 2 * at + 1
        if below + 1 < last and heap[base + below + 1] < heap[base + below]:
            below += 1
        if heap[base + below] >= key:
            break
        heap[base + at] = heap[base + below]
        at = below
    heap[base + at] = key
    return least


@jit
def _add_key(heap: Ints, state: Ints, worker: int, which: int, key: int) -> None:
    _push(heap, state[worker, HEAP + which], state[worker, SIZE + which], key)
    state[worker, SIZE + which] += 1


@jit
def _take_key(heap: Ints, state: Ints, worker: int, which: int) -> int:
    key = _pop(heap, state[worker, HEAP + which], state[worker, SIZE + which])
    state[worker, SIZE + which] -= 1
    return key


@jit
def _first_key(heap: Ints, state: Ints, worker: int, which: int) -> int:
    return heap[state[worker, HEAP + which]]


@jit
def _arrives_soon(heap: Ints, state: Ints, worker: int, which: int, clock: int, ticks: float) -> bool:
    """Return whether an op that is more urgent than the one at hand becomes ready on a worker in less than `ticks`
    ticks after `clock`.

    The heap number `which` of the worker has the ticks at which such ops become ready: GRADIENT those of I and B,
    ARRIVAL those of F, too.
    """
    return ticks > 0 and state[worker, SIZE + which] > 0 and _first_key(heap, state, worker, which) - clock < ticks


@jit
def _has_room(state: Ints, room: Ints, worker: int, which: int, number: int) -> bool:
    """Return whether a worker has the memory to start an F (`which` is FORWARD), or an I or B (BACKWARD), of slice
    `number`; for an F, also whether its limit on micro-batches in flight allows it."""
    free = state[worker, CAPACITY] - state[worker, USED]
    if which == BACKWARD:
        return room[number, BACKWARD] <= free
    return room[number, NEEDED] <= free and state[worker, SLOTS + number] > 0


@jit
def _take_with_room(heap: Ints, state: Ints, room: Ints, slice_of: Ints, worker: int, which: int, mixed: bool) -> int:
    """Remove from a worker's heap the most urgent F (`which` is FORWARD), or I or B (BACKWARD), for which the worker
    has memory, and return its unit; -1 if there is none.

    The heap must not be empty. If not `mixed`, all units of the heap are of one slice.
    """
    units = slice_of.shape[0]
    if _has_room(state, room, worker, which, slice_of[_first_key(heap, state, worker, which) % units]):
        return _take_key(heap, state, worker, which) % units
    if not mixed:  # all are of one slice
        return -1
    skipped = np.zeros(state[worker, SIZE + which], np.int64)
    count, unit = 0, -1
    while state[worker, SIZE + which] and unit < 0:
        key = _take_key(heap, state, worker, which)
        if _has_room(state, room, worker, which, slice_of[key % units]):
            unit = key % units
        else:
            skipped[count] = key
            count += 1
    for index in range(count):
        _add_key(heap, state, worker, which, skipped[index])
    return unit


@jit
def _pick_op(heap: Ints, state: Ints, room: Ints, slice_of: Ints, duration: Ints, forward_wait: Ints, choices: Choices,
             worker: int, clock: int) -> int:
    """Remove from a worker's heaps the ready op that it should start at tick `clock`, and return its number; -1 if the
    worker should wait.

    The arrays `room` and `forward_wait` are those of `MemoryLimits` and `Dispatch`; `duration` has the ticks of each
    op.
    """
    units, kinds = slice_of.shape[0], choices.kinds
    if state[worker, SIZE + WEIGHT]:
        stuck = False
        if choices.make_room and state[worker, SIZE + FORWARD]:
            taken = state[worker, USED] + room[slice_of[_first_key(heap, state, worker, FORWARD) % units], FORWARD]
            stuck = taken > state[worker, CAPACITY]
        if choices.eager_weights or stuck:
            return _take_key(heap, state, worker, WEIGHT) % units * kinds + WEIGHT
    if state[worker, SIZE + BACKWARD]:
        unit = _take_with_room(heap, state, room, slice_of, worker, BACKWARD, choices.mixed)
        if unit >= 0:
            state[worker, FILLED] = 1
            return unit * kinds + BACKWARD
        if state[worker, SIZE + WEIGHT]:
            return _take_key(heap, state, worker, WEIGHT) % units * kinds + WEIGHT
    if state[worker, SIZE + FORWARD]:
        number = slice_of[_first_key(heap, state, worker, FORWARD) % units]
        if _arrives_soon(heap, state, worker, GRADIENT, clock, forward_wait[state[worker, FILLED], number]):
            return -1
        unit = _take_with_room(heap, state, room, slice_of, worker, FORWARD, choices.mixed)
        if unit >= 0:
            return unit * kinds
    if state[worker, SIZE + WEIGHT]:
        op = _first_key(heap, state, worker, WEIGHT) % units * kinds + WEIGHT
        if not _arrives_soon(heap, state, worker, ARRIVAL, clock, choices.lookahead * duration[op]):
            _take_key(heap, state, worker, WEIGHT)
            return op
    return -1


@jit
def _initial_states(worker: Ints, memory: MemoryLimits, dispatch: Dispatch) -> Ints:
    """Return the state of each worker before its first op, [worker, field]; the fields are the constants from BUSY on.

    The worker's heaps are empty. Each gets space for all units of the worker, ARRIVAL for twice as many.
    """
    state = np.zeros((memory.capacity.shape[0], SLOTS + memory.room.shape[0]), np.int64)
    state[:, CAPACITY] = memory.capacity
    state[:, SLOTS:] = dispatch.slots
    load = np.zeros(memory.capacity.shape[0], np.int64)
    for row in worker:
        load[row] += 1
    begin = 0
    for row in range(load.shape[0]):
        for which in range(HEAPS):
            state[row, HEAP + which] = begin
            begin += load[row] * (2 if which == ARRIVAL else 1)
    return state


@jit
def list_order(ops: "Ops", memory: MemoryLimits, dispatch: Dispatch, first: Ints, order: Ints, done: int) -> int:
    """Simulate a list schedule by the rule `dispatch`, and write its ops, in the order in which they start, to `order`
    from index `done` on.

    Return the index after the last. The schedule begins with the ops `first`, which wait for nothing, and runs all that
    follow from them. This is one long loop on local names, for speed.
    """
    heap, state, room = np.zeros(6 * ops.slice.shape[0], np.int64), _initial_states(ops.worker, memory, dispatch), \
        memory.room
    unit_of, slice_of, worker_of, duration = ops.unit, ops.slice, ops.worker, ops.duration
    position_of, back_of = ops.position, ops.back
    arc_start, arc_op, arc_hop = ops.successors.start, ops.successors.op, ops.successors.hop
    rank, gradient_rank = dispatch.rank, dispatch.gradient_rank
    deepest_first, transfers = dispatch.deepest_first, dispatch.transfers
    count, units, kinds, depth, span = duration.shape[0], slice_of.shape[0], ops.kinds, ops.depth, rank.max() + 1
    forward_wait = dispatch.forward_wait
    waits = forward_wait.max() > 0
    choices = Choices(kinds, ops.mixed, dispatch.lookahead, dispatch.eager_weights, dispatch.make_room)
    awaited = ops.predecessors.start[1:] - ops.predecessors.start[:-1]
    arrived = np.zeros(count, np.int64)
    events, waiting = np.zeros(2 * count, np.int64), 0  # an op is about to be ready, or to end
    touched = np.zeros(state.shape[0], np.int64)
    for op in first:
        _push(events, 0, waiting, READY[op % kinds] * count + op)
        waiting += 1
    while waiting:
        clock = events[0] // (EVENTS * count)
        touched_count, later = 0, (clock + 1) * EVENTS * count
        while waiting and events[0] < later:
            key = _pop(events, 0, waiting)
            waiting -= 1
            op = key % count
            unit = unit_of[op]
            kind, worker, number = op - unit * kinds, worker_of[unit], slice_of[unit]
            if not state[worker, AWAKE]:
                state[worker, AWAKE] = 1
                touched[touched_count] = worker
                touched_count += 1
            if key // count % EVENTS == END:
                state[worker, BUSY] = 0
                if kind != FORWARD:
                    state[worker, USED] += room[number, kind]
                if kind == BACKWARD:
                    state[worker, SLOTS + number] += 1
                continue
            urgency = gradient_rank[unit] * depth + position_of[unit]
            if kind == FORWARD:
                back = back_of[unit]
                urgency = back * span + rank[unit] if deepest_first else rank[unit] * depth + back
            _add_key(heap, state, worker, kind, urgency * units + unit)
            if kind != WEIGHT and state[worker, SIZE + ARRIVAL] and _first_key(heap, state, worker, ARRIVAL) <= clock:
                _take_key(heap, state, worker, ARRIVAL)
            if waits and kind == BACKWARD:
                _take_key(heap, state, worker, GRADIENT)
        for index in range(touched_count):
            worker = touched[index]
            state[worker, AWAKE] = 0
            while not state[worker, BUSY]:
                op = _pick_op(heap, state, room, slice_of, duration, forward_wait, choices, worker, clock)
                if op < 0:
                    break
                order[done] = op
                done += 1
                end = clock + duration[op]
                state[worker, BUSY] = 1
                _push(events, 0, waiting, (end * EVENTS + END) * count + op)
                waiting += 1
                if op % kinds == FORWARD:
                    number = slice_of[unit_of[op]]
                    state[worker, USED] += room[number, FORWARD]
                    state[worker, SLOTS + number] -= 1
                for arc in range(arc_start[op], arc_start[op + 1]):
                    other = arc_op[arc]
                    arrived[other] = max(arrived[other], end + (arc_hop[arc] if transfers else 0))
                    awaited[other] -= 1
                    if awaited[other]:
                        continue
                    when, unit = arrived[other], unit_of[other]
                    kind, target = other - unit * kinds, worker_of[unit]
                    _push(events, 0, waiting, (when * EVENTS + READY[kind]) * count + other)
                    waiting += 1
                    if kind != WEIGHT:
                        _add_key(heap, state, target, ARRIVAL, when)
                    if waits and kind == BACKWARD:
                        _add_key(heap, state, target, GRADIENT, when)
    return done
