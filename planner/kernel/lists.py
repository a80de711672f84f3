"""Make list schedules: a worker that becomes idle takes the most urgent ready op.

Gradients come first (they free memory and others wait for them), then forwards while memory lasts,
then weight gradients. An op is ready when all its predecessors have ended and their tensors have
come.
"""

from typing import NamedTuple

import numpy as np

from .compiling import Ints, jit
from .starts import Ops

# Every worker has five heaps: forwards, gradients and weights that are ready, and the times when
# those that are known to come will be. All lie in one array; a key is a rank with the unit as its
# remainder, and so different for every unit. Arrays are passed one by one: taking one out of a
# named tuple costs as much as a step on a heap.

# --- Heaps of a worker. The first three are also the kinds of op: F; I or B; W --------------------

FORWARD = 0
"""Heap of the F that are ready."""
BACKWARD = 1
"""Heap of the I or B that are ready."""
WEIGHT = 2
"""Heap of the W that are ready."""
ARRIVAL = 3
"""Heap of the ticks at which F, I and B will become ready."""
GRADIENT = 4
"""Heap of the ticks at which I and B will become ready."""
HEAPS = 5
"""Number of heaps of a worker."""

# --- Codes that order simultaneous events of a list schedule --------------------------------------

READY = (0, 1, 3)
"""Codes of the events that an F, I or B, or W becomes ready."""
END = 2
"""Code of the event that an op ends."""
EVENTS = 4
"""Number of codes of events."""

# --- Columns of the state of a worker -------------------------------------------------------------

BUSY = 0
"""Column of a worker's state: 1 while it runs an op."""
AWAKE = 1
"""Column of a worker's state: 1 if something has just happened to it."""
USED = 2
"""Column of a worker's state: the memory that is used."""
CAPACITY = 3
"""Column of a worker's state: its memory."""
FILLED = 4
"""Column of a worker's state: 1 once it has begun an I or B."""
HEAP = 5
"""First of the columns that say where a worker's heaps begin."""
SIZE = HEAP + HEAPS
"""First of the columns with the number of keys in each heap of a worker."""
SLOTS = SIZE + HEAPS
"""First of the columns, by slice, with how many more micro-batches may be in flight."""
NEEDED = 3
"""Column of `MemoryLimits.room`: the memory that must be free when an F starts."""


class MemoryLimits(NamedTuple):
    """Memory of the workers for activations, and what ops take of it."""

    capacity: Ints
    """Memory units that the worker has for activations, [worker]."""
    room: Ints
    """Memory units that a micro-batch's op takes, [slice, kind], or that it needs free.

    F takes them when it starts; I, B and W take them, or free them if negative, when they end.
    Those at [slice, NEEDED] must be free when an F starts
    (`planner.search.list_scheduler.ReservedMemory`).
    """


class Dispatch(NamedTuple):
    """Dispatch rule of a list schedule as numbers.

    `planner.search.list_scheduler.DispatchRule` explains its parameters.
    """

    rank: Ints
    """Urgency of the unit's F, [unit]: lower is more urgent."""
    gradient_rank: Ints
    """Urgency of the unit's I, B and W, [unit]: lower is more urgent."""
    slots: Ints
    """Most micro-batches in flight on the worker at the slice, [worker, slice].

    A micro-batch is in flight from the start of F to the end of I or B.
    """
    lookahead: float
    forward_wait: Ints
    """Ticks that an F may wait for an I or B, [phase, slice].

    The phase is 0 before the worker's first I or B, and 1 after that.
    """
    deepest_first: bool
    eager_weights: bool
    make_room: bool
    transfers: bool
    """True if transfers between workers take time; otherwise tensors arrive at once."""


class Choices(NamedTuple):
    """Part of a dispatch rule by which `_pick_op` chooses a worker's next op."""

    kinds: int
    mixed: bool
    """True if workers hold several slices."""
    lookahead: float
    eager_weights: bool
    make_room: bool


@jit
def _push(heap: Ints, base: int, size: int, key: int) -> None:
    """Insert `key` into a heap: the `size` entries of the array from index `base` on."""
    # The new key rises from the end until the one above it is not larger.
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
    """Remove the least key of a heap, `size` entries from index `base` on; return it."""
    # The last entry takes the place of the first, and sinks until both below it are larger.
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
def _arrives_soon(
    heap: Ints, state: Ints, worker: int, which: int, clock: int, ticks: float
) -> bool:
    """Return whether an op of heap `which` becomes ready within `ticks` of tick `clock`."""
    return (
        ticks > 0
        and state[worker, SIZE + which] > 0
        and _first_key(heap, state, worker, which) - clock < ticks
    )


@jit
def _has_room(state: Ints, room: Ints, worker: int, which: int, number: int) -> bool:
    """Return whether memory and in-flight limits admit an F, I or B of slice `number`."""
    # An F also counts as one more micro-batch in flight, of which a rule may limit the number.
    free = state[worker, CAPACITY] - state[worker, USED]
    if which == BACKWARD:
        return room[number, BACKWARD] <= free
    return room[number, NEEDED] <= free and state[worker, SLOTS + number] > 0


@jit
def _take_with_room(
    heap: Ints, state: Ints, room: Ints, slice_of: Ints, worker: int, which: int, mixed: bool
) -> int:
    """Take the most urgent op with room from a heap; return its unit, or -1."""
    # Usually the most urgent op has room, so it is looked at before the heap is searched.
    units = slice_of.shape[0]
    if _has_room(
        state, room, worker, which, slice_of[_first_key(heap, state, worker, which) % units]
    ):
        return _take_key(heap, state, worker, which) % units
    if not mixed:  # all are of one slice, and so need the same room
        return -1
    # A less urgent op of another slice may need less; those that are passed over go back.
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
def _pick_op(
    heap: Ints,
    state: Ints,
    room: Ints,
    slice_of: Ints,
    duration: Ints,
    forward_wait: Ints,
    choices: Choices,
    worker: int,
    clock: int,
) -> int:
    """Take the op to start at tick `clock` from a worker's heaps; -1 to wait."""
    units, kinds = slice_of.shape[0], choices.kinds
    # A W first if the rule says so, or if the next F would find no memory.
    if state[worker, SIZE + WEIGHT]:
        stuck = False
        if choices.make_room and state[worker, SIZE + FORWARD]:
            taken = (
                state[worker, USED]
                + room[slice_of[_first_key(heap, state, worker, FORWARD) % units], FORWARD]
            )
            stuck = taken > state[worker, CAPACITY]
        if choices.eager_weights or stuck:
            return _take_key(heap, state, worker, WEIGHT) % units * kinds + WEIGHT
    # An I or B frees memory, and others wait for it. If it has no room, a W makes some.
    if state[worker, SIZE + BACKWARD]:
        unit = _take_with_room(heap, state, room, slice_of, worker, BACKWARD, choices.mixed)
        if unit >= 0:
            state[worker, FILLED] = 1
            return unit * kinds + BACKWARD
        if state[worker, SIZE + WEIGHT]:
            return _take_key(heap, state, worker, WEIGHT) % units * kinds + WEIGHT
    # An F, unless a gradient is about to come.
    if state[worker, SIZE + FORWARD]:
        number = slice_of[_first_key(heap, state, worker, FORWARD) % units]
        if _arrives_soon(
            heap, state, worker, GRADIENT, clock, forward_wait[state[worker, FILLED], number]
        ):
            return -1
        unit = _take_with_room(heap, state, room, slice_of, worker, FORWARD, choices.mixed)
        if unit >= 0:
            return unit * kinds
    # A W fills the time that is left.
    if state[worker, SIZE + WEIGHT]:
        op = _first_key(heap, state, worker, WEIGHT) % units * kinds + WEIGHT
        if not _arrives_soon(heap, state, worker, ARRIVAL, clock, choices.lookahead * duration[op]):
            _take_key(heap, state, worker, WEIGHT)
            return op
    return -1


@jit
def _initial_states(worker: Ints, memory: MemoryLimits, dispatch: Dispatch) -> Ints:
    """Return the state of each worker before its first op, [worker, column]."""
    state = np.zeros((memory.capacity.shape[0], SLOTS + memory.room.shape[0]), np.int64)
    state[:, CAPACITY] = memory.capacity
    state[:, SLOTS:] = dispatch.slots
    load = np.zeros(memory.capacity.shape[0], np.int64)
    for row in worker:
        load[row] += 1
    # Each heap gets space for all units of the worker, ARRIVAL for F and I of each.
    begin = 0
    for row in range(load.shape[0]):
        for which in range(HEAPS):
            state[row, HEAP + which] = begin
            begin += load[row] * (2 if which == ARRIVAL else 1)
    return state


@jit
def list_order(
    ops: "Ops", memory: MemoryLimits, dispatch: Dispatch, first: Ints, order: Ints, done: int
) -> int:
    """Simulate a list schedule; write the numbers of its ops to `order`, by start.

    The numbers begin at index `done`; return the index after the last. The schedule has the ops
    `first`, which wait for nothing, and all that become ready after them. Some ops are missing if
    micro-batches wait for each other's memory.
    """
    # Local names: to take an array out of a named tuple costs as much as a step on a heap.
    heap, state, room = (
        np.zeros(6 * ops.slice.shape[0], np.int64),
        _initial_states(ops.worker, memory, dispatch),
        memory.room,
    )
    unit_of, slice_of, worker_of, duration = ops.unit, ops.slice, ops.worker, ops.duration
    position_of, back_of = ops.position, ops.back
    arc_start, arc_op, arc_hop = ops.successors.start, ops.successors.op, ops.successors.hop
    rank, gradient_rank = dispatch.rank, dispatch.gradient_rank
    deepest_first, transfers = dispatch.deepest_first, dispatch.transfers
    count, units, kinds, depth, span = (
        duration.shape[0],
        slice_of.shape[0],
        ops.kinds,
        ops.depth,
        rank.max() + 1,
    )
    forward_wait = dispatch.forward_wait
    waits = forward_wait.max() > 0
    choices = Choices(
        kinds, ops.mixed, dispatch.lookahead, dispatch.eager_weights, dispatch.make_room
    )
    # How many predecessors each op still awaits, and when the last of their tensors comes.
    awaited = ops.predecessors.start[1:] - ops.predecessors.start[:-1]
    arrived = np.zeros(count, np.int64)
    events, waiting = np.zeros(2 * count, np.int64), 0  # an op is about to be ready, or to end
    touched = np.zeros(state.shape[0], np.int64)
    # The heap of events is sorted by tick, then by code, so that ends come before new W.
    for op in first:
        _push(events, 0, waiting, READY[op % kinds] * count + op)
        waiting += 1
    while waiting:
        # All events of this tick: ops that end, and ops that become ready.
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
                # F took its memory when it began; I, B and W change it when they end.
                if kind != FORWARD:
                    state[worker, USED] += room[number, kind]
                if kind == BACKWARD:
                    state[worker, SLOTS + number] += 1
                continue
            # A key of the heap: how urgent the unit is, with its number as the remainder.
            urgency = gradient_rank[unit] * depth + position_of[unit]
            if kind == FORWARD:
                back = back_of[unit]
                urgency = back * span + rank[unit] if deepest_first else rank[unit] * depth + back
            _add_key(heap, state, worker, kind, urgency * units + unit)
            # It has come, and is expected no longer.
            if (
                kind != WEIGHT
                and state[worker, SIZE + ARRIVAL]
                and _first_key(heap, state, worker, ARRIVAL) <= clock
            ):
                _take_key(heap, state, worker, ARRIVAL)
            if waits and kind == BACKWARD:
                _take_key(heap, state, worker, GRADIENT)
        # Workers to which something has happened start ops; several if these take no time.
        for index in range(touched_count):
            worker = touched[index]
            state[worker, AWAKE] = 0
            while not state[worker, BUSY]:
                op = _pick_op(
                    heap, state, room, slice_of, duration, forward_wait, choices, worker, clock
                )
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
                # Its successors become ready when the last of their inputs has come.
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
