"""Let entries of a table take over shorter plans that answer the same failures.

Fewer failures are then never slower than more, and layers moved never slower than in place.
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


def improve_parts(parts: Mapping[str, FinishedPart], most: int, slow: Worker | None = None, *,
                  patterns: Sequence[str] = ()) -> dict[str, FinishedPart]:
    """Return, by key, the entries of few failures that take over a shorter plan.

    They are for 0 to `most` failures. In a table with them, fewer failures are never slower than
    more, layers moved are never slower than in place, and, if workers are alike, a number of
    failures, for which roles move, is never slower than a pattern of as many. All finished entries
    of the table that count are in `parts`; `patterns` has the keys of those for patterns of
    failures. With `slow`, the improved entries are those with this slow worker among the failures.
    """
    better: dict[str, FinishedPart] = {}
    for failures in range(most, -1, -1):
        alike = [key for key in patterns if parts[key].failures == failures]
        for key, others in _source_keys(failures, slow):
            more = map(settled_key, alike) if key.startswith(settled_key("")) else alike
            _improve_entry(key, (*others, *more), parts, better, _take_over_plan)
    return better


def _improve_entry(key: str, others: Iterable[str], parts: Mapping[str, FinishedPart], better: dict[str, FinishedPart],
                   take_over: Callable[[FinishedPart, FinishedPart], FinishedPart | None]) -> None:
    """Let an entry take over each shorter plan of the `others`."""
    own = parts.get(key)
    for source in (better.get(other, parts.get(other)) for other in others):
        if own is None or source is None or source.reason \
                or (not own.reason and _period_seconds(source) >= _period_seconds(own)):
            continue
        if (taken_over := take_over(own, source)) is not None:
            better[key] = own = taken_over


def improve_patterns(parts: Mapping[str, FinishedPart], patterns: Sequence[str], job: Job) -> dict[str, FinishedPart]:
    """Return, by key, the entries of patterns, with roles or layers moved, that are improved.

    Each takes over a shorter plan. Roles moved are never slower than in place, and layers moved
    never slower than either; nor is any slower than the same answer to the number of failures, with
    its roles taken over. All finished entries are in `parts`; `patterns` has the keys of those in
    place.
    """
    better: dict[str, FinishedPart] = {}
    for pattern in patterns:
        moved, settled, numbers = roles_key(pattern), settled_key(pattern), _keys_of_numbers(parts[pattern])
        for key, others in ((moved, (pattern, *numbers)),
                            (settled, (pattern, moved, *numbers, *map(settled_key, numbers)))):
            _improve_entry(key, others, parts, better, partial(_fit_plan, job=job))
    return better


def _keys_of_numbers(part: FinishedPart) -> list[str]:
    """Return the keys of entries by number that an entry's failures have, too."""
    failed, slow = part.entry.failed, part.basis.times.per_mille_of
    return [count_key(len(failed)), *(count_key(len(failed), worker) for worker in failed if worker in slow)]


def _fit_plan(own: FinishedPart, source: FinishedPart, job: Job) -> FinishedPart | None:
    """Return a copy of `own` with the plan of `source`, or None without a fit."""
    schedule: Schedule | None = decode_entry(source.entry, source.basis, source.programs)
    assert schedule is not None
    if schedule.failed != own.entry.failed:
        schedule = relabel_schedule(schedule, own.entry.failed, nodes=job.nodes)
        if schedule is None or check(schedule):
            return None
    if not own.reason and own.entry.bound_scope in (Scope.ROLES, Scope.LAYERS):
        schedule = _with_bound_of_entry(schedule, own)
    moved = compute_transition(schedule, job) if own.entry.key.startswith(settled_key("")) else None
    return make_part(own.basis, own.entry.key, schedule, moved)


def _source_keys(failures: int, slow: Worker | None) -> Sequence[tuple[str, tuple[str, ...]]]:
    """Return pairs of an entry's key and the keys of those it may follow."""
    at_once, more = (count_key(count, slow) for count in (failures, failures + 1))
    settled = settled_key(at_once)
    return (at_once, (more,)), (settled, (at_once, settled_key(more)))


def _period_seconds(part: FinishedPart) -> float:
    return part.entry.period_ticks * part.entry.tick_seconds(part.basis)


def _take_over_plan(own: FinishedPart, source: FinishedPart) -> FinishedPart | None:
    """Return a copy of the finished entry `own` with the plan of the entry `source`.

    There is none if the entry has no plan of its own. If `source` is for one failure more, one of
    its failed workers is alive again in the copy; return None if none of them can be
    (`with_standby_worker`). A bound for any layers is that of `own`. Other bounds hold only for the
    roles that are vacant in a plan: it keeps its own, or another is proven.
    """
    if own.reason:
        return None
    schedule = decode_entry(source.entry, source.basis, source.programs)
    if schedule.moves:  # as certain workers have failed
        return None
    if own.failures < source.failures:
        standing_by = with_standby_worker(schedule)
        if standing_by is None:
            return None
        schedule = standing_by
    moved = source.moved or (own.moved and Transition(layers=0, bytes=0.0, seconds=0.0))
    if own.entry.bound_scope is Scope.LAYERS:
        schedule = _with_bound_of_entry(schedule, own)
    elif own.failures < source.failures:
        scope = narrowest_scope(schedule)
        proven = proven_bound(schedule.with_bound(0, scope)).ticks
        schedule = schedule.with_bound(min(schedule.period_ticks, proven), scope)
    return make_part(own.basis, own.entry.key, schedule, moved)


def _with_bound_of_entry(schedule: Schedule, part: FinishedPart) -> Schedule:
    """Return a copy of the schedule with an entry's bound, rounded down in other ticks."""
    tick = part.entry.tick_seconds(part.basis) / schedule.tick_seconds
    lower = part.entry.lower_bound_ticks
    if tick != 1:
        lower = math.floor(lower * tick * (1 - 1e-12))
    return schedule.with_bound(min(schedule.period_ticks, lower), part.entry.bound_scope)


def with_standby_worker(schedule: Schedule) -> Schedule | None:
    """Return a copy of the schedule in which a failed worker only reduces and steps.

    It is the last failed worker for which the result passes `schedules.check`; None if there is
    none. It holds the layers of its own column, and needs a live worker that holds the same.
    """
    for role in reversed(schedule.failed):
        peer = next((seat for seat in schedule.seats if seat.role.column == role.column and seat.holds is None), None)
        if peer is None:
            continue
        closing: Program = tuple(op for op in schedule.programs[peer.program] if op.microbatch is None)
        seats = sorted((*schedule.seats, Seat(role, role, len(schedule.programs))), key=lambda seat: seat.worker)
        result = msgspec.structs.replace(schedule, failed=tuple(worker for worker in schedule.failed if worker != role),
                                         seats=tuple(seats), programs=(*schedule.programs, closing))
        if not check(result):
            return result
    return None
