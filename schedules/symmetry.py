"""Find pipelines, and groups of pipelines, that behave identically, to treat one for all."""

from collections import defaultdict
from collections.abc import Mapping

from slipstream.schedules.graph import pipeline_groups
from slipstream.schedules.memory import activation_room
from slipstream.schedules.schedule import LayerRange, Program, Schedule, with_pipeline_numbers

Player = tuple[int | None, int | None, tuple[LayerRange, ...] | None]
"""Properties of a role's worker: (per mille of usual time, activation memory, `Seat.holds`).

None stands for the usual time, no limit, and the layers of the role.
"""
RoleProgram = tuple[int, int, Player]
"""Role and what it runs: (column, program number, properties of its worker)."""
Behaviour = tuple[int, tuple[RoleProgram, ...]]
"""Pipeline's number of micro-batches, and its roles."""


def find_equal_pipelines(schedule: Schedule) -> list[tuple[int, ...]]:
    """Return all pipelines in ascending sets, such that those of a set behave identically.

    A pipeline that shares micro-batches with others is a set by itself.
    """
    sets: list[tuple[int, ...]] = []
    for equal in find_equal_groups(schedule):
        if len(equal[0]) == 1:
            sets.append(tuple(pipeline for (pipeline,) in equal))
        else:
            sets += [(pipeline,) for group in equal for pipeline in group]
    return sorted(sets)


def find_equal_groups(schedule: Schedule) -> list[list[tuple[int, ...]]]:
    """Return sets of equal groups; a group is pipelines that share micro-batches.

    Two groups are equal if their pipelines, in ascending order, have as many micro-batches and run
    the same programs at the same speed and with the same memory for activations. Re-routed
    micro-batches are compared by their pipeline's index in the group. Groups that are equal only in
    another order of pipelines are missed, which only costs time.
    """
    # The key of a group is all that its behaviour depends on, in the order of its pipelines.
    roles = _roles_by_pipeline(schedule)
    first_numbers: dict[Program, int] = {}
    sets: dict[tuple[Behaviour, ...], list[tuple[int, ...]]] = defaultdict(list)
    for group in pipeline_groups(schedule):
        number_of = {pipeline: index for index, pipeline in enumerate(group)}
        key = []
        for pipeline in group:
            role_programs = []
            for column, program, player in sorted(roles[pipeline], key=lambda role: role[0]):
                role_programs.append(
                    (
                        column,
                        _canonical_number(
                            schedule.programs[program], program, number_of, first_numbers
                        ),
                        player,
                    )
                )
            key.append((schedule.grid.microbatches[pipeline], tuple(role_programs)))
        sets[tuple(key)].append(group)
    return list(sets.values())


def _roles_by_pipeline(schedule: Schedule) -> Mapping[int, list[RoleProgram]]:
    """Return the roles that live workers play in each pipeline, by its number."""
    slow = schedule.times.per_mille_of
    roles: dict[int, list[RoleProgram]] = defaultdict(list)
    for seat in schedule.seats:
        player = slow.get(seat.worker), activation_room(schedule, seat), seat.holds
        roles[seat.role.pipeline].append((seat.role.column, seat.program, player))
    return roles


def _canonical_number(
    program: Program, number: int, number_of: Mapping[int, int], first_numbers: dict[Program, int]
) -> int:
    """Return the number of the first program that is equal with pipelines as in `number_of`."""
    # Only a program that names other pipelines can differ from another in numbers alone.
    if len(number_of) == 1 or all(op.pipeline is None for op in program):
        return number
    return first_numbers.setdefault(with_pipeline_numbers(program, number_of), number)
