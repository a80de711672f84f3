"""Bounds of whole micro-batches that do not divide over workers, judged by the exact reference."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import count, islice

from slipstream.planner import NoPlanError, parse_job
from slipstream.planner.model.assumptions import runs_whole_units
from slipstream.planner.model.bounds import column_work
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Problem
from slipstream.schedules.schedule import Worker
from tests.exact.claims import ROUNDING, ask
from tests.exact.generate import Case, draw_case

SCOPE = "whole stages"
EFFORT = 0.2
"""Deterministic time of the solver for one job."""


def draw_bounds(first: int) -> Iterator[tuple[Case, Problem, Fraction]]:
    """Draw jobs whose work is rounded up, with their problems and bounds in ticks."""
    for seed in count(first):
        case = draw_case(seed, SCOPE)
        if "network" in case.job:
            continue
        failed = [Worker(*worker) for worker in case.failed]
        try:
            problem = build_problem(
                parse_job(case.text),
                failed,
                backward=case.backward,
                optimizer=case.optimizer,
                sharing=True,
                down=True,
            )
        except NoPlanError:
            continue
        if not runs_whole_units(problem):
            continue
        for root in sorted(set(problem.reduction_root)):
            columns = [column for column, tied in enumerate(problem.reduction_root) if tied == root]
            ticks = column_work(problem, columns)
            if any(map(problem.grid.stages_of_column, columns)) and ticks > _divided(
                problem, columns
            ):
                yield case, problem, ticks


def _divided(problem: Problem, columns: list[int]) -> Fraction:
    """Return the mean work of the workers of some columns, A and O included.

    This is lemma 1 alone.
    """
    work = sum(
        problem.usual_ticks(kind, stage)
        for microbatches in problem.grid.microbatches
        for microbatch in range(microbatches)
        for stage in problem.grid.stages_of_microbatch(microbatch)
        if problem.column_of[stage] in columns
        for kind in problem.op_kinds
    )
    workers = sum(len(problem.live_pipelines_by_column[column]) for column in columns)
    return Fraction(work, workers) + min(map(problem.column_closing_ticks, columns))


def require_true_bounds(first: int, jobs: int) -> None:
    """Compare the bounds of some jobs with schedules of the reference.

    At least one bound must be met.
    """
    met = 0
    for case, problem, ticks in islice(draw_bounds(first), jobs):
        found = ask(case, SCOPE, None, EFFORT)
        if found.upper is None:
            continue
        seconds = ticks * Fraction(repr(problem.tick_seconds))
        assert seconds <= found.upper * (1 + ROUNDING), f"{case.command}\n{case.text}"
        met += seconds * (1 + ROUNDING) >= found.upper
    assert met


def test_bounds_of_whole_microbatches_are_true():
    require_true_bounds(first=0, jobs=12)
