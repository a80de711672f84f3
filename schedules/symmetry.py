"""Find pipelines, and groups of them, that behave identically, to do each once."""

from collections import defaultdict
from collections.abc import Mapping

from slipstream.schedules.graph import pipeline_groups
from slipstream.schedules.memory import activation_room
from slipstream.schedules.schedule import LayerRange, Program, Schedule, with_pipeline_numbers

Player = tuple[int | None, int | None, tuple[LayerRange, ...] | None]
"""Properties of a role's worker: (per mille or None, activation memory, listed layers)."""
RoleProgram = tuple[int, int, Player]
"""Role of a pipeline and what it runs: (column, program number, properties of its worker)."""
Behaviour = tuple[int, tuple[RoleProgram, ...]]


def find_equal_pipelines(schedule: Schedule) -> list[tuple[int, ...]]:
    """Return all pipelines, divided into sets of pipelines that behave identically; each set is
    ascending.

    Pipelines are in one set if `find_equal_groups` finds them equal and they share no micro-batch
    with others. A pipeline that shares micro-batches is a set of its own.
    """
    sets: list[tuple[int, ...]] = []
    for equal in find_equal_groups(schedule):
        if len(equal[0]) == 1:
            sets.append(tuple(pipeline for (pipeline,) in equal))
        else:
            sets += [(pipeline,) for group in equal for pipeline in group]
    return sorted(sets)


def find_equal_groups(schedule: Schedule) -> list[list[tuple[int, ...]]]:
    """Divide the groups of pipelines that share micro-batches into sets of equal ones.

    Two groups are equal if their pipelines, each in ascending order, have as many micro-batches and
    run the same programs at the same speed and with the same memory for activations. Re-routed
    micro-batches are compared by the position of their pipeline within the group. Groups that are
    equal only in another order of pipelines are missed, which only costs time.
    """
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
    """Return the roles that live workers play in each pipeline, by the pipeline's number."""
    slow = schedule.times.per_mille_of
    roles: dict[int, list[RoleProgram]] = defaultdict(list)
    for seat in schedule.seats:
        player = slow.get(seat.worker), activation_room(schedule, seat), seat.holds
        roles[seat.role.pipeline].append((seat.role.column, seat.program, player))
    return roles


def _canonical_number(
    program: Program, number: int, number_of: Mapping[int, int], first_numbers: dict[Program, int]
) -> int:
    """Return the number of the first program that equals this one within its group."""
    if len(number_of) == 1 or all(op.pipeline is None for op in program):
        return number
    return first_numbers.setdefault(with_pipeline_numbers(program, number_of), number)
