"""Pipelines that behave the same at every instant: checked once, shown once."""

from collections import defaultdict

from schedules.graph import groups
from schedules.schedule import Schedule

Behaviour = tuple[int, tuple[tuple[int, int, int | None], ...]]


def equal_pipelines(schedule: Schedule) -> list[tuple[int, ...]]:
    """Every pipeline once, in sets that behave the same, each ascending.

    Equal are pipelines of as many micro-batches whose roles run the same programs at the same speed, and that share no
    micro-batch with others. Pipelines that do share some are each a set of their own.
    """
    slow = schedule.times.per_mille_of
    lanes: dict[int, list[tuple[int, int, int | None]]] = defaultdict(list)
    for seat in schedule.seats:
        lanes[seat.role.pipeline].append((seat.role.column, seat.program, slow.get(seat.worker)))
    sets: dict[Behaviour, list[int]] = defaultdict(list)
    alone: list[tuple[int, ...]] = []
    for group in groups(schedule):
        if len(group) == 1:
            behaviour = (schedule.grid.microbatches[group[0]], tuple(sorted(lanes[group[0]], key=lambda lane: lane[0])))
            sets[behaviour].append(group[0])
        else:
            alone += [(pipeline,) for pipeline in group]
    return sorted([*map(tuple, sets.values()), *alone])
