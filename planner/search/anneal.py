"""Simulated annealing of the pieces of a candidate that are critical."""

from typing import TYPE_CHECKING

import msgspec

from slipstream.planner.budget import Budget
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.params import DEFAULTS, AnnealingParams
from slipstream.planner.search.incumbent import AnnealingEffort, Incumbent

if TYPE_CHECKING:
    from slipstream.planner.search.annealing.pieces import Annealed


def anneal(known: Incumbent, budget: Budget, params: AnnealingParams = DEFAULTS.annealing,
           cycles: int | None = None) -> Incumbent:
    """Better solutions, after so many cooling cycles of every critical piece; None: for all of the time."""
    begin = params.begin_seconds * known.operations
    if budget.end(known.period, known.bound.ticks, begin):
        return known
    from slipstream.planner.search.annealing.pieces import anneal_pieces  # numba takes a third of a second to load

    problems, best = [piece.problem for piece in known.pieces], known

    def tell(done: "Annealed") -> None:
        nonlocal best
        periods = list(map(solution_period, problems, done.solutions))
        made = known.with_solutions(done.solutions, periods, done.deadlines)
        if made.period < best.period:
            best = made
            period, least = (ticks * known.problem.tick_seconds for ticks in (made.period, known.bound.ticks))
            budget.progress.found("annealing", period, least)

    done = anneal_pieces(problems, known.solutions, known.bound.ticks, budget, params, cycles, tell)
    tell(done)
    effort = AnnealingEffort(done.steps, done.stale, done.cycles) if done.steps else known.annealing
    return msgspec.structs.replace(best, annealing=effort)
