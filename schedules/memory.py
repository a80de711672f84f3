"""Define how a worker's memory is counted: what ops hold, and what layers leave.

A micro-batch holds the activation of a slice from the start of F to the end of I (or B), and the
stash that W needs from the end of I to the end of W. Checker, planner and timeline page all count
with these functions; proofs in `planner.model.bounds` rely on them.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import TypeVar

from slipstream.schedules.layers import LayerRange, sum_over_ranges
from slipstream.schedules.schedule import Grid, Memory, Op, OpKind, Schedule, Seat, Worker

Amount = TypeVar("Amount", int, float)
CHANGING_AT_START = frozenset({OpKind.F})
"""Kinds of op that change their worker's memory at their start, not at their end."""


def memory_change(kind: OpKind, activation: Amount, stash: Amount) -> Amount:
    """Return the memory that a compute op takes, or minus what it releases.

    A micro-batch holds `activation` from F to I (or B), and `stash` from I to W.
    """
    if kind is OpKind.F:
        return activation
    if kind is OpKind.I:
        return stash - activation
    return -stash if kind is OpKind.W else -activation


def peak_memory(activation: int, stash: int) -> int:
    """Return the most memory that a micro-batch ever holds at a slice.

    A micro-batch holds `activation` from F to I, and `stash` from I to W.
    """
    return max(
        accumulate(
            memory_change(kind, activation, stash) for kind in (OpKind.F, OpKind.I, OpKind.W)
        )
    )


def memory_profile(memory: Memory, ops: Iterable[Op]) -> list[tuple[int, int]]:
    """Return the memory that micro-batches hold on a worker over time.

    The result is ascending pairs (tick, memory from then on in units of `memory.unit`). `ops` are
    the worker's ops. Releases at a tick come before acquisitions, so the memory after all changes
    of a tick is also the maximum at that tick.
    """
    change: dict[int, int] = defaultdict(int)
    for op in ops:
        if op.slice is not None and op.kind is not OpKind.A:
            change[op.start_ticks if op.kind in CHANGING_AT_START else op.end_ticks] += (
                memory_change(op.kind, memory.activation[op.slice], memory.weight_stash[op.slice])
            )
    ticks = sorted(change)
    return list(zip(ticks, accumulate(change[tick] for tick in ticks), strict=True))


def weights_of(memory: Memory | None, ranges: Iterable[LayerRange]) -> int:
    """Return the memory of the parameters, gradients and optimizer state of these layers.

    The result is in units of `memory.unit`, and 0 if `memory` is None or has no weights.
    """
    return sum_over_ranges(memory.weights_before, ranges) if memory and memory.weights else 0


def total_memory(memory: Memory, grid: Grid, worker: Worker) -> int:
    """Return a worker's memory for weights and activations, in units of `memory.unit`.

    This is the capacity for activations plus the weights of the worker's own column.
    """
    return memory.capacity_for(worker, worker.column) + weights_of(
        memory, grid.held_layers_by_column[worker.column]
    )


def activation_room(schedule: Schedule, seat: Seat) -> int | None:
    """Return the memory for activations of a seat's worker; None means no limit.

    The result is in units of `schedule.memory.unit`. If the seat lists layers, it is what their
    weights leave of the worker's `total_memory`, negative if they exceed it. Otherwise it is the
    worker's own capacity, or else that of its role's column (`Memory.capacity`).
    """
    memory = schedule.memory
    if memory is None:
        return None
    if seat.holds is None:
        return memory.capacity_for(seat.worker, seat.role.column)
    return total_memory(memory, schedule.grid, seat.worker) - weights_of(memory, seat.holds)


def memory_peaks(schedule: Schedule) -> dict[Worker, int]:
    """Return the peak memory of micro-batches on each live worker, in units of `Memory.unit`.

    The result is empty if memory is unlimited. A re-routed micro-batch takes memory of the worker
    that runs it.
    """
    memory = schedule.memory
    if memory is None:
        return {}
    return schedule.compute_for_each(
        lambda worker: max(
            (amount for _, amount in memory_profile(memory, schedule.ops(worker))), default=0
        )
    )
