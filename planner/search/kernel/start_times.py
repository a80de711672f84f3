"""Start times of an order of ops, in one pass over it; compiled."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.search.kernel.jit import jit

if TYPE_CHECKING:
    from planner.model.arrays import Ops

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


@jit
def latest(ops: "Ops", order: Ints, start: Ints, free: Ints) -> None:
    """Fill `start` [op] with the latest ticks that an order and the ends of all workers, in `free` [worker], allow.

    `free` is left with the starts of the workers' first ops.
    """
    worker, unit, duration = ops.worker, ops.unit, ops.duration
    arc_start, arc_op, arc_hop = ops.successors.start, ops.successors.op, ops.successors.hop
    for op in order[::-1]:
        row = worker[unit[op]]
        end = free[row]
        for arc in range(arc_start[op], arc_start[op + 1]):
            end = min(end, start[arc_op[arc]] - arc_hop[arc])
        start[op] = free[row] = end - duration[op]
