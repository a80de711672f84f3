"""Forwards alone: what validation runs, by a schedule for training.

Each forward stays on its worker, and each worker keeps the order of its forwards, so whoever can train by the schedule
can evaluate by it: whichever workers are down, and wherever layers are. Without backwards no forward waits for memory
or for a gradient, and all start as soon as they can. Where all workers are there, one stage each, no order is better:
they pass micro-batches on in one order, and nobody waits between its first forward and its last.
"""

from collections import defaultdict

from msgspec.structs import replace

from schedules.precedence import op_key, producers
from schedules.schedule import Op, OpKind, Program, ProgramOp, Schedule, Seat, Worker, period_ticks


def forwards_of(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, as early as they can run; `schedules.check.check(..., forwards=True)` has its rules.

    Its lower bound is that of the work: no worker of those that live can have less than its share.
    """
    planned = sorted((op for op in schedule.all_ops() if op.kind is OpKind.F), key=lambda op: (
        op.start_ticks, op.end_ticks, schedule.layers_by_slice[op.slice or 0]))
    free: dict[Worker, int] = defaultdict(int)
    done: dict[object, Op] = {}
    moved: dict[Worker, list[Op]] = {seat.worker: [] for seat in schedule.seats}
    for op in planned:
        assert op.pipeline is not None and op.microbatch is not None
        start, key = free[op.worker], op_key(op)
        for before in (done[one] for one in producers(key, schedule.path(op.pipeline, op.microbatch))):
            start = max(start, before.end_ticks + (schedule.times.transfer if before.worker != op.worker else 0))
        placed = replace(op, start_ticks=start, end_ticks=start + op.end_ticks - op.start_ticks)
        free[op.worker], done[key] = placed.end_ticks, placed
        moved[op.worker].append(placed)
    seats, programs = _stored(schedule, moved)
    ticks = period_ticks(op for ops in moved.values() for op in ops)
    least = min(ticks, _work_bound(schedule, planned))
    return replace(schedule, seats=seats, programs=programs, memory=None, backward="fused", optimizer="staggered",
                   period_ticks=ticks, lower_bound_ticks=least, status="optimal" if least == ticks else "feasible",
                   method="forwards")


def _stored(schedule: Schedule, moved: dict[Worker, list[Op]]) -> tuple[tuple[Seat, ...], tuple[Program, ...]]:
    """Equal programs once."""
    number: dict[Program, int] = {}
    seats = []
    for seat in schedule.seats:
        program = tuple(ProgramOp(op.kind, op.slice, op.microbatch, op.start_ticks,
                                  None if op.pipeline == seat.role.pipeline else op.pipeline)
                        for op in moved[seat.worker])
        seats.append(replace(seat, program=number.setdefault(program, len(number))))
    return tuple(seats), tuple(number)


def _work_bound(schedule: Schedule, forwards: list[Op]) -> int:
    """All forwards, each on the quickest worker, spread evenly over those that live."""
    quickest = min(schedule.times.per_mille_of.get(seat.worker, 1000) for seat in schedule.seats)
    work = sum(schedule.times.forward[op.slice or 0] * quickest for op in forwards)
    return -(-work // (1000 * len(schedule.seats)))
