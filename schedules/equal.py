"""Pipelines, and groups of them, that behave the same at every instant: checked once, shown once."""

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from schedules.graph import groups
from schedules.schedule import LayerRange, Program, Schedule

Holding = tuple[int, tuple[LayerRange, ...]]
"""(own column of the worker, which says how much room it has; layers held)."""
RoleProgram = tuple[int, int, int | None, Holding | None]
"""(column, program, speed, holding where it is not that of the column) of a role."""
Behaviour = tuple[int, tuple[RoleProgram, ...]]


def equal_pipelines(schedule: Schedule) -> list[tuple[int, ...]]:
    """Every pipeline once, in sets that behave the same, each ascending.

    Equal are pipelines of as many micro-batches whose roles run the same programs at the same speed, and that share no
    micro-batch with others. Pipelines that do share some are each a set of their own.
    """
    roles = _roles(schedule)
    sets: dict[Behaviour, list[int]] = defaultdict(list)
    alone: list[tuple[int, ...]] = []
    for group in groups(schedule):
        if len(group) == 1:
            behaviour = (schedule.grid.microbatches[group[0]], tuple(sorted(roles[group[0]], key=lambda role: role[0])))
            sets[behaviour].append(group[0])
        else:
            alone += [(pipeline,) for pipeline in group]
    return sorted([*map(tuple, sets.values()), *alone])


def equal_groups(schedule: Schedule) -> list[tuple[int, ...]]:
    """One of each set of groups of pipelines that behave the same; groups are those that share micro-batches.

    Two groups are found equal when their pipelines, each in ascending order, run the same programs at the same speed,
    re-routed micro-batches being named by their pipeline's number within the group. Groups that are equal in another
    order only are told apart, which costs time but does no harm.
    """
    roles = _roles(schedule)
    known: dict[Program, int] = {}
    found: dict[tuple[Behaviour, ...], tuple[int, ...]] = {}
    for group in groups(schedule):
        number_of = {pipeline: index for index, pipeline in enumerate(group)}
        key = []
        for pipeline in group:
            named = []
            for column, program, speed, holding in sorted(roles[pipeline], key=lambda role: role[0]):
                stored = _numbered(schedule.programs[program], program, number_of, known)
                named.append((column, stored, speed, holding))
            key.append((schedule.grid.microbatches[pipeline], tuple(named)))
        found.setdefault(tuple(key), group)
    return list(found.values())


def _roles(schedule: Schedule) -> Mapping[int, list[RoleProgram]]:
    """The roles of each pipeline."""
    slow = schedule.times.per_mille_of
    roles: dict[int, list[RoleProgram]] = defaultdict(list)
    for seat in schedule.seats:
        holding = None if seat.holds is None else (seat.worker.column, seat.holds)
        roles[seat.role.pipeline].append((seat.role.column, seat.program, slow.get(seat.worker), holding))
    return roles


def _numbered(program: Program, number: int, number_of: Mapping[int, int], known: dict[Program, int]) -> int:
    """The number of a program; that of the first one alike where it runs micro-batches of other pipelines."""
    if len(number_of) == 1 or all(op.pipeline is None for op in program):
        return number
    renamed = tuple(op if op.pipeline is None else msgspec.structs.replace(op, pipeline=number_of[op.pipeline])
                    for op in program)
    return known.setdefault(renamed, number)
