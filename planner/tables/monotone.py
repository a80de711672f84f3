"""Fewer failures are never slower than more, and layers moved never slower than in place: what holds for the best plans
is made to hold for those of a table, which are only as good as the search.

A plan for one failure more is one for fewer, in which a live worker stands by: it runs no micro-batch.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from slipstream.planner.tables.folder import Part, make_part
from slipstream.planner.transition import Transition
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Program, Schedule, Seat, Worker
from slipstream.schedules.tables.entry_codec import decode_entry
from slipstream.schedules.tables.pattern import count_key, settled_key


def improved(parts: Mapping[str, Part], most: int, slow: Worker | None = None) -> dict[str, Part]:
    """The parts of counts 0 to `most` that others make better, by key; `parts` are all of a table. `slow`: those with
    this slow worker among the failures."""
    better: dict[str, Part] = {}
    for failures in range(most, -1, -1):
        for key, others in _sources(failures, slow):
            own = parts.get(key)
            for other in others:
                source = better.get(other, parts.get(other))
                if own is None or source is None or own.reason or source.reason or _period(source) >= _period(own):
                    continue
                if (found := _taken_over(own, source)) is not None:
                    better[key] = own = found
    return better


def _sources(failures: int, slow: Worker | None) -> Sequence[tuple[str, tuple[str, ...]]]:
    """The keys of a count, each with those whose plans will also do."""
    at_once, more = (count_key(count, slow) for count in (failures, failures + 1))
    settled = settled_key(at_once)
    return (at_once, (more,)), (settled, (at_once, settled_key(more)))


def _period(part: Part) -> float:
    return part.entry.period_ticks * part.entry.tick_seconds(part.basis)


def _taken_over(own: Part, source: Part) -> Part | None:
    """The plan of another part as one for this part's number of failures; None where it is none."""
    schedule = decode_entry(source.entry, source.basis, source.programs)
    if own.failures < source.failures:
        standing_by = with_a_worker_standing_by(schedule)
        if standing_by is None:
            return None
        schedule = standing_by
    moved = source.moved or (own.moved and Transition(layers=0, bytes=0.0, seconds=0.0))
    tick = own.entry.tick_seconds(own.basis) / schedule.tick_seconds  # a bound in other ticks is rounded down
    lower = own.entry.lower_bound_ticks if tick == 1 else math.floor(own.entry.lower_bound_ticks * tick * (1 - 1e-12))
    bound = min(schedule.period_ticks, lower)
    return make_part(own.basis, own.entry.key, schedule.with_bound(bound, own.entry.bound_scope), moved)


def with_a_worker_standing_by(schedule: Schedule) -> Schedule | None:
    """The schedule with one failed worker fewer, which only reduces gradients and steps; None where that breaks a rule.

    The worker's layers are those of its role; it needs a peer that holds the same.
    """
    for role in reversed(schedule.failed):
        peer = next((seat for seat in schedule.seats if seat.role.column == role.column and seat.holds is None), None)
        if peer is None:
            continue
        closing: Program = tuple(op for op in schedule.programs[peer.program] if op.microbatch is None)
        seats = sorted((*schedule.seats, Seat(role, role, len(schedule.programs))), key=lambda seat: seat.worker)
        found = msgspec.structs.replace(schedule, failed=tuple(one for one in schedule.failed if one != role),
                                        seats=tuple(seats), programs=(*schedule.programs, closing))
        if not check(found):
            return found
    return None
