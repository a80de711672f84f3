"""From a problem to the best solution found in the time given."""

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from planner.budget import Budget, Clock
from planner.model.bounds import lower_bound
from planner.model.decompose import Piece, decompose, undivided
from planner.model.problem import Problem
from planner.model.solution import Solution
from planner.search.baselines import BASELINES
from planner.search.compiled import ready
from planner.search.evidence import evidence
from planner.search.incumbent import Incumbent
from planner.search.steps.anneal import anneal
from planner.search.steps.bound import bound
from planner.search.steps.find import finding, take_found
from planner.search.steps.list_schedules import list_schedules
from planner.search.steps.prove import provable, prove

Method = Literal["cp-sat", "greedy", "1f1b", "recycle"]
METHODS: tuple[Method, ...] = get_args(Method)
LIST_SHARE, FIND_SHARE = 0.3, 0.6
"""Shares of the time that list schedulers may take, when more follows; that CP-SAT has of the rest to find a plan."""
HINT_CYCLES = 3
"""Cooling cycles that make a good hint for CP-SAT."""
LARGEST_BASELINE = 200_000
"""Compute ops up to which a baseline assigns the micro-batches of the dead among all pipelines, not in groups."""
FINISH_SECONDS, FINISH_SHARE = 15e-6, 0.4
"""What is set aside to put a plan together and check it: seconds for each op, at most this share of the time."""


class Solved(msgspec.Struct, frozen=True):
    """The solved pieces of a problem, with the bound proven on the way."""

    pieces: Sequence[tuple[Piece, Solution]]
    lower_bound_ticks: int
    deadlines: Sequence[int] | None = None
    """Where all pieces are on one clock: when their compute ops must be done, by column."""
    evidence: str = ""
    """What the bound counts, how hard a better plan was looked for, and so which of them leaves a gap."""


def solve(problem: Problem, method: Method, budget: Budget) -> Solved:
    """The best that the method finds within the budget."""
    ready(budget.progress.line)
    if method in BASELINES:
        return _baseline(problem, method)
    began = budget.clock.now()
    known = bound(problem, shedding=method != "greedy")
    budget = in_time(known, budget)
    if method == "greedy":
        known = list_schedules(known, budget)
    else:
        known = list_schedules(known, budget.share(LIST_SHARE))
        known = improve(known, budget)
    return solved_by(known, budget.clock, began)


def solved_by(known: Incumbent, clock: Clock, began: float) -> Solved:
    """The solved pieces of an incumbent, whose search began at that time of the clock."""
    return Solved(list(zip(known.pieces, known.solutions, strict=True)), known.bound, known.deadlines,
                  evidence(known, clock, clock.now() - began))


def improve(known: Incumbent, budget: Budget) -> Incumbent:
    """Annealing, beside it CP-SAT from scratch, then CP-SAT from the best so far, then annealing for the rest.

    Where CP-SAT has nothing to do, the first annealing takes all of the time.
    """
    small = bool(provable(known))
    with finding(known, budget.share(FIND_SHARE)) as finder:
        within = budget.until(finder.budget.deadline) if finder else budget
        known = anneal(known, within, HINT_CYCLES if small else None)
        if finder:
            known = take_found(known, finder, budget)
    if small or finder:
        known = prove(known, budget)
        known = anneal(known, budget)
    return known


def in_time(known: Incumbent, budget: Budget) -> Budget:
    """The budget less the time it takes to put the plan together and check it."""
    return budget.until(budget.deadline - min(FINISH_SHARE * budget.seconds, FINISH_SECONDS * known.operations))


def _baseline(problem: Problem, method: Method) -> Solved:
    divide = not problem.failed or problem.operations > LARGEST_BASELINE
    pieces = decompose(problem) if divide else (undivided(problem),)
    return Solved([(piece, BASELINES[method](piece.problem)) for piece in pieces], lower_bound(problem))
