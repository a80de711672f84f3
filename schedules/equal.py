"""Pipelines, and groups of them, that behave the same at every instant: checked once, shown once."""

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from slipstream.schedules.graph import groups
from slipstream.schedules.memory import room
from slipstream.schedules.schedule import LayerRange, Program, Schedule

Player = tuple[int | None, int | None, tuple[LayerRange, ...] | None]
"""(speed, room for activations, layers held where they are not those of the column) of the worker of a role."""
RoleProgram = tuple[int, int, Player]
"""(column, program, player) of a role."""
Behaviour = tuple[int, tuple[RoleProgram, ...]]


def equal_pipelines(schedule: Schedule) -> list[tuple[int, ...]]:
    """Every pipeline once, in sets that behave the same, each ascending.

    Equal are pipelines of as many micro-batches whose roles run the same programs, at the same speed and in the same
    room, and that share no micro-batch with others. Pipelines that do share some are each a set of their own.
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

    Two groups are found equal when their pipelines, each in ascending order, run the same programs at the same speed
    and in the same room, re-routed micro-batches being named by their pipeline's number within the group. Groups that
    are equal in another order only are told apart, which costs time but does no harm.
    """
    roles = _roles(schedule)
    known: dict[Program, int] = {}
    found: dict[tuple[Behaviour, ...], tuple[int, ...]] = {}
    for group in groups(schedule):
        number_of = {pipeline: index for index, pipeline in enumerate(group)}
        key = []
        for pipeline in group:
            named = []
            for column, program, player in sorted(roles[pipeline], key=lambda role: role[0]):
                named.append((column, _numbered(schedule.programs[program], program, number_of, known), player))
            key.append((schedule.grid.microbatches[pipeline], tuple(named)))
        found.setdefault(tuple(key), group)
    return list(found.values())


def _roles(schedule: Schedule) -> Mapping[int, list[RoleProgram]]:
    """The roles of each pipeline."""
    slow = schedule.times.per_mille_of
    roles: dict[int, list[RoleProgram]] = defaultdict(list)
    for seat in schedule.seats:
        player = slow.get(seat.worker), room(schedule, seat), seat.holds
        roles[seat.role.pipeline].append((seat.role.column, seat.program, player))
    return roles


def _numbered(program: Program, number: int, number_of: Mapping[int, int], known: dict[Program, int]) -> int:
    """The number of a program; that of the first one alike where it runs micro-batches of other pipelines."""
    if len(number_of) == 1 or all(op.pipeline is None for op in program):
        return number
    renamed = tuple(op if op.pipeline is None else msgspec.structs.replace(op, pipeline=number_of[op.pipeline])
                    for op in program)
    return known.setdefault(renamed, number)
