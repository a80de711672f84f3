"""Start times of an order of ops, in one pass over it, and of the reductions that follow; compiled."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.planner.search.kernel.jit import inlined, jit

if TYPE_CHECKING:
    from slipstream.planner.model.arrays import Ops, Reductions

Ints = NDArray[np.int64]


@jit
def earliest(ops: "Ops", order: Ints, start: Ints, free: Ints) -> None:
    """Fill `start` [op] with the earliest ticks that an order allows, and `free` [worker] with the ends of the last."""
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


@inlined
def first_awaiting(awaiting: Ints, begin: Ints, number: int) -> int:
    """The first reduction that waits for W of a slice: its tick."""
    first = begin[awaiting[number, 0]]
    for index in range(1, awaiting.shape[1]):
        if awaiting[number, index] >= 0:
            first = min(first, begin[awaiting[number, index]])
    return first


@inlined
def clear_of(between: Ints, begin: Ints, group: int, start: int, duration: int) -> int:
    """The latest start up to this one with which an op runs over no reduction of its worker's group."""
    number = 0
    while number < between.shape[1] and between[group, number] >= 0:
        tick = begin[between[group, number]]
        if start < tick and tick < start + duration:
            start = tick - duration
            number = 0
        else:
            number += 1
    return start


@jit
def latest(ops: "Ops", order: Ints, start: Ints, free: Ints, group: Ints, reductions: "Reductions",
           begin: Ints) -> None:
    """Fill `start` [op] with the latest ticks that an order and the ends of all workers, in `free` [worker], allow.

    `free` is left with the starts of the workers' first ops. `group` is that of each worker, `begin` [reduction] when
    each begins, where they lie between compute ops; else empty.
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
            end = min(end, first_awaiting(reductions.awaiting, begin, ops.slice[unit[op]]))
        start[op] = end - duration[op]
        if interleaved:
            start[op] = clear_of(reductions.between, begin, group[row], start[op], duration[op])
        free[row] = start[op]


@jit
def reduce(sharers: Ints, ticks: Ints, end: Ints, begin: Ints, turn: Ints) -> None:
    """Run all reductions, each on all groups that share it at once, and one at a time on each group.

    What can begin first is next; of equals, that of the later layers. `end` [group] is when its compute ops are done,
    and becomes when its reductions are. Fills `begin` [reduction] and `turn`: the reductions in their order.
    """
    for number in range(turn.shape[0]):
        turn[number] = number
    for number in range(turn.shape[0]):
        first = number
        for place in range(number, turn.shape[0]):
            reduction, other = turn[place], turn[first]
            begin[reduction] = _all_done(sharers, end, reduction)
            if begin[reduction] < begin[other] or (begin[reduction] == begin[other] and reduction > other):
                first = place
        reduction = turn[first]
        turn[first], turn[number] = turn[number], reduction
        _set_ends(sharers, end, reduction, begin[reduction] + ticks[reduction])


@inlined
def _all_done(sharers: Ints, end: Ints, reduction: int) -> int:
    """When the last of the groups that share a reduction is done with all before it."""
    last = end[sharers[reduction, 0]]
    for index in range(1, sharers.shape[1]):
        if sharers[reduction, index] >= 0:
            last = max(last, end[sharers[reduction, index]])
    return last


@inlined
def _set_ends(sharers: Ints, end: Ints, reduction: int, tick: int) -> None:
    for index in range(sharers.shape[1]):
        if sharers[reduction, index] >= 0:
            end[sharers[reduction, index]] = tick


@jit
def put_off(sharers: Ints, ticks: Ints, turn: Ints, end: Ints) -> None:
    """`end` [group], when its reductions are done, becomes the latest that its compute ops may be, in this `turn`."""
    for number in range(turn.shape[0] - 1, -1, -1):
        reduction = turn[number]
        last = end[sharers[reduction, 0]]
        for index in range(1, sharers.shape[1]):
            if sharers[reduction, index] >= 0:
                last = min(last, end[sharers[reduction, index]])
        _set_ends(sharers, end, reduction, last - ticks[reduction])


@jit
def close(sharers: Ints, ticks: Ints, deadline: Ints, end: Ints, begin: Ints, turn: Ints) -> None:
    """Put off the deadlines of compute ops, [group], as far as no reduction ends later; fill the rest as `reduce` does.

    Where reductions would then come in another order, and some end later, deadlines stay as they are.
    """
    end[:] = deadline
    reduce(sharers, ticks, end, begin, turn)
    late = end.copy()
    put_off(sharers, ticks, turn, late)
    after = late.copy()
    reduce(sharers, ticks, after, begin, turn)
    for group in range(end.shape[0]):
        if after[group] > end[group]:
            end[:] = deadline
            reduce(sharers, ticks, end, begin, turn)
            return
    deadline[:] = late
    end[:] = after
