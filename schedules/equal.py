"""Pipelines, and groups of them, that behave the same at every instant: checked once, shown once."""

from collections import defaultdict
from collections.abc import Mapping

from slipstream.schedules.graph import groups
from slipstream.schedules.memory import room
from slipstream.schedules.schedule import LayerRange, Program, Schedule, renamed

Player = tuple[int | None, int | None, tuple[LayerRange, ...] | None]
"""(speed, room for activations, layers held where they are not those of the column) of the worker of a role."""
RoleProgram = tuple[int, int, Player]
"""(column, program, player) of a role."""
Behaviour = tuple[int, tuple[RoleProgram, ...]]


def equal_pipelines(schedule: Schedule) -> list[tuple[int, ...]]:
    """Every pipeline once, in sets that behave the same, each ascending.

    Equal are pipelines that `equal_sets` finds equal, and that share no micro-batch with others. Pipelines that do
    share some are each a set of their own.
    """
    found: list[tuple[int, ...]] = []
    for equal in equal_sets(schedule):
        found += [tuple(pipeline for pipeline, in equal)] if len(equal[0]) == 1 else \
            [(pipeline,) for group in equal for pipeline in group]
    return sorted(found)


def equal_sets(schedule: Schedule) -> list[list[tuple[int, ...]]]:
    """Groups of pipelines that share micro-batches, in sets that behave the same.

    Two groups are found equal when their pipelines, each in ascending order, have as many micro-batches and run the
    same programs at the same speed and in the same room, re-routed micro-batches being named by their pipeline's number
    within the group. Groups that are equal in another order only are told apart, which costs time but does no harm.
    """
    roles = _roles(schedule)
    known: dict[Program, int] = {}
    found: dict[tuple[Behaviour, ...], list[tuple[int, ...]]] = defaultdict(list)
    for group in groups(schedule):
        number_of = {pipeline: index for index, pipeline in enumerate(group)}
        key = []
        for pipeline in group:
            named = []
            for column, program, player in sorted(roles[pipeline], key=lambda role: role[0]):
                named.append((column, _numbered(schedule.programs[program], program, number_of, known), player))
            key.append((schedule.grid.microbatches[pipeline], tuple(named)))
        found[tuple(key)].append(group)
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
    return known.setdefault(renamed(program, number_of), number)
