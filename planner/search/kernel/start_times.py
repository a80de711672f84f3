"""Start times of an order of ops, in one pass over it; compiled."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.search.kernel.jit import inlined, jit

if TYPE_CHECKING:
    from planner.model.arrays import Ops, Reductions

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
