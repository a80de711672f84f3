"""Define how the memory of a worker is counted.

It is what its ops hold, and what room its layers leave for them.

A micro-batch holds the activation of a slice from the start of F to the end of I (or B), and the
stash of W from the end of I to the end of W. Checker, planner and timeline page all count by these
functions; proofs in `planner.model.bounds` assume them.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import TypeVar

from slipstream.schedules.layers import LayerRange, sum_over_ranges
from slipstream.schedules.schedule import Grid, Memory, Op, OpKind, Schedule, Seat, Worker

Amount = TypeVar("Amount", int, float)
CHANGING_AT_START = frozenset({OpKind.F})
"""Kinds of op that change their worker's memory at the start; others at the end."""


def memory_change(kind: OpKind, activation: Amount, stash: Amount) -> Amount:
    """Return an op's change of memory: `activation` lasts from F to I, `stash` to W."""
    if kind is OpKind.F:
        return activation
    if kind is OpKind.I:
        return stash - activation
    return -stash if kind is OpKind.W else -activation


def peak_memory(activation: int, stash: int) -> int:
    """Return a micro-batch's most memory: `activation` from F to I, then `stash` to W."""
    return max(
        accumulate(
            memory_change(kind, activation, stash) for kind in (OpKind.F, OpKind.I, OpKind.W)
        )
    )


def memory_profile(memory: Memory, ops: Iterable[Op]) -> list[tuple[int, int]]:
    """Return the memory that micro-batches take on one worker over time.

    Returns ascending pairs (tick, multiples of `memory.unit` from then on); `ops` are the worker's
    ops. Intervals are half-open, so releases at a tick come before acquisitions. The memory held
    after all changes of a tick is therefore also the maximum at that tick.
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
    """Return layers' parameters, gradients and state, in `memory.unit`; 0 without weights."""
    return sum_over_ranges(memory.weights_before, ranges) if memory and memory.weights else 0


def total_room(memory: Memory, grid: Grid, worker: Worker) -> int:
    """Return the memory of a worker for weights and activations together.

    It is in multiples of `memory.unit`: the capacity for activations plus the weights of its own
    column's layers.
    """
    return memory.capacity_for(worker, worker.column) + weights_of(
        memory, grid.held_layers_by_column[worker.column]
    )


def activation_room(schedule: Schedule, seat: Seat) -> int | None:
    """Return the memory for activations of a seat's worker; None means no limit.

    It is in multiples of `schedule.memory.unit`. The field `Memory.capacity` is the memory that the
    layers of a worker's own column leave. A worker that holds other layers has more or less by the
    difference of their weights.
    """
    memory = schedule.memory
    if memory is None:
        return None
    if seat.holds is None:
        return memory.capacity_for(seat.worker, seat.role.column)
    return total_room(memory, schedule.grid, seat.worker) - weights_of(memory, seat.holds)


def memory_peaks(schedule: Schedule) -> dict[Worker, int]:
    """Return the peak memory that micro-batches take on each live worker, in multiples of
    `schedule.memory.unit`.

    Empty if the schedule has no memory limits. A re-routed micro-batch counts for the worker that
    runs it.
    """
    memory = schedule.memory
    if memory is None:
        return {}
    return schedule.compute_for_each(lambda worker: max(
        (amount for _, amount in memory_profile(memory, schedule.ops(worker))), default=0))
