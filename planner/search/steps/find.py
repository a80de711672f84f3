"""Step 3: CP-SAT looks for a plan of its own, beside the annealing."""

from collections.abc import Iterator
from contextlib import contextmanager

from planner.model.start_times import solution_period
from planner.search.budget import Budget
from planner.search.cpsat.finder import Finder
from planner.search.incumbent import Incumbent

LARGEST_FIND, MOST_MICROBATCHES = 4000, 12
"""Compute ops, and micro-batches of a pipeline, up to which CP-SAT finds plans that annealing does not."""


@contextmanager
def finding(known: Incumbent, budget: Budget) -> Iterator[Finder | None]:
    """CP-SAT at work on the longest piece, if it is small enough; ended with the context."""
    index = known.longest
    problem, counts = known.pieces[index].problem, known.pieces[index].problem.grid.microbatches
    small = problem.routes is None and problem.operations <= LARGEST_FIND and max(counts) <= MOST_MICROBATCHES
    if not known.open or budget.stopped or not problem.failed or not small:
        yield None
        return
    with Finder(problem, known.periods[index] - 1, lower_bound=known.target(index), deadline=budget.deadline,
                seed=budget.seed) as finder:
        yield finder


def take_found(known: Incumbent, finder: Finder, budget: Budget) -> Incumbent:
    """Wait for the finder's plan where one is still wanted, and take it where it is better."""
    found = finder.result(budget.stop, wanted=known.open and not budget.stopped)
    index = next(index for index, piece in enumerate(known.pieces) if piece.problem is finder.problem)
    if found is None or (period := solution_period(finder.problem, found)) >= known.periods[index]:
        return known
    known = known.with_piece(index, found, period)
    tick = known.problem.tick_seconds
    budget.progress.found("CP-SAT", known.period * tick, known.bound * tick)
    return known
