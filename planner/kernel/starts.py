"""Compute the start times of an order of ops, and of the gradient reductions that follow; the arrays of a problem."""

from typing import NamedTuple

from .compiling import Ints, jit, jit_inlined

FOREVER = 2**61
"""Tick that is later than those of any plan."""


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
