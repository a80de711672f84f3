"""Step 1: divide the problem into pieces, and prove a lower bound on the period."""

import msgspec

from planner.model.bounds import strongest_bound
from planner.model.decompose import decompose
from planner.model.problem import Problem
from planner.search.incumbent import Incumbent


def bound(problem: Problem, *, shedding: bool = True) -> Incumbent:
    """The pieces and the bound, no solutions yet."""
    return divided(problem, *strongest_bound(problem), shedding=shedding)


def divided(problem: Problem, ticks: int, counts: str, *, shedding: bool = True) -> Incumbent:
    """The pieces, with a bound that is known; `counts`: what it counts, in words.

    Where live workers have equal time, each keeps its own micro-batches, or with `shedding` at least those of whole
    stages: a choice of hosts for all of them widens the search more than it gains (measured: with it, plans of
    benchmarks.quality with capacity S were up to 4 % longer).
    """
    searched = problem if problem.sheds or problem.holdings is not None else \
        msgspec.structs.replace(problem, sharing=False, shedding=shedding and problem.sharing)
    return Incumbent(problem=problem, pieces=decompose(searched), bound=ticks, bound_counts=counts)
