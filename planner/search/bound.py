"""A candidate without solutions: its problem divided into pieces, and a bound on the period."""

import msgspec

from slipstream.planner.bound import Bound
from slipstream.planner.model.decompose import decompose
from slipstream.planner.model.problem import Problem
from slipstream.planner.search.incumbent import Incumbent

FEW = 2
"""Micro-batches for each stage below which one more of them on a worker delays all of its pipeline's others."""


def divided(problem: Problem, bound: Bound, *, shedding: bool = True, moved: int = 0) -> Incumbent:
    """The pieces, with a bound that is known. `moved`: see `Incumbent`.

    Where live workers have equal time, each keeps its own micro-batches: a choice of hosts for all of them widens the
    search more than it gains (measured: with it, plans of benchmarks.quality with capacity S were up to 4 % longer).
    With `shedding` and few micro-batches, live workers of stages that have lost one may hand on theirs.
    """
    few = max(problem.grid.microbatches) < FEW * problem.grid.depth
    searched = problem if problem.unequal_time or problem.routes is not None else \
        msgspec.structs.replace(problem, sharing=False, shedding=shedding and few and problem.sharing)
    return Incumbent(problem=problem, pieces=decompose(searched), bound=bound, moved=moved)
