"""How much memory each worker holds, and when: activations from F start to I (or B) end, then the stash to W end."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

from slipstream.schedules.layers import total
from slipstream.schedules.schedule import Memory, Op, OpKind, Schedule, Seat, Worker


def memory_profile(memory: Memory, ops: Iterable[Op]) -> list[tuple[int, int]]:
    """What one worker holds over time: (tick, multiples of `memory.unit` held from then on), ascending ticks.

    Intervals are half-open, so at one instant releases come before acquisitions: what is held after all changes of an
    instant is also the most that is held in it.
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


def room(schedule: Schedule, seat: Seat) -> int | None:
    """Room for activations on a live worker, in multiples of `schedule.memory.unit`; None where there is no limit.

    `capacity` is what is left beside the layers of a column: a worker that holds others has that much more or less.
    """
    memory = schedule.memory
    if memory is None:
        return None
    if seat.holds is None:
        return memory.beside(seat.worker, seat.role.column)
    own = total(memory.weights_before, schedule.holds_of_column(seat.worker.column))
    return memory.beside(seat.worker, seat.worker.column) + own - total(memory.weights_before, seat.holds)


def memory_peaks(schedule: Schedule) -> dict[Worker, int]:
    """The most that each live worker ever holds, in multiples of `schedule.memory.unit`.

    Empty where the schedule sets no memory. Re-routed micro-batches count on their host.
    """
    memory = schedule.memory
    if memory is None:
        return {}
    return schedule.of_each(lambda worker: max(
        (held for _, held in memory_profile(memory, schedule.ops(worker))), default=0))
