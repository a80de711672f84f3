"""From a problem to the best solution found in the time given: bounds, list schedulers, CP-SAT."""

import threading
import time
from typing import Literal

import msgspec

from planner.baselines import one_f_one_b
from planner.bounds import lower_bound
from planner.cpsat.model import improve
from planner.decompose import collapse
from planner.interrupt import interruptible
from planner.problem import Problem
from planner.report import Report
from planner.search import search
from planner.solution import Solution, solution_period

Method = Literal["cp-sat", "greedy", "1f1b"]
LARGEST_MODEL = 20_000
"""Compute ops, counted once per possible host, up to which CP-SAT is given the whole problem."""
SEARCH_SHARE = 0.3
"""Share of the time that list schedulers may take when CP-SAT follows."""


class Solved(msgspec.Struct, frozen=True):
    """A solution with the bound proven on the way."""

    solution: Solution
    lower_bound_ticks: int
    interrupted: bool = False


def solve(problem: Problem, method: Method, deadline: float, seed: int, report: Report,
          stop: threading.Event | None = None) -> Solved:
    """The best solution that the method finds until the deadline (a time.monotonic()), or until `stop` is set.

    Without `stop`, Ctrl-C ends the search.
    """
    if stop is None:
        with interruptible() as event:
            return solve(problem, method, deadline, seed, report, event)
    collapsed = collapse(problem)
    if collapsed is not None:
        solved = solve(collapsed.problem, method, deadline, seed, report, stop)
        return Solved(collapsed.expand(solved.solution), solved.lower_bound_ticks, solved.interrupted)
    bound = lower_bound(problem)
    if method == "1f1b":
        return Solved(one_f_one_b(problem), bound)
    began = time.monotonic()
    share = SEARCH_SHARE if method == "cp-sat" else 1.0
    best = search(problem, bound, began + share * (deadline - began), seed, report, stop)
    if method == "cp-sat" and not stop.is_set():
        return _improved(problem, best, bound, deadline, seed, report, stop)
    return Solved(best, bound, stop.is_set())


def _improved(problem: Problem, best: Solution, bound: int, deadline: float, seed: int, report: Report,
              stop: threading.Event) -> Solved:
    """Let CP-SAT work on the plan, unless it is optimal already or the model would be too large."""
    options = sum(len(problem.hosts(unit.stage, unit.pipeline)) for unit in problem.units()) * len(problem.kinds)
    period = solution_period(problem, best)
    if period <= bound or options > LARGEST_MODEL:
        return Solved(best, bound)

    def tell(ticks: int) -> None:
        if ticks < period:  # the hint itself is no news
            report(f"CP-SAT: period {ticks * problem.tick_seconds:g} s")

    result = improve(problem, best, lower_bound=bound, deadline=deadline, seed=seed, report=tell, stop=stop)
    return Solved(result.solution, result.lower_bound_ticks, stop.is_set())
