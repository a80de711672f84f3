"""Step 1: divide the problem into pieces, and prove a lower bound on the period."""

from planner.model.bounds import strongest_bound
from planner.model.decompose import decompose
from planner.model.problem import Problem
from planner.search.incumbent import Incumbent


def bound(problem: Problem) -> Incumbent:
    """The pieces and the bound, no solutions yet."""
    ticks, counts = strongest_bound(problem)
    return Incumbent(problem=problem, pieces=decompose(problem), bound=ticks, bound_counts=counts)
