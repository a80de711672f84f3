"""Step 4: simulated annealing of the pieces that are critical."""

import msgspec

from planner.model.start_times import solution_period
from planner.search.budget import Budget
from planner.search.incumbent import AnnealingEffort, Incumbent


def anneal(known: Incumbent, budget: Budget, cycles: int | None = None) -> Incumbent:
    """Better solutions, after so many cooling cycles of every critical piece; None: for all of the time."""
    if not known.open or budget.stopped or budget.seconds <= 0:
        return known
    from planner.search.annealing.pieces import anneal_pieces  # numba takes a third of a second to load

    problems = [piece.problem for piece in known.pieces]
    done = anneal_pieces(problems, known.solutions, known.bound, budget, cycles)
    effort = AnnealingEffort(done.steps, done.stale, done.cycles) if done.steps else known.annealing
    return msgspec.structs.replace(known, solutions=tuple(done.solutions), deadlines=done.deadlines,
                                   periods=tuple(map(solution_period, problems, done.solutions)), annealing=effort)
