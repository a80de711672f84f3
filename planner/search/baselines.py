"""What others run: orders to compare with, made by the same list scheduler under their rules."""

from collections.abc import Callable, Mapping

from planner.model.arrays import Dense
from planner.model.problem import Problem
from planner.model.solution import Solution
from planner.search.assignment import deal
from planner.search.list_scheduler import Policy, in_flight, list_order


def one_f_one_b(problem: Problem) -> Solution:
    """1F1B (PipeDream-flush, Narayanan et al. 2021), orphans dealt round-robin to peers when workers are down.

    Stage v of V holds at most V - v micro-batches between F and B; a backward is never postponed or torn apart.
    """
    return _list(problem, Policy(forward_order="oldest", eager_weights=True, in_flight=in_flight(problem)))


def recycle(problem: Problem) -> Solution:
    """ReCycle's policy (SOSP 2024): round-robin dealing, every worker's own micro-batches in 1F1B order.

    Re-routed micro-batches and weight gradients go into what bubbles that order leaves. A helper may have as many more
    micro-batches in flight as it runs more of them.
    """
    return _list(problem, Policy(forward_order="oldest", guests="last", in_flight=in_flight(problem)))


BASELINES: Mapping[str, Callable[[Problem], Solution]] = {"1f1b": one_f_one_b, "recycle": recycle}


def _list(problem: Problem, policy: Policy) -> Solution:
    dense = Dense(problem, deal(problem, "round-robin"))
    order = list_order(dense, policy)
    return dense.solution(order, dense.timed(order)[1])
