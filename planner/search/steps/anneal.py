"""Step 4: simulated annealing of the pieces that are critical."""

from typing import TYPE_CHECKING

import msgspec

from planner.budget import Budget
from planner.model.start_times import solution_period
from planner.search.incumbent import AnnealingEffort, Incumbent

if TYPE_CHECKING:
    from planner.search.annealing.pieces import Annealed

BEGIN_SECONDS = 12e-6
"""What it takes to begin, to do one round and to time what comes of it: seconds for each op."""


def anneal(known: Incumbent, budget: Budget, cycles: int | None = None) -> Incumbent:
    """Better solutions, after so many cooling cycles of every critical piece; None: for all of the time."""
    begin = BEGIN_SECONDS * known.operations
    if not known.open or budget.stopped or budget.seconds <= begin:
        return known
    from planner.search.annealing.pieces import anneal_pieces  # numba takes a third of a second to load

    problems, best = [piece.problem for piece in known.pieces], known

    def tell(done: "Annealed") -> None:
        nonlocal best
        periods = list(map(solution_period, problems, done.solutions))
        made = known.with_solutions(done.solutions, periods, done.deadlines)
        if made.period < best.period:
            best = made
            period, least = (ticks * known.problem.tick_seconds for ticks in (made.period, known.bound))
            budget.progress.found("annealing", period, least)

    done = anneal_pieces(problems, known.solutions, known.bound, budget, cycles, tell)
    tell(done)
    effort = AnnealingEffort(done.steps, done.stale, done.cycles) if done.steps else known.annealing
    return msgspec.structs.replace(best, annealing=effort)
