"""List scheduling, compiled: simulate all workers through time; whoever falls idle takes the most urgent ready op.

Gradients first (they free memory and others wait for them), then forwards while memory lasts, then weight gradients.
An op is ready when all its predecessors have ended and their tensors have come. Tests also run this module
interpreted, as plain Python.

Every worker has five heaps: forwards, gradients and weights that are ready, and the times when those that are known to
come will be. All lie in one array; a key is a rank that is different for every unit, with the unit as its remainder.
Arrays are passed one by one: taking one out of a named tuple costs as much as a step on a heap.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.planner.search.kernel.jit import jit

if TYPE_CHECKING:
    from slipstream.planner.model.arrays import Ops

Ints = NDArray[np.int64]

FORWARD, BACKWARD, WEIGHT, ARRIVAL, GRADIENT, HEAPS = 0, 1, 2, 3, 4, 5
"""The heaps of a worker; the first three are also the kinds of op: F, I or B, W."""
READY, END, EVENTS = (0, 1, 3), 2, 4
"""What happens at a time, in this order: an F is ready, an I or B, some op ends, a W is ready."""
BUSY, TOUCHED, USED, CAPACITY, FILLED, BASE, SIZE, SLOTS = 0, 1, 2, 3, 4, 5, 5 + HEAPS, 5 + 2 * HEAPS
"""Columns of the state of a worker: whether it runs an op, whether something happened to it just now, its memory,
whether it has begun a gradient, where its heaps begin and how many keys they hold, and how many more micro-batches it
may have in flight at each slice."""
AT_START, STASH, NEEDED = 0, 1, 2


class MemoryLimits(NamedTuple):
    """Room on the workers, and what ops take of it."""

    capacity: Ints
    """[worker]"""
    room: Ints
    """[slice, AT_START] taken when an F starts, [slice, STASH] held instead from the end of its I to that of its W,
    [slice, NEEDED] that must be free when an F starts (`planner.search.set_aside`)"""


class Dispatch(NamedTuple):
    """A dispatch rule as numbers; the meanings are those of `planner.search.list_scheduler.DispatchRule`."""

    rank: Ints
    """[unit] the lower the more urgent its F; all different among the units of a slice"""
    gradient_rank: Ints
    """[unit] the same of its I, B and W"""
    slots: Ints
    """[worker, slice] most micro-batches between F and the end of I"""
    lookahead: float
    forward_wait: Ints
    """[before or after its worker's first gradient, slice] ticks within which a gradient is waited for rather than an F
    started"""
    deepest_first: bool
    eager_weights: bool
    make_room: bool
    transfers: bool
    """Whether tensors between two workers take time."""


class Choices(NamedTuple):
    """What `_pick` needs to know of the problem and the rule beside arrays."""

    kinds: int
    mixed: bool
    """Whether workers hold several slices, so that a less urgent op may have room where the first has none."""
    lookahead: float
    eager_weights: bool
    make_room: bool


@jit
def _push(heap: Ints, base: int, size: int, key: int) -> None:
    """Put a key on the heap that begins at `base`."""
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
    """Take the least key from the heap that begins at `base`."""
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
def _add(heap: Ints, state: Ints, worker: int, which: int, key: int) -> None:
    _push(heap, state[worker, BASE + which], state[worker, SIZE + which], key)
    state[worker, SIZE + which] += 1


@jit
def _take(heap: Ints, state: Ints, worker: int, which: int) -> int:
    key = _pop(heap, state[worker, BASE + which], state[worker, SIZE + which])
    state[worker, SIZE + which] -= 1
    return key


@jit
def _first(heap: Ints, state: Ints, worker: int, which: int) -> int:
    return heap[state[worker, BASE + which]]


@jit
def _soon(heap: Ints, state: Ints, worker: int, which: int, clock: int, ticks: float) -> bool:
    """Whether something more urgent arrives within so many ticks."""
    return ticks > 0 and state[worker, SIZE + which] > 0 and _first(heap, state, worker, which) - clock < ticks


@jit
def _has_room(state: Ints, room: Ints, worker: int, which: int, number: int) -> bool:
    """Whether an F, an I or a B of a slice may start."""
    free = state[worker, CAPACITY] - state[worker, USED]
    if which == BACKWARD:
        return room[number, STASH] - room[number, AT_START] <= free
    return room[number, NEEDED] <= free and state[worker, SLOTS + number] > 0


@jit
def _take_with_room(heap: Ints, state: Ints, room: Ints, slice_of: Ints, worker: int, which: int, mixed: bool) -> int:
    """The unit of the most urgent F, or I or B, that has room, taken from its heap; -1 for none."""
    units = slice_of.shape[0]
    if _has_room(state, room, worker, which, slice_of[_first(heap, state, worker, which) % units]):
        return _take(heap, state, worker, which) % units
    if not mixed:  # all are of one slice
        return -1
    skipped = np.zeros(state[worker, SIZE + which], np.int64)
    count, found = 0, -1
    while state[worker, SIZE + which] and found < 0:
        key = _take(heap, state, worker, which)
        if _has_room(state, room, worker, which, slice_of[key % units]):
            found = key % units
        else:
            skipped[count] = key
            count += 1
    for index in range(count):
        _add(heap, state, worker, which, skipped[index])
    return found


@jit
def _pick(heap: Ints, state: Ints, room: Ints, slice_of: Ints, duration: Ints, forward_wait: Ints, choices: Choices,
          worker: int, clock: int) -> int:
    """The most urgent op that may run, taken from its heap; -1 for none."""
    units, kinds = slice_of.shape[0], choices.kinds
    if state[worker, SIZE + WEIGHT]:
        stuck = False
        if choices.make_room and state[worker, SIZE + FORWARD]:
            taken = state[worker, USED] + room[slice_of[_first(heap, state, worker, FORWARD) % units], AT_START]
            stuck = taken > state[worker, CAPACITY]
        if choices.eager_weights or stuck:
            return _take(heap, state, worker, WEIGHT) % units * kinds + WEIGHT
    if state[worker, SIZE + BACKWARD]:
        unit = _take_with_room(heap, state, room, slice_of, worker, BACKWARD, choices.mixed)
        if unit >= 0:
            state[worker, FILLED] = 1
            return unit * kinds + BACKWARD
        if state[worker, SIZE + WEIGHT]:
            return _take(heap, state, worker, WEIGHT) % units * kinds + WEIGHT
    if state[worker, SIZE + FORWARD]:
        number = slice_of[_first(heap, state, worker, FORWARD) % units]
        if _soon(heap, state, worker, GRADIENT, clock, forward_wait[state[worker, FILLED], number]):
            return -1
        unit = _take_with_room(heap, state, room, slice_of, worker, FORWARD, choices.mixed)
        if unit >= 0:
            return unit * kinds
    if state[worker, SIZE + WEIGHT]:
        op = _first(heap, state, worker, WEIGHT) % units * kinds + WEIGHT
        if not _soon(heap, state, worker, ARRIVAL, clock, choices.lookahead * duration[op]):
            _take(heap, state, worker, WEIGHT)
            return op
    return -1


@jit
def _idle_workers(worker: Ints, memory: MemoryLimits, dispatch: Dispatch) -> Ints:
    """The state of all workers before the first op: empty heaps with room for all of their units, arrivals twice."""
    state = np.zeros((memory.capacity.shape[0], SLOTS + memory.room.shape[0]), np.int64)
    state[:, CAPACITY] = memory.capacity
    state[:, SLOTS:] = dispatch.slots
    load = np.zeros(memory.capacity.shape[0], np.int64)
    for row in worker:
        load[row] += 1
    begin = 0
    for row in range(load.shape[0]):
        for which in range(HEAPS):
            state[row, BASE + which] = begin
            begin += load[row] * (2 if which == ARRIVAL else 1)
    return state


@jit
def list_order(ops: "Ops", memory: MemoryLimits, dispatch: Dispatch, first: Ints, order: Ints, done: int) -> int:
    """Fill `order` from place `done` on with the ops in the order in which they start; the place behind the last.

    `first` are the ops to begin with, which wait for nothing; what follows from them is run. One long loop on local
    names, for speed.
    """
    heap, state, room = np.zeros(6 * ops.slice.shape[0], np.int64), _idle_workers(ops.worker, memory, dispatch), \
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
        some, later = 0, (clock + 1) * EVENTS * count
        while waiting and events[0] < later:
            key = _pop(events, 0, waiting)
            waiting -= 1
            op = key % count
            unit = unit_of[op]
            kind, worker, number = op - unit * kinds, worker_of[unit], slice_of[unit]
            if not state[worker, TOUCHED]:
                state[worker, TOUCHED] = 1
                touched[some] = worker
                some += 1
            if key // count % EVENTS == END:
                state[worker, BUSY] = 0
                if kind == WEIGHT:
                    state[worker, USED] -= room[number, STASH]
                elif kind == BACKWARD:
                    state[worker, USED] += room[number, STASH] - room[number, AT_START]
                    state[worker, SLOTS + number] += 1
                continue
            urgency = gradient_rank[unit] * depth + position_of[unit]
            if kind == FORWARD:
                back = back_of[unit]
                urgency = back * span + rank[unit] if deepest_first else rank[unit] * depth + back
            _add(heap, state, worker, kind, urgency * units + unit)
            if kind != WEIGHT and state[worker, SIZE + ARRIVAL] and _first(heap, state, worker, ARRIVAL) <= clock:
                _take(heap, state, worker, ARRIVAL)
            if waits and kind == BACKWARD:
                _take(heap, state, worker, GRADIENT)
        for index in range(some):
            worker = touched[index]
            state[worker, TOUCHED] = 0
            while not state[worker, BUSY]:
                op = _pick(heap, state, room, slice_of, duration, forward_wait, choices, worker, clock)
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
                    state[worker, USED] += room[number, AT_START]
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
                        _add(heap, state, target, ARRIVAL, when)
                    if waits and kind == BACKWARD:
                        _add(heap, state, target, GRADIENT, when)
    return done
