"""The planner's inner loops, which numba compiles to machine code: start times, list schedules, annealing.

They are one module because numba stores machine code by source file, and does not notice a change in another file. For
the same reason the types of their arguments are here. `planner.loops` decides when they are compiled. Imported under
any other name, this module is plain Python: the same plans, a hundred times slower.

The indices of an array stand in brackets: [op] means one value for each op.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., object])


def jit(function: Function) -> Function:
    """Compile a function at its first call, for the types of its arguments."""
    return _compile_with(function, {})


def jit_borrowing(function: Function) -> Function:
    """Compile a function that allocates no arrays, assigns to no slices of arrays, and is called by compiled functions
    only.

    It uses its caller's arrays without counting references. Otherwise numba would count references to every array of a
    tuple at every call, which is a third to a half of the time of annealing.
    """
    return _compile_with(function, BORROWED)


def jit_inlined(function: Function) -> Function:
    """Compile a small function that is inlined into its callers: passing its arguments would take longer than what it
    does."""
    return _compile_with(function, {"forceinline": True, **BORROWED})


BORROWED: Mapping[str, Any] = {"_nrt": False}
"""Option that compiles without numba's runtime, which counts references. It has no public name."""


def _compile_with(function: Function, options: Mapping[str, Any]) -> Function:
    """Compile a function with these options of numba, or return it as it is if this module was imported as plain
    Python."""
    if __name__ != "slipstream.planner.kernel":
        return function
    try:
        compiled = njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # neither the installation nor the user has a folder that can be written
        compiled = njit(nogil=True, **options)(function)
    return cast(Function, compiled)


# --- The arrays of a problem ------------------------------------------------------------------------------------------


class Arcs(NamedTuple):
    """Precedences between ops in compressed form: the arcs of op i have the numbers start[i] to below start[i + 1]."""

    start: Ints
    """Number of the first arc of each op, [ops + 1]."""
    op: Ints
    """Op at the other end of the arc, [arc]."""
    transfer: Ints
    """Ticks that the arc adds between the two ops if different workers run them, [arc]; 0 if no tensor passes."""
    hop: Ints
    """Ticks that the arc adds between the two ops under the problem's first assignment, [arc]; 0 within a worker."""


class Ops(NamedTuple):
    """Arrays of the compute ops of a problem in which a worker is chosen for each unit. Workers are given by row, their
    number among the live workers."""

    kinds: int
    """Number of ops of a unit, 2 or 3: op = unit * kinds + kind, where kind is 0 for F, 1 for I or B, and 2 for W."""
    depth: int
    """Number that is larger than every value of `position` and `back`."""
    mixed: bool
    """True if workers run several slices."""
    unit: Ints
    """Number of the unit to which the op belongs, [op]."""
    slice: Ints
    """Number of the unit's slice, [unit]."""
    position: Ints
    """First layer of the unit's slice, [unit]; it says how far along its route the slice is."""
    back: Ints
    """Number of the model's layers that follow those of the unit's slice, [unit]."""
    worker: Ints
    """Row (number among the live workers) of the worker that runs the unit, [unit]."""
    duration: Ints
    """Ticks of the op on the worker that runs it, [op]."""
    predecessors: Arcs
    """Arcs from each op to the ops for which it waits, except for the op before it on its worker."""
    successors: Arcs
    """Arcs from each op to the ops that wait for it, except for the op after it on its worker."""


class Reductions(NamedTuple):
    """Gradient reductions, one for each range of layers that the same groups hold; a group is all workers whose held
    layers are equal.

    Empty if no reduction is shared by two groups. Lists of unequal length are padded with -1.
    """

    sharers: Ints
    """Groups that take part in the reduction, [reduction, number]; see `Reductions` for groups."""
    ticks: Ints
    """Duration of the reduction, [reduction]."""
    awaiting: Ints
    """Reductions of the slice's layers, which wait for its W, [slice, number]."""
    between: Ints
    """Reductions in which the workers of a group take part, [group, number]; no such worker computes during one of
    them."""


# --- Start times of an order, and of the reductions that follow -------------------------------------------------------


@jit
def set_earliest_starts(ops: "Ops", order: Ints, start: Ints, free: Ints) -> None:
    """Fill `start` [op] with the earliest tick of each op if workers run the ops in the sequence `order`.

    Fill `free` [worker] with the tick at which each worker has run its last op.
    """
    worker, unit, duration = ops.worker, ops.unit, ops.duration
    arc_start, arc_op, arc_hop = ops.predecessors.start, ops.predecessors.op, ops.predecessors.hop
    free[:] = 0
    for op in order:
        row = worker[unit[op]]
        begin = free[row]
        for arc in range(arc_start[op], arc_start[op + 1]):
            before = arc_op[arc]
            begin = max(begin, start[before] + duration[before] + arc_hop[arc])
        start[op] = begin
        free[row] = begin + duration[op]


@jit_inlined
def first_awaiting_reduction(awaiting: Ints, begin: Ints, number: int) -> int:
    """Return the first tick at which a gradient reduction begins that waits for the W of slice `number`.

    The argument `awaiting` is as in `Reductions`; `begin` [reduction] has the ticks at which reductions begin.
    """
    first = begin[awaiting[number, 0]]
    for index in range(1, awaiting.shape[1]):
        if awaiting[number, index] >= 0:
            first = min(first, begin[awaiting[number, index]])
    return first


@jit_inlined
def latest_clear_start(between: Ints, ticks: Ints, begin: Ints, group: int, start: int, duration: int) -> int:
    """Return the latest tick, `start` or before, at which an op of `duration` ticks on a worker of the group (workers
    that hold the same layers) overlaps no gradient reduction of the group.

    The arguments `between` and `ticks` are as in `Reductions`; `begin` [reduction] has the ticks at which reductions
    begin.
    """
    number = 0
    while number < between.shape[1] and between[group, number] >= 0:
        tick = begin[between[group, number]]
        if start < tick + ticks[between[group, number]] and tick < start + duration:
            start = tick - duration
            number = 0
        else:
            number += 1
    return start


@jit
def set_latest_starts(ops: "Ops", order: Ints, start: Ints, free: Ints, group: Ints, reductions: "Reductions",
                      begin: Ints) -> None:
    """Fill `start` [op] with the latest tick of each op such that workers run the ops in the sequence `order` and end
    in time.

    On entry `free` [worker] has the ticks by which workers must have run their ops; on return, the starts of their
    first ops. `group` has the number of each worker's group (workers that hold the same layers). `begin` has the ticks
    at which reductions begin, if they may lie between compute ops; else it is empty.
    """
    interleaved = begin.shape[0] > 0
    worker, unit, duration = ops.worker, ops.unit, ops.duration
    arc_start, arc_op, arc_hop = ops.successors.start, ops.successors.op, ops.successors.hop
    for op in order[::-1]:
        row = worker[unit[op]]
        end = free[row]
        for arc in range(arc_start[op], arc_start[op + 1]):
            end = min(end, start[arc_op[arc]] - arc_hop[arc])
        if interleaved and (op + 1) % ops.kinds == 0:
            end = min(end, first_awaiting_reduction(reductions.awaiting, begin, ops.slice[unit[op]]))
        start[op] = end - duration[op]
        if interleaved:
            start[op] = latest_clear_start(reductions.between, reductions.ticks, begin, group[row], start[op],
                                           duration[op])
        free[row] = start[op]


@jit
def run_reductions(sharers: Ints, ticks: Ints, end: Ints, begin: Ints, turn: Ints) -> None:
    """Schedule all gradient reductions: each on all groups that share it at once, and one at a time on each group.

    A group is the workers that hold the same layers; `sharers` and `ticks` are as in `Reductions`. The next reduction
    is the one that can begin first; of equals, that of the later layers. On entry `end` [group] holds the end of each
    group's compute ops; on return, that of its reductions. Fill `begin` [reduction], and `turn` with the reductions in
    their order.
    """
    for number in range(turn.shape[0]):
        turn[number] = number
    for number in range(turn.shape[0]):
        first = number
        for place in range(number, turn.shape[0]):
            reduction, other = turn[place], turn[first]
            begin[reduction] = _last_end(sharers, end, reduction)
            if begin[reduction] < begin[other] or (begin[reduction] == begin[other] and reduction > other):
                first = place
        reduction = turn[first]
        turn[first], turn[number] = turn[number], reduction
        _set_ends(sharers, end, reduction, begin[reduction] + ticks[reduction])


@jit_inlined
def _last_end(sharers: Ints, end: Ints, reduction: int) -> int:
    """Return the largest tick in `end` [group] among the groups (workers that hold the same layers) that share a
    reduction: the earliest tick at which it can start."""
    last = end[sharers[reduction, 0]]
    for index in range(1, sharers.shape[1]):
        if sharers[reduction, index] >= 0:
            last = max(last, end[sharers[reduction, index]])
    return last


@jit_inlined
def _set_ends(sharers: Ints, end: Ints, reduction: int, tick: int) -> None:
    for index in range(sharers.shape[1]):
        if sharers[reduction, index] >= 0:
            end[sharers[reduction, index]] = tick


@jit
def set_latest_compute_ends(sharers: Ints, ticks: Ints, turn: Ints, end: Ints) -> None:
    """Replace the tick in `end` [group] at which a group's reductions end by the latest one at which its compute ops
    may end. A group is the workers that hold the same layers.

    Reductions keep the order `turn`; the arguments `sharers` and `ticks` are as in `Reductions`.
    """
    for number in range(turn.shape[0] - 1, -1, -1):
        reduction = turn[number]
        last = end[sharers[reduction, 0]]
        for index in range(1, sharers.shape[1]):
            if sharers[reduction, index] >= 0:
                last = min(last, end[sharers[reduction, index]])
        _set_ends(sharers, end, reduction, last - ticks[reduction])


@jit
def delay_deadlines(sharers: Ints, ticks: Ints, deadline: Ints, end: Ints, begin: Ints, turn: Ints) -> None:
    """Delay the tick by which each group (workers that hold the same layers) must end its compute ops, `deadline`
    [group], as far as no reduction ends later than before.

    The arrays `end`, `begin` and `turn` are filled as by `run_reductions`. If reductions would come in another order
    and some would end later, the deadlines stay as they are.
    """
    end[:] = deadline
    run_reductions(sharers, ticks, end, begin, turn)
    late = end.copy()
    set_latest_compute_ends(sharers, ticks, turn, late)
    after = late.copy()
    run_reductions(sharers, ticks, after, begin, turn)
    for group in range(end.shape[0]):
        if after[group] > end[group]:
            end[:] = deadline
            run_reductions(sharers, ticks, end, begin, turn)
            return
    deadline[:] = late
    end[:] = after


# --- List schedules ---------------------------------------------------------------------------------------------------
# Simulate all workers through time; a worker that becomes idle takes the most urgent ready op.
#
# Gradients first (they free memory and others wait for them), then forwards while memory lasts, then weight gradients.
# An op is ready when all its predecessors have ended and their tensors have come. Tests also run this module
# as plain Python.
#
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


# --- Orders in rounds -------------------------------------------------------------------------------------------------
# In each round every worker runs one I (or B) and one F, so that as many micro-batches are in flight as before it; W
# fill the gaps. Such are the schedules of zero bubble (Qi et al. 2024, arXiv 2401.10241, and its V, 2405.15362).


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
    """State of an order in rounds that is being made."""

    order: Ints
    end: Ints
    """Tick at which the op ends, [op]; -1 before it is placed."""
    next: Ints
    """Index in `Lanes.op` of the lane's next op, [lane]."""
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
def order_in_rounds(ops: "Ops", lanes: Lanes, memory: MemoryLimits, rule: RoundRule, idle: Ints, order: Ints) -> int:
    """Write the ops to `order` as the rounds of a rule place them, and return their number: fewer than all if no worker
    can go on for lack of memory.

    On entry `idle` [worker] has the work that the busiest worker has more, as a negative number; on return, the idle
    ticks of the workers in addition.
    """
    workers, count = memory.capacity.shape[0], lanes.worker.shape[0]
    load = np.zeros(workers, np.int64)
    for worker in ops.worker:
        load[worker] += 1
    state = Progress(order, np.full(order.shape[0], -1, np.int64), lanes.start[:-1].copy(),
                     np.zeros(workers, np.int64), np.zeros(workers, np.int64), idle,
                     np.zeros((workers, load.max()), np.int64), np.zeros((workers, 2), np.int64),
                     np.zeros(workers, np.int64), np.zeros(count, np.int64), np.zeros(2, np.int64))
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
    for worker in range(workers):
        while _waiting_weight(state, worker) >= 0:
            _place_weight(ops, memory, state, worker)
    return state.counters[PLACED]


# --- Annealing: its arrays --------------------------------------------------------------------------------------------
# Indices: op (unit * kinds + kind, as in `planner.model.arrays`), unit (a micro-batch at a stage), worker (the row of a
# live worker), place (in a worker's order), group (a reduce group), slice, pipeline. Times are in ticks.

BUCKETS = 1024
"""Number of buckets of the queue of ops whose times annealing recomputes; together they span the ticks of the first
plan."""
FOREVER = 2**61
"""Tick that is later than those of any plan."""
TIMED = 2
"""Value of `Instance.interleaved` if reductions that take time may lie between compute ops; groups share none then."""


class Instance(NamedTuple):
    """Arrays of a problem that annealing never changes. A group is the workers that hold the same layers."""

    kinds: int
    """Number of ops of a unit."""
    unit: Ints
    """Unit of the op, [op]."""
    slice: Ints
    """Slice of the unit, [unit]."""
    predecessors: Arcs
    """Arcs to the ops for which each op waits, except for the op before it on its worker."""
    successors: Arcs
    """Arcs to the ops that wait for each op, except for the op after it on its worker."""
    group: Ints
    """Reduce group of the worker (those that hold the same layers), [worker]."""
    linked: Ints
    """Groups with which this group shares gradient reductions, itself included, [group, number]; padded with -1."""
    interleaved: int
    """1 if reductions may lie between compute ops, since they take no time, and 2 (TIMED) although they take time; 0 if
    they follow all of these."""
    sharers: Ints
    """Groups that take part in the reduction, [reduction, number]; for this and the next three fields see
    `Reductions`."""
    ticks: Ints
    """Duration of the reduction, [reduction]."""
    awaiting: Ints
    """Reductions that wait for W of the slice, [slice, number]."""
    between: Ints
    """Reductions in which the group takes part, [group, number]."""
    tail: Ints
    """Ticks from the tick `State.end` of the worker's group to the end of the worker's busy window, [worker]."""
    pipeline: Ints
    """Pipeline of the worker, [worker]."""
    members: Ints
    """Workers of the pipeline, [pipeline, number]; padded with -1."""
    capacity: Ints
    """Memory of the worker for activations, [worker]; -1 if it is unlimited."""
    holds: Ints
    """Memory by which the op raises or lowers what its worker holds, [op]: at its start for F, at its end for I and
    W."""
    movable: Ints
    """Units that more than one worker may run, as an array of unit numbers."""
    hosts: Ints
    """Workers that may run the slice, [slice, number]; padded with -1."""
    cost: Ints
    """Ticks of an op by its kind and slice on each worker, [kind, slice, worker]."""


class State(NamedTuple):
    """Solution that annealing changes: the worker of each unit, the order of the ops, and the ticks at which groups
    (workers that hold the same layers) have ended compute and reductions."""

    worker: Ints
    """Worker that runs the unit, [unit]."""
    duration: Ints
    """Ticks of the op on its worker, [op]."""
    sequence: Ints
    """Ops of the worker in the order in which it runs them, [worker, place]."""
    size: Ints
    """Number of ops of the worker, [worker]."""
    place: Ints
    """Index of the op in its worker's order, [op]."""
    end: Ints
    """Tick at which the group's compute ops and the reductions that it shares with other groups have ended, [group]."""
    deadline: Ints
    """Tick by which the group's workers must have done their compute ops, [group]: as late as the ends of all groups
    allow."""
    begin: Ints
    """Beginning of the reduction, [reduction]; if interleaved, the first end of the groups that share it. If TIMED, it
    is chosen freely, and the end of a group follows from it."""
    turn: Ints
    """Reductions in the order in which they run; if TIMED, marks of reductions that are still to be placed."""


class Timing(NamedTuple):
    """Times of all ops and lengths of the busy windows in a state of annealing, in ticks."""

    late: Ints
    """Latest tick at which the op may start so that all compute ops meet their group's deadline, [op]."""
    longest: Ints
    """Length of the longest busy window among the pipeline's workers, [pipeline]."""
    excess: Ints
    """Sum of the ticks by which busy windows of the pipeline's workers exceed the goal, [pipeline]."""


class Sorting(NamedTuple):
    """Working arrays and results of sorting all ops so that each comes after those for which it waits."""

    waiting: Ints
    """Number of predecessors that are not sorted yet, [op]."""
    stack: Ints
    """Stack of ops that wait for no unsorted op."""
    order: Ints
    """All ops, each after those for which it waits."""
    early: Ints
    """Earliest tick at which the op can start if no worker begins before its `release`, [op]."""
    release: Ints
    """Tick before which the worker starts no op, [worker]."""


class Queue(NamedTuple):
    """Queue of ops whose latest start must be recomputed, in buckets by that time; the latest come first.

    An op is thus recomputed before the ops for which it waits, which start earlier, so that few are recomputed twice.
    """

    bucket: Ints
    """First op of each bucket; -1 if it is empty."""
    next: Ints
    """Queued op that follows this one in its bucket, [op]; -1 at the end."""
    queued: Ints
    """1 while the op is in the queue, [op]."""
    counters: Ints
    """Counters [WAITING, TOP, BASE, SPAN] of the queue. They are: the number of queued ops, the highest bucket that may
    hold some, the first tick of the buckets, and the number of ticks that they divide."""


WAITING, TOP, BASE, SPAN = range(4)


class Log(NamedTuple):
    """Values of `Timing` that the present step of annealing has overwritten, so that it can be undone."""

    op: Ints
    """Ops whose latest start the step changed, in the order of the changes."""
    late: Ints
    """Latest starts, before the step, of the ops in `op`."""
    pipeline: Ints
    """Pipelines with a busy window that the step may have changed."""
    longest: Ints
    """Longest busy windows, before the step, of the pipelines in `pipeline`."""
    excess: Ints
    """Values of `Timing.excess`, before the step, of the pipelines in `pipeline`."""
    marked: Ints
    """1 if the pipeline is in `Log.pipeline`, [pipeline]."""
    counters: Ints
    """Lengths of the log by the index CHANGED or TOUCHED: entries in use of `op` and `late`, and of the other three
    arrays."""


CHANGED, TOUCHED = range(2)


class Path(NamedTuple):
    """Ops of a critical path at which exchanging neighbouring ops of a worker may shorten the path. After a change is
    accepted, the path is traced anew."""

    op: Ints
    """Ops of the critical path that only the next op of their worker keeps from starting later."""
    size: Ints
    """Number of ops in `op`, [1]; -1 if the path must be followed again."""


class Chain(NamedTuple):
    """Run of annealing with its own random numbers: its present and best states and its working arrays."""

    instance: Instance
    state: State
    best: State
    """Best state so far."""
    record: Ints
    """Period and cost of the best state, by the index PERIOD (in ticks) or COST (in thousandths of a tick)."""
    timing: Timing
    """Times of the ops of `state`."""
    trial: Timing
    """Times of the ops of another state, such as `best` while it is measured."""
    sorting: Sorting
    heads: Ints
    """Earliest tick at which the op can start if no busy window exceeds the longest of its pipeline, [op]."""
    queue: Queue
    log: Log
    path: Path
    run: Ints
    """Working array for the ops of a worker that an exchange puts in other places."""
    places: Ints
    """Indices in a worker's order to which the ops of a unit move, or from which they moved, [kind]."""
    statistics: Ints
    """Numbers of steps that were tried, accepted, or gave a better best state, [operator, TRIED | ACCEPTED |
    BETTER]."""
    random: NDArray[np.uint64]
    """State of the random numbers, [1]."""


PERIOD, COST = range(2)
TRIED, ACCEPTED, BETTER = range(3)


class Cycle(NamedTuple):
    """Parameters of one cooling cycle of annealing: its temperatures, the period at which it aims, and how it chooses
    its steps."""

    steps: int
    hot: float
    """Temperature at the first step, in ticks."""
    cold: float
    """Temperature at the last step, in ticks."""
    pull: float
    """Weight, in the cost, of the mean excess of a pipeline's busy windows over the goal; its longest window's has
    weight 1."""
    goal: int
    """Period in ticks at which the cycle ends; only busy windows longer than that cost anything."""
    scale: float
    """Mean ticks of an op."""
    trade: float
    """Share of the steps that trade units, if units may change workers."""
    move: float
    """Share of the steps in which a unit moves to another worker; in all others, ops of a worker change places."""
    shifts: int
    """Number n such that one of n steps shifts a group's deadline; 0: no step does."""
    low: int
    """Tick before which no op may start that a step puts in another place."""
    high: int
    """Tick from which on no op may start that a step puts in another place."""
    largest_run: int
    longest_jump: int
    margin: float
    steps_per_path: int
    ops_per_step: int
    """Value of `AnnealingParams.ops_per_step`; `AnnealingParams` also explains the four fields above."""


class Move(NamedTuple):
    """Step that changes an annealing state: an exchange of ops of a worker, a trade of two units, or the move of a
    unit."""

    kind: int
    unit: int
    """Unit that changes its worker, in a trade or a move."""
    other: int
    """In a trade, the unit with which `unit` trades; in a move, the worker that `unit` leaves."""
    worker: int
    """In an exchange, the worker whose ops at places [begin, middle) and [middle, end) change places."""
    begin: int
    middle: int
    end: int


NONE, EXCHANGE, TRADE, MOVE, SHIFT = range(5)


# --- Annealing: random numbers, by xorshift64 (Marsaglia 2003) --------------------------------------------------------


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


# --- Annealing: windows and costs -------------------------------------------------------------------------------------
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


# --- Annealing: critical workers and paths ----------------------------------------------------------------------------


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


# --- Annealing: a state timed from scratch ----------------------------------------------------------------------------


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


# --- Annealing: a state timed where it changed ------------------------------------------------------------------------
# Ops whose latest start may have changed wait in a queue by time, late ones first. Each that did change calls those
# that it follows: its predecessors and the op before it on its worker. So a step costs what it moves, not what the job
# holds. A log keeps what was before, for `revert_timing`.


@jit_inlined
def _bucket_of(ticks, span):
    """Return the number of the queue's bucket for a time, `ticks` after the first tick; the buckets divide `span`
    ticks."""
    return min(max(ticks * BUCKETS // span, 0), BUCKETS - 1)


@jit_inlined
def queue_op(queue, late, op):
    """Put an op into the queue of those whose latest start must be recomputed, unless it is there already or -1. The
    argument `late` [op] has the latest starts so far."""
    if op < 0 or queue.queued[op]:
        return
    counters = queue.counters
    index = _bucket_of(late[op] - counters[BASE], counters[SPAN])
    queue.queued[op] = 1
    queue.next[op] = queue.bucket[index]
    queue.bucket[index] = op
    counters[WAITING] += 1
    counters[TOP] = max(counters[TOP], index)


@jit_inlined
def touch_pipeline(timing, log, pipeline):
    """Add a pipeline, with its longest window and its excess from `timing`, to the log of those whose busy windows a
    step may change, unless it is there already."""
    if not log.marked[pipeline]:
        log.marked[pipeline] = 1
        number = log.counters[TOUCHED]
        log.pipeline[number] = pipeline
        log.longest[number], log.excess[number] = timing.longest[pipeline], timing.excess[pipeline]
        log.counters[TOUCHED] += 1


def _make_retime(interleaved):
    """Return one of two versions of the function `retime`: with `interleaved`, reductions may lie between compute ops.

    A single version with a test in its loop would be a quarter slower. The rule for starts is that of `_latest_start`.
    The function is one long loop on local names, since a call with all these arrays would take longer than its work.
    """

    @jit_borrowing
    def retime_ops(instance, state, timing, queue, log, limits, run):
        unit, group, owner = instance.unit, instance.group, instance.pipeline
        first_successor, successor, transfer = instance.successors.start, instance.successors.op, \
            instance.successors.transfer
        first_predecessor, predecessor = instance.predecessors.start, instance.predecessors.op
        worker_of, duration, sequence, size, place = state.worker, state.duration, state.sequence, state.size, \
            state.place
        deadline, late = state.deadline, timing.late
        longest, excess = timing.longest, timing.excess
        kinds, slice_of, awaiting, between, ticks, reduction = instance.kinds, instance.slice, instance.awaiting, \
            instance.between, instance.ticks, state.begin
        bucket, link, queued = queue.bucket, queue.next, queue.queued
        counters, changed, before, marked = queue.counters, log.op, log.late, log.marked
        waiting, top, base, span = counters[WAITING], counters[TOP], counters[BASE], counters[SPAN]
        done, touched = log.counters[CHANGED], log.counters[TOUCHED]
        touched_pipeline, longest_before, excess_before = log.pipeline, log.longest, log.excess
        heads, allowed = limits
        row, begin, end = run
        good = True
        while good:
            if end > begin:
                end -= 1
                op = sequence[row, end]
            elif waiting:
                while bucket[top] < 0:
                    top -= 1
                op = bucket[top]
                bucket[top] = link[op]
                queued[op] = 0
                waiting -= 1
            else:
                break
            worker, at = worker_of[unit[op]], place[op]
            start = late[sequence[worker, at + 1]] if at + 1 < size[worker] else deadline[group[worker]]
            for arc in range(first_successor[op], first_successor[op + 1]):
                other = successor[arc]
                if late[other] - transfer[arc] < start:  # else it does not matter who runs it
                    start = min(start, late[other] - (transfer[arc] if worker_of[unit[other]] != worker else 0))
            if interleaved and (op + 1) % kinds == 0:
                start = min(start, first_awaiting_reduction(awaiting, reduction, slice_of[unit[op]]))
            start -= duration[op]
            if interleaved:
                start = latest_clear_start(between, ticks, reduction, group[worker], start, duration[op])
            pipeline = owner[worker]
            if at == 0 and not marked[pipeline]:
                marked[pipeline] = 1
                touched_pipeline[touched] = pipeline
                longest_before[touched], excess_before[touched] = longest[pipeline], excess[pipeline]
                touched += 1
            if start == late[op]:
                continue
            if done == changed.shape[0]:
                good = False
                break
            changed[done], before[done] = op, late[op]
            done += 1
            late[op] = start
            good = start >= heads[op] - allowed
            arc, last = first_predecessor[op], first_predecessor[op + 1]
            other = sequence[worker, at - 1] if at else -1
            while True:  # the op before it on its worker, then its predecessors
                if other >= 0 and not queued[other]:
                    index = _bucket_of(late[other] - base, span)
                    queued[other] = 1
                    link[other] = bucket[index]
                    bucket[index] = other
                    waiting += 1
                    top = max(top, index)
                if arc == last:
                    break
                other = predecessor[arc]
                arc += 1
        counters[WAITING], counters[TOP] = waiting, top
        log.counters[CHANGED], log.counters[TOUCHED] = done, touched
        return good

    return retime_ops


_RETIME, _RETIME_INTERLEAVED = _make_retime(interleaved=False), _make_retime(interleaved=True)


@jit_inlined
def retime(instance, state, timing, queue, log, limits, run):
    """Recompute the latest starts of the ops in `queue` and of those at places [begin, end) of a worker's order, with
    `run` = (worker, begin, end), and of all ops that these changes affect.

    Return False if some window becomes too long to be accepted, or if the log is full. A window is too long if, with
    `limits` = (heads, allowed), an op starts more than `allowed` ticks before its head, the earliest start by which no
    busy window becomes longer.
    """
    if instance.interleaved:
        return _RETIME_INTERLEAVED(instance, state, timing, queue, log, limits, run)
    return _RETIME(instance, state, timing, queue, log, limits, run)


@jit_borrowing
def waits_for_itself(instance, state, timing, queue, op):
    """Return whether an op of zero duration is in a circular wait. The queue must be empty.

    Such a circular wait is not detected by `retime`: all of its ops start at once. In any other circular wait, ops
    would start earlier and earlier.
    """
    unit, first, successor, late = instance.unit, instance.successors.start, instance.successors.op, timing.late
    worker_of, duration, sequence, size, place = state.worker, state.duration, state.sequence, state.size, state.place
    reached, seen = queue.next, queue.queued
    tick, reached[0], count, at = late[op], op, 1, 0
    while at < count and not seen[op]:
        before = reached[at]
        at += 1
        worker, after = worker_of[unit[before]], place[before] + 1
        arc, last = first[before], first[before + 1]
        other = sequence[worker, after] if after < size[worker] else -1
        while True:  # the next op of its worker, then its successors
            if other >= 0 and late[other] == tick and duration[other] == 0 and not seen[other]:
                seen[other] = 1
                reached[count] = other
                count += 1
            if arc == last:
                break
            other = successor[arc]
            arc += 1
    circle = seen[op] == 1
    for number in range(count):
        seen[reached[number]] = 0
    return circle


@jit_inlined
def unmark_pipelines(log):
    """Clear the marks, in `log.marked`, of the pipelines whose busy windows the step may have changed."""
    for number in range(log.counters[TOUCHED]):
        log.marked[log.pipeline[number]] = 0


@jit_inlined
def revert_timing(timing, queue, log):
    """Undo what a rejected move of annealing changed in `timing`: restore the overwritten values, which `log` holds.

    Also empty `queue`, in which ops may be left whose latest start had not been recomputed yet.
    """
    counters = queue.counters
    while counters[WAITING]:
        op = queue.bucket[counters[TOP]]
        if op < 0:
            counters[TOP] -= 1
            continue
        queue.bucket[counters[TOP]] = queue.next[op]
        queue.queued[op] = 0
        counters[WAITING] -= 1
    for number in range(log.counters[CHANGED] - 1, -1, -1):
        timing.late[log.op[number]] = log.late[number]
    for number in range(log.counters[TOUCHED]):
        pipeline = log.pipeline[number]
        timing.longest[pipeline], timing.excess[pipeline] = log.longest[number], log.excess[number]


# --- Annealing: heads -------------------------------------------------------------------------------------------------
# A head is how early an op can start if no window is longer than the longest of its pipeline.
#
# An op that has to start before its head makes some window longer by as much, so that most bad changes are refused
# where they are made, before anything that follows from them is timed (heads and tails of job-shop search: Taillard
# 1994).
#
# All heads are found anew now and then (`set_heads`); in between, those of ops that change their places.


@jit_borrowing
def _renew_head(instance, state, heads, release, op):
    """Recompute `heads[op]`, the op's earliest start, from its predecessors, the op before it on its worker, and
    `release`, the tick before which each worker starts no op."""
    duration, predecessors = state.duration, instance.predecessors
    worker, place = state.worker[instance.unit[op]], state.place[op]
    head = release[worker]
    if place:
        before = state.sequence[worker, place - 1]
        head = heads[before] + duration[before]
    for arc in range(predecessors.start[op], predecessors.start[op + 1]):
        before = predecessors.op[arc]
        hop = predecessors.transfer[arc] if state.worker[instance.unit[before]] != worker else 0
        head = max(head, heads[before] + duration[before] + hop)
    heads[op] = head


@jit_inlined
def renew_heads(instance, state, heads, release, move):
    """Recompute the earliest starts in `heads` of the ops that the change `move`, or its undoing, has put in other
    places. `release` has the tick before which each worker starts no op."""
    if move.kind == EXCHANGE:
        for place in range(move.begin, move.end):
            _renew_head(instance, state, heads, release, state.sequence[move.worker, place])
        return
    for kind in range(instance.kinds):
        _renew_head(instance, state, heads, release, move.unit * instance.kinds + kind)
        if move.kind == TRADE:
            _renew_head(instance, state, heads, release, move.other * instance.kinds + kind)


# --- Annealing: moves -------------------------------------------------------------------------------------------------
# exchange    two neighbouring runs of ops of a worker change places, mostly at an arc of a critical path, as in
#             job-shop search (van Laarhoven et al. 1992, Nowicki and Smutnicki 1996)
# trade       two units of one slice trade workers and places
# move        a unit moves to another worker, to where its ops fit by time
# shift       a deadline, or the end of a window, shifts
#
# The first three are drawn by their `propose` functions, which also make the change; `undo_move` takes it back. A shift
# moves the starts of a whole group, and so is timed from scratch and undone at once where it is refused.

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


# --- Annealing: the steps of a cooling cycle --------------------------------------------------------------------------


@jit
def anneal(chain: Chain, cycle: Cycle, begin: int, end: int) -> int:
    """Run steps `begin` to below `end` of a cooling cycle of simulated annealing, storing the best state in the chain.

    Return the step with which to continue: less than `end` if the goal is reached before. A step that increases the
    cost by d is accepted with probability exp(-d / T) (Metropolis et al. 1953): if d is at most an allowance that is
    drawn before the step, -T ln(1 - u) with u uniform. Over the cycle T falls by a constant factor for each step.
    """
    instance, state, timing, sorting, heads, queue, log, path, record, random, run, places, statistics = \
        chain.instance, chain.state, chain.timing, chain.sorting, chain.heads, chain.queue, chain.log, chain.path, \
        chain.record, chain.random, chain.run, chain.places, chain.statistics
    time_state(instance, state, sorting, timing, cycle.goal)
    now = state_cost(instance, timing, cycle)
    between_heads = 1 + state.duration.shape[0] // cycle.ops_per_step
    movable = instance.movable.shape[0] > 0
    for step in range(begin, end):
        if record[PERIOD] <= cycle.goal:
            return step
        if step % between_heads == 0:
            set_heads(instance, state, timing, sorting, cycle.goal, heads)
        if step % cycle.steps_per_path == 0:
            path.size[0] = -1
        temperature = cycle.hot * (cycle.cold / cycle.hot) ** (step / cycle.steps)
        allowance = -temperature * math.log(1.0 - random_uniform(random))
        draw = random_uniform(random) if movable else 1.0
        if cycle.shifts and random_below(random, cycle.shifts) == 0:
            before, now = now, shift_deadline(chain, cycle, now, allowance)
            statistics[SHIFT, TRIED] += 1
            statistics[SHIFT, ACCEPTED] += now != before
            if _is_better(timing, record, now, cycle.scale):
                statistics[SHIFT, BETTER] += _store_best(chain, cycle, now)
            set_heads(instance, state, timing, sorting, cycle.goal, heads)
            path.size[0] = -1
            continue
        log.counters[CHANGED] = log.counters[TOUCHED] = 0
        if draw < cycle.trade:
            move = propose_trade(random, instance, state, timing.late, cycle)
        elif draw < cycle.trade + cycle.move:
            move = propose_move(random, instance, state, timing.late, cycle, places)
        else:
            move = propose_exchange(random, instance, state, timing, cycle, run, path)
        if move.kind == NONE:
            continue
        statistics[move.kind, TRIED] += 1
        limits = (heads, allowance + cycle.margin * cycle.scale)
        after, accepted = now, False
        if is_move_within_capacity(instance, state, move):
            renew_heads(instance, state, heads, sorting.release, move)
            if retime_after(instance, state, timing, queue, log, limits, move, places):
                after = cost_after(instance, state, timing, log, cycle, now)
                accepted = after <= now + allowance
        unmark_pipelines(log)
        if not accepted:
            revert_timing(timing, queue, log)
            undo_move(instance, state, run, places, move)
            renew_heads(instance, state, heads, sorting.release, move)
            continue
        now = after
        path.size[0] = -1
        statistics[move.kind, ACCEPTED] += 1
        if _is_better(timing, record, now, cycle.scale):
            statistics[move.kind, BETTER] += _store_best(chain, cycle, now)
    if end == cycle.steps and record[PERIOD] > cycle.goal and (
            timing.longest.max(), now * 1000) < (record[PERIOD], float(record[COST])):
        _store_best(chain, cycle, now)
    return end


@jit
def measure_best(chain: Chain, cycle: Cycle) -> None:
    """Recompute period and cost (`state_cost`, what annealing reduces) of the chain's best state for a new cooling
    cycle, which counts other windows or weighs them differently."""
    period = time_state(chain.instance, chain.best, chain.sorting, chain.trial, cycle.goal)
    chain.record[PERIOD], chain.record[COST] = period, int(state_cost(chain.instance, chain.trial, cycle) * 1000)


@jit_inlined
def _is_better(timing, record, now, scale):
    """Return whether a state, timed in `timing`, is better than the best one by enough to be stored.

    It is if its period is shorter, or if the periods are equal and `now` + `scale` is more than 3 % below the best
    state's cost: `now` is the cost of the state (`state_cost`), `scale` the mean duration of an op, both in ticks.
    `record` has the best state's period and cost.
    """
    # No .max(): where numba's cache has the functions with a runtime, it would compile that here, where it cannot.
    longest = timing.longest[0]
    for value in timing.longest:
        longest = max(longest, value)
    return longest < record[PERIOD] or (longest == record[PERIOD] and (now + scale) * 1000 < record[COST] * 0.97)


@jit
def _store_best(chain, cycle, now):
    """Store the present state of annealing as its best one, unless its period, computed anew, is longer than that of
    the best. Return 1 if its period is shorter, else 0.

    The argument `now` is the state's cost (`state_cost`) in ticks, which is stored, too.
    """
    state, best, before = chain.state, chain.best, chain.record[PERIOD]
    period = time_state(chain.instance, state, chain.sorting, chain.trial, cycle.goal)
    if 0 <= period <= chain.record[PERIOD]:
        chain.record[PERIOD], chain.record[COST] = period, int(now * 1000)
        best.worker[:] = state.worker
        best.duration[:] = state.duration
        best.sequence[:] = state.sequence
        best.size[:] = state.size
        best.place[:] = state.place
        best.deadline[:] = state.deadline
        best.end[:] = state.end
        best.begin[:] = state.begin
        best.turn[:] = state.turn
    return int(chain.record[PERIOD] < before)
