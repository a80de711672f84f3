"""Step 2: a solution of every piece by the list schedulers."""


import msgspec

from planner.model.solution import Solution
from planner.search.budget import Budget
from planner.search.incumbent import Incumbent
from planner.search.list_search import search


def list_schedules(known: Incumbent, budget: Budget) -> Incumbent:
    """The best of many list schedules of each piece. No piece need be shorter than the longest one.

    The smallest pieces first: so better periods of the largest one are those of the whole.
    """
    tick, bound = known.problem.tick_seconds, known.bound
    order = sorted(range(len(known.pieces)), key=lambda index: known.pieces[index].problem.operations)
    found: dict[int, tuple[Solution, int]] = {}
    longest, reported = 0, 2**62

    def report(period: int) -> None:
        nonlocal reported
        if len(found) == len(order) - 1 and max(longest, period) < reported:
            reported = max(longest, period)
            budget.progress(f"list scheduler: period {reported * tick:g} s, bound {bound * tick:g} s")

    for number, index in enumerate(order):
        problem = known.pieces[index].problem
        left = sum(known.pieces[other].problem.operations for other in order[number:])
        part = budget.share(problem.operations / left)
        found[index] = search(problem, max(bound, longest), part.deadline, budget.seed, report, budget.stop)
        longest = max(longest, found[index][1])
    return msgspec.structs.replace(known, solutions=tuple(found[index][0] for index in range(len(order))),
                                   periods=tuple(found[index][1] for index in range(len(order))))
