"""Step 2: a solution of every piece by the list schedulers."""

from planner.model.solution import Solution
from planner.search.budget import Budget
from planner.search.incumbent import Incumbent
from planner.search.list_search import search


def list_schedules(known: Incumbent, budget: Budget) -> Incumbent:
    """The best of many list schedules of each piece. No piece need be shorter than the longest one.

    Where the period of a piece is not that of the whole, only the latter is reported, in the end.
    """
    order = sorted(range(len(known.pieces)), key=lambda index: known.pieces[index].problem.operations)
    found: dict[int, tuple[Solution, int]] = {}
    longest = 0

    def report(period: int) -> None:
        ticks, bound = (number * known.problem.tick_seconds for number in (period, known.bound))
        budget.progress.found("list scheduler", ticks, bound)

    for number, index in enumerate(order):
        problem = known.pieces[index].problem
        left = sum(known.pieces[other].problem.operations for other in order[number:])
        part = budget.share(problem.operations / left)
        found[index] = search(problem, max(known.bound, longest), part.deadline, budget.seed,
                              report if len(order) == 1 else lambda _: None, budget.stop)
        longest = max(longest, found[index][1])
    solutions, periods = zip(*(found[index] for index in range(len(order))), strict=True)
    known = known.with_solutions(solutions, periods)
    if len(order) > 1:
        report(known.period)
    return known
