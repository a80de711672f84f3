"""Turns schedules into entries of a table and back.

An entry holds only what differs from entry to entry; the rest is in the table's basis. The program of a worker that
helps other pipelines names them by position in a list. The entry gives that list for each worker, so that equal helpers
of different pipelines share a program.
"""

from collections.abc import Sequence

import msgspec

from slipstream.schedules.codec import MAX_OPS, require_few_ops, validate
from slipstream.schedules.schedule import Program, ProgramOp, Schedule, Seat
from slipstream.schedules.tables.file import Basis, Entry, EntryCosts, TableError


def encode_entry(key: str, schedule: Schedule, basis: Basis, numbers: dict[bytes, int]) -> Entry:
    """The entry of a schedule. `numbers`: the number of each known program by its text; new ones are added to it.

    Raises TableError for a schedule that is too large to be read again.
    """
    try:
        require_few_ops(schedule)
    except ValueError as error:
        raise TableError(f"entry {key}: too large for a table: {error}") from None
    texts = [_stored_text(program) for program in schedule.programs]
    seats = []
    for seat in schedule.seats:
        text, helped = texts[seat.program]
        seats.append((numbers.setdefault(text, len(numbers)), *helped))
    holds = tuple(seat.holds for seat in schedule.seats)
    costs = EntryCosts(tick_seconds=schedule.tick_seconds, slices=schedule.slices, times=schedule.times,
                       memory=schedule.memory)
    shared = EntryCosts(tick_seconds=basis.tick_seconds, slices=(), times=basis.times, memory=basis.memory)
    return Entry(key=key, failed=schedule.failed, period_ticks=schedule.period_ticks, status=schedule.status,
                 lower_bound_ticks=schedule.lower_bound_ticks, method=schedule.method, seats=tuple(seats),
                 holds=() if all(held is None for held in holds) else holds, costs=None if costs == shared else costs,
                 bound_scope=schedule.bound_scope)


def _stored_text(program: Program) -> tuple[bytes, tuple[int, ...]]:
    """The text of a program, with positions for the pipelines it helps, and these pipelines in their order."""
    position: dict[int, int] = {}
    ops = [op if op.pipeline is None else
           ProgramOp(op.kind, op.slice, op.microbatch, op.start_ticks, position.setdefault(op.pipeline, len(position)))
           for op in program]
    return msgspec.json.encode(ops), tuple(position)


def decode_entry(entry: Entry, basis: Basis, programs: Sequence[bytes | msgspec.Raw]) -> Schedule:
    """The schedule of an entry; `programs` are all of the table. Raises TableError when it is not well-formed."""
    try:
        schedule = _schedule_of(entry, basis, programs)
        validate(schedule)
        return schedule
    except (ValueError, LookupError) as error:  # msgspec.DecodeError is a ValueError
        raise TableError(f"entry {entry.key}: not readable: {' '.join(str(error).split())[:200]}") from None


_PROGRAM: msgspec.json.Decoder[Program] = msgspec.json.Decoder(Program)


def _schedule_of(entry: Entry, basis: Basis, programs: Sequence[bytes | msgspec.Raw]) -> Schedule:
    down = set(entry.failed)
    live = [worker for worker in basis.grid.workers() if worker not in down]
    order: dict[tuple[int, ...], int] = {}
    seats = tuple(Seat(worker, worker, order.setdefault(stored, len(order)), held)
                  for worker, stored, held in zip(live, entry.seats, entry.holds or [None] * len(live), strict=True))
    decoded: dict[int, Program] = {}
    lengths = 0
    for number, *_ in order:
        if number not in decoded:
            decoded[number] = _PROGRAM.decode(programs[number])
            lengths += len(decoded[number])
            if lengths > MAX_OPS:
                raise ValueError(f"more than {MAX_OPS} ops")
    costs = entry.costs or EntryCosts(tick_seconds=basis.tick_seconds, slices=(), times=basis.times,
                                      memory=basis.memory)
    return Schedule(job=basis.job, tick_seconds=costs.tick_seconds, grid=basis.grid, slices=costs.slices,
                    times=costs.times, memory=costs.memory, backward=basis.backward, optimizer=basis.optimizer,
                    failed=entry.failed, seats=seats,
                    programs=tuple(_with_pipelines(decoded[number], helped) for number, *helped in order),
                    period_ticks=entry.period_ticks, lower_bound_ticks=entry.lower_bound_ticks, status=entry.status,
                    method=entry.method, bound_scope=entry.bound_scope)


def _with_pipelines(program: Program, helped: Sequence[int]) -> Program:
    """A stored program, with the pipelines it helps in place of their positions."""
    if not helped:
        return program
    return tuple(op if op.pipeline is None else
                 ProgramOp(op.kind, op.slice, op.microbatch, op.start_ticks, helped[op.pipeline]) for op in program)
