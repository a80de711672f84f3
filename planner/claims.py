"""The lower bound that a schedule's file states, proven again from the file alone."""

import math

from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.model.holdings import held_problem, in_place
from slipstream.planner.report import shared_ticks
from slipstream.schedules.schedule import Schedule


def proven_bound(schedule: Schedule) -> int:
    """Ticks below which no period can be, with these workers down, in roles as they are.

    Of whole stages, unless the schedule cuts some. Where workers hold other layers than those of their role, all
    holdings are allowed: only work bounds the period, and the optimizer step of a layer. That of the planner counts
    the all-reduce of a layer, too, and that whole layers are run, whose times no file tells. CP-SAT proves more of
    small problems than this.
    """
    if any(seat.holds is not None for seat in schedule.seats):
        return min(schedule.times.optimizer_of_layer, default=0) + math.ceil(shared_ticks(schedule))
    grid = schedule.grid
    failed = frozenset(set(grid.workers()) - {seat.role for seat in schedule.seats})
    return lower_bound(held_problem(
        name=schedule.job, tick_seconds=schedule.tick_seconds, grid=grid, times=schedule.times, memory=schedule.memory,
        holds=in_place(grid, tuple(failed)), backward=schedule.backward, optimizer=schedule.optimizer,
        sharing=bool(failed or schedule.times.slow or len(set(grid.microbatches)) > 1),
        # Whether layers of a stage are equal is not in the file: only their work counts where stages are cut.
        parts=(0,) * len(grid.stages) if schedule.slices else ()))
