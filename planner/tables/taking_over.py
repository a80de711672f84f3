"""Let entries of a table take over shorter plans that answer the same failures.

Wherever a plan can be taken over, fewer failures are then never slower than more, and layers moved
never slower than in place.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.job.file import Job
from slipstream.planner.report import Transition, compute_transition
from slipstream.planner.stated_question import narrowest_scope
from slipstream.planner.tables.folder import FinishedPart, make_part
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Program, Schedule, Scope, Seat, Worker
from slipstream.schedules.tables.file import decode_entry
from slipstream.schedules.tables.pattern import count_key, roles_key, settled_key
from slipstream.schedules.tables.relabel import relabel_schedule


def improve_parts(
    parts: Mapping[str, FinishedPart],
    max_failures: int,
    slow: Worker | None = None,
    *,
    patterns: Sequence[str] = (),
) -> dict[str, FinishedPart]:
    """Return, by key, entries for a number of failures that take over a shorter plan.

    In a table with the result, fewer failures are never slower than more, and layers moved never
    slower than in place, wherever the plan can be taken over. If workers are alike, a number of
    failures, for which roles move, is not slower than the `patterns` of as many, either. Entries
    without a plan stay so.

    Parameters
    ----------
    parts
        All finished entries of the table, by key.
    max_failures
        Largest number of failures of an improved entry.
    slow
        Slow worker among the failures of the improved entries; None: the entries for any workers.
    patterns
        Keys of the entries for patterns of failures whose plans may be taken over.
    """
    better: dict[str, FinishedPart] = {}
    # From most failures down, so that a shorter plan reaches all entries of fewer failures.
    for failures in range(max_failures, -1, -1):
        alike = [key for key in patterns if parts[key].failures == failures]
        for key, others in _source_keys(failures, slow):
            more = map(settled_key, alike) if key.startswith(settled_key("")) else alike
            _improve_entry(key, (*others, *more), parts, better, _take_over_plan)
    return better


def _improve_entry(
    key: str,
    others: Iterable[str],
    parts: Mapping[str, FinishedPart],
    better: dict[str, FinishedPart],
    take_over: Callable[[FinishedPart, FinishedPart], FinishedPart | None],
) -> None:
    """Put an entry into `better` if a shorter plan of `others` can be taken over."""
    part = parts.get(key)
    for source in (better.get(other, parts.get(other)) for other in others):
        if (
            part is None
            or source is None
            or source.reason
            or (not part.reason and _period_seconds(source) >= _period_seconds(part))
        ):
            continue
        if (taken_over := take_over(part, source)) is not None:
            better[key] = part = taken_over


def improve_patterns(
    parts: Mapping[str, FinishedPart], patterns: Sequence[str], job: Job
) -> dict[str, FinishedPart]:
    """Return, by key, the entries for failure patterns that take over a shorter plan.

    In a table with the result, roles moved are never slower than in place, layers moved never
    slower than either, and none of these slower than the entry of its kind for the number of
    failures, wherever that plan fits the failed workers. The argument `parts` has all finished
    entries, and `patterns` the keys of those for patterns in place.
    """
    better: dict[str, FinishedPart] = {}
    for pattern in patterns:
        moved, settled = roles_key(pattern), settled_key(pattern)
        numbers = _keys_of_numbers(parts[pattern])
        sources = {
            moved: (pattern, *numbers),
            settled: (pattern, moved, *numbers, *map(settled_key, numbers)),
        }
        for key, others in sources.items():
            _improve_entry(key, others, parts, better, partial(_fit_plan, job=job))
    return better


def _keys_of_numbers(part: FinishedPart) -> list[str]:
    """Return the keys of the entries by number of failures that fit an entry's failures."""
    failed, slow = part.entry.failed, part.basis.times.per_mille_of
    return [
        count_key(len(failed)),
        *(count_key(len(failed), worker) for worker in failed if worker in slow),
    ]


def _fit_plan(part: FinishedPart, source: FinishedPart, job: Job) -> FinishedPart | None:
    """Return `part` with the plan of `source` in other roles; None if not valid."""
    schedule: Schedule | None = decode_entry(source.entry, source.basis, source.programs)
    assert schedule is not None
    if schedule.failed != part.entry.failed:
        # Other workers have failed: live ones take over the roles of the plan.
        schedule = relabel_schedule(schedule, part.entry.failed, nodes=job.nodes)
        if schedule is None or check(schedule):
            return None
    if not part.reason and part.entry.bound_scope in (Scope.ROLES, Scope.LAYERS):
        schedule = _with_bound_of_entry(schedule, part)
    moved = (
        compute_transition(schedule, job) if part.entry.key.startswith(settled_key("")) else None
    )
    return make_part(part.basis, part.entry.key, schedule, moved)


def _source_keys(failures: int, slow: Worker | None) -> Sequence[tuple[str, tuple[str, ...]]]:
    """Return pairs: an entry's key, and keys of entries whose plans may replace its own."""
    at_once, more = (count_key(count, slow) for count in (failures, failures + 1))
    settled = settled_key(at_once)
    return (at_once, (more,)), (settled, (at_once, settled_key(more)))


def _period_seconds(part: FinishedPart) -> float:
    return part.entry.period_ticks * part.entry.tick_seconds(part.basis)


def _take_over_plan(part: FinishedPart, source: FinishedPart) -> FinishedPart | None:
    """Return `part` with the plan of the entry `source`; None if that does not fit."""
    if part.reason:
        return None
    schedule = decode_entry(source.entry, source.basis, source.programs)
    if schedule.moves:  # as certain workers have failed
        return None
    # Of one failure more, a failed worker is alive again.
    if part.failures < source.failures:
        standing_by = with_standby_worker(schedule)
        if standing_by is None:
            return None
        schedule = standing_by
    moved = source.moved or (part.moved and Transition(layers=0, bytes=0.0, seconds=0.0))
    # A bound for any layers is the entry's. Others hold for a plan's vacant roles only: the plan
    # keeps its own, or another is proven.
    if part.entry.bound_scope is Scope.LAYERS:
        schedule = _with_bound_of_entry(schedule, part)
    elif part.failures < source.failures:
        scope = narrowest_scope(schedule)
        proven = proven_bound(schedule.with_bound(0, scope)).ticks
        schedule = schedule.with_bound(min(schedule.period_ticks, proven), scope)
    return make_part(part.basis, part.entry.key, schedule, moved)


def _with_bound_of_entry(schedule: Schedule, part: FinishedPart) -> Schedule:
    """Return a copy of the schedule with an entry's bound, in the schedule's ticks."""
    tick = part.entry.tick_seconds(part.basis) / schedule.tick_seconds
    lower = part.entry.lower_bound_ticks
    # Rounded down, so that it remains a bound.
    if tick != 1:
        lower = math.floor(lower * tick * (1 - 1e-12))
    return schedule.with_bound(min(schedule.period_ticks, lower), part.entry.bound_scope)


def with_standby_worker(schedule: Schedule) -> Schedule | None:
    """Return a copy of the schedule in which a failed worker lives, but computes nothing.

    The worker only takes part in all-reduces and runs its optimizer step. It holds the layers of
    its own column, and needs a live worker that holds the same. The last failed worker for which
    the result passes `schedules.check` is chosen; None if there is none. The bound stays that of
    `schedule`, which more live workers may beat.
    """
    for role in reversed(schedule.failed):
        peers = (
            seat
            for seat in schedule.seats
            if seat.role.column == role.column and seat.holds is None
        )
        peer = next(peers, None)
        if peer is None:
            continue
        # It runs what the peer runs after all micro-batches.
        peer_program = schedule.programs[peer.program]
        closing: Program = tuple(op for op in peer_program if op.microbatch is None)
        seats = (*schedule.seats, Seat(role, role, len(schedule.programs)))
        result = msgspec.structs.replace(
            schedule,
            failed=tuple(worker for worker in schedule.failed if worker != role),
            seats=tuple(sorted(seats, key=lambda seat: seat.worker)),
            programs=(*schedule.programs, closing),
        )
        if not check(result):
            return result
    return None
