"""Compute the memory that each worker holds over time.

An activation is held from the start of F to the end of I (or B), and the stash of W from the end of I to the end of W.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

from slipstream.schedules.layers import sum_over_ranges
from slipstream.schedules.schedule import Memory, Op, OpKind, Schedule, Seat, Worker


def memory_profile(memory: Memory, ops: Iterable[Op]) -> list[tuple[int, int]]:
    """Return the memory of one worker as (tick, multiples of `memory.unit` held from then on), ticks ascending.

    Intervals are half-open, so releases at a tick come before acquisitions. The memory held after all changes of a tick
    is therefore also the maximum at that tick.
    """
    change: dict[int, int] = defaultdict(int)
    for op in ops:
        if op.slice is None:
            continue
        activation, stash = memory.activation[op.slice], memory.weight_stash[op.slice]
        if op.kind is OpKind.F:
            change[op.start_ticks] += activation
        elif op.kind is OpKind.I:
            change[op.end_ticks] += stash - activation
        elif op.kind is OpKind.W:
            change[op.end_ticks] -= stash
        elif op.kind is OpKind.B:
            change[op.end_ticks] -= activation
    ticks = sorted(change)
    return list(zip(ticks, accumulate(change[tick] for tick in ticks), strict=True))


def activation_room(schedule: Schedule, seat: Seat) -> int | None:
    """Return the room for activations of a live worker, in multiples of `schedule.memory.unit`; None means no limit.

    The field `capacity` is the room that remains next to the layers of a worker's own column. A worker that holds other
    layers has more or less room by the difference of their weights.
    """
    memory = schedule.memory
    if memory is None:
        return None
    if seat.holds is None:
        return memory.capacity_for(seat.worker, seat.role.column)
    own = sum_over_ranges(memory.weights_before, schedule.held_layers_of_column(seat.worker.column))
    return memory.capacity_for(seat.worker, seat.worker.column) + own - sum_over_ranges(memory.weights_before,
                                                                                        seat.holds)


def memory_peaks(schedule: Schedule) -> dict[Worker, int]:
    """Return the most that each live worker ever holds, in multiples of `schedule.memory.unit`.

    Empty if the schedule has no memory limits. A re-routed micro-batch counts for the worker that runs it.
    """
    memory = schedule.memory
    if memory is None:
        return {}
    return schedule.compute_for_each(lambda worker: max(
        (held for _, held in memory_profile(memory, schedule.ops(worker))), default=0))
