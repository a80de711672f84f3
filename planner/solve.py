"""From a problem to the best solution found in the time given: bounds, list schedulers, CP-SAT."""

import threading
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from planner.baselines import one_f_one_b
from planner.bounds import lower_bound
from planner.cpsat.model import improve
from planner.decompose import Piece, decompose
from planner.dense import solution_period
from planner.interrupt import interruptible
from planner.problem import Problem
from planner.report import Report
from planner.search import search
from planner.solution import Solution

Method = Literal["cp-sat", "greedy", "1f1b"]
LARGEST_MODEL = 20_000
"""Compute ops, counted once per possible host, up to which CP-SAT is given the whole problem."""
SEARCH_SHARE = 0.3
"""Share of the time that list schedulers may take when CP-SAT follows."""


class Solved(msgspec.Struct, frozen=True):
    """The solved pieces of a problem, with the bound proven on the way."""

    pieces: Sequence[tuple[Piece, Solution]]
    lower_bound_ticks: int
    interrupted: bool = False


def solve(problem: Problem, method: Method, deadline: float, seed: int, report: Report,
          stop: threading.Event | None = None) -> Solved:
    """The best that the method finds until the deadline (a time.monotonic()), or until `stop` is set.

    Without `stop`, Ctrl-C ends the search.
    """
    if stop is None:
        with interruptible() as event:
            return solve(problem, method, deadline, seed, report, event)
    pieces = decompose(problem)
    solved: list[tuple[Piece, Solution]] = []
    proven = target = lower_bound(problem)
    for index, piece in enumerate(pieces):
        share = _work(piece) / sum(map(_work, pieces[index:]))
        until = time.monotonic() + share * (deadline - time.monotonic())
        solution, bound = _solve_piece(piece.problem, method, target, until, seed, report, stop)
        solved.append((piece, solution))
        if target == proven and (len(pieces) == 1 or not piece.problem.failed):
            # Without the ops of others, its workers in any plan of the whole run a plan of this piece.
            proven = bound
        # What one piece cannot avoid, the others need not beat.
        target = max(proven, target, solution_period(piece.problem, solution))
    return Solved(solved, proven, stop.is_set())


def _work(piece: Piece) -> int:
    """Roughly what a piece takes to solve."""
    return piece.problem.operations


def _solve_piece(problem: Problem, method: Method, target: int, deadline: float, seed: int, report: Report,
                 stop: threading.Event) -> tuple[Solution, int]:
    """A solution, no better than the target, and a lower bound proven on the way (or the target)."""
    if method == "1f1b":
        return one_f_one_b(problem), target
    began = time.monotonic()
    share = SEARCH_SHARE if method == "cp-sat" else 1.0
    best = search(problem, target, began + share * (deadline - began), seed, report, stop)
    if method == "cp-sat" and not stop.is_set():
        return _improved(problem, best, target, deadline, seed, report, stop)
    return best, target


def _improved(problem: Problem, best: Solution, target: int, deadline: float, seed: int, report: Report,
              stop: threading.Event) -> tuple[Solution, int]:
    """Let CP-SAT work on the plan, unless it is good enough already or the model would be too large."""
    options = sum(len(problem.hosts(unit.stage, unit.pipeline)) for unit in problem.units()) * len(problem.kinds)
    period = solution_period(problem, best)
    if period <= target or options > LARGEST_MODEL:
        return best, target

    def tell(ticks: int) -> None:
        if ticks < period:  # the hint itself is no news
            report(f"CP-SAT: period {ticks * problem.tick_seconds:g} s")

    result = improve(problem, best, lower_bound=target, deadline=deadline, seed=seed, report=tell, stop=stop)
    return result.solution, result.lower_bound_ticks
