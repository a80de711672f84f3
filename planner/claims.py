"""The lower bound that a schedule's file states, proven again from the file alone."""

import math

from planner.model.bounds import lower_bound
from planner.model.problem import Problem
from planner.report import work_bound
from schedules.schedule import Schedule


def proven_bound(schedule: Schedule) -> int:
    """Ticks below which no period can be, with these workers down, in roles as they are.

    Where workers hold other layers than those of their role, all holdings are allowed, and only work bounds the period.
    CP-SAT proves more of small problems than this.
    """
    if any(seat.holds is not None for seat in schedule.seats):
        return math.ceil(work_bound(schedule) / schedule.tick_seconds)
    played = {seat.role for seat in schedule.seats}
    return lower_bound(Problem(
        name=schedule.job, tick_seconds=schedule.tick_seconds, grid=schedule.grid, times=schedule.times,
        memory=schedule.memory, failed=frozenset(set(schedule.grid.workers()) - played), backward=schedule.backward,
        optimizer=schedule.optimizer))
