"""Schedules in place of those of ReCycle's solver (SOSP 2024): the best of some list schedules."""

import math
from collections.abc import Iterator, Sequence

from slipstream.planner.model.arrays import ProblemArrays
from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.model.decompose import Piece, decompose
from slipstream.planner.model.problem import Problem
from slipstream.planner.model.solution import Solution
from slipstream.planner.search.assignment import assign
from slipstream.planner.search.baselines import one_f_one_b
from slipstream.planner.search.list_scheduler import DispatchRule, ListScheduler, in_flight

Pieces = Sequence[tuple[Piece, Solution]]
"""Each piece of a problem with its solution."""


def round_robin(problem: Problem) -> Pieces:
    """Of each piece; with the memory of 1F1B where backwards are fused."""
    return [(piece, _best(piece.problem)) for piece in decompose(problem)]


def _best(problem: Problem) -> Solution:
    if problem.backward == "fused":
        return one_f_one_b(problem)
    bound = lower_bound(problem)
    orders = ListScheduler(ProblemArrays(problem, assign(problem, "round-robin")))
    best, found = math.inf, None
    for rule in _rules(problem):
        if (period := orders.period(rule)) < best:
            best, found = period, orders.solution()
        if best <= bound:
            break
    assert found is not None
    return found


def _rules(problem: Problem) -> Iterator[DispatchRule]:
    """List schedules with micro-batches in flight as memory allows, as 1F1B, or twice that."""
    for ignore in (True, False) if problem.times.transfer else (True,):
        for factor in (0, 1, 2):
            yield DispatchRule(ignore_transfers=ignore, in_flight=in_flight(problem, factor) if factor else None)
