"""What others run: orders to compare with, made by the same list scheduler under their rules."""

from collections.abc import Callable, Mapping

from slipstream.planner.model.arrays import ProblemArrays
from slipstream.planner.model.problem import Problem
from slipstream.planner.model.solution import Solution
from slipstream.planner.search.assignment import assign
from slipstream.planner.search.list_scheduler import DispatchRule, ListScheduler, in_flight


def one_f_one_b(problem: Problem) -> Solution:
    """1F1B (PipeDream-flush, Narayanan et al. 2021); micro-batches of workers that are down go to peers round-robin.

    Stage v of V holds at most V - v micro-batches between F and B; a backward is never postponed or torn apart.
    """
    return _list(problem, DispatchRule(forward_order="oldest", eager_weights=True, in_flight=in_flight(problem)))


def recycle(problem: Problem) -> Solution:
    """ReCycle's rule (SOSP 2024): round-robin assignment, every worker's own micro-batches in 1F1B order.

    Re-routed micro-batches and weight gradients go into what bubbles that order leaves. A peer may have as many more
    micro-batches in flight as it runs more of them.
    """
    return _list(problem, DispatchRule(forward_order="oldest", rerouted="last", in_flight=in_flight(problem)))


BASELINES: Mapping[str, Callable[[Problem], Solution]] = {"1f1b": one_f_one_b, "recycle": recycle}


def _list(problem: Problem, rule: DispatchRule) -> Solution:
    scheduler = ListScheduler(ProblemArrays(problem, assign(problem, "round-robin")))
    scheduler.period(rule)
    return scheduler.solution()
