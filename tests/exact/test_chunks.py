"""Bounds of workers with several stages and scarce memory, judged by the exact reference."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import count, islice

import pytest

from slipstream.planner import NoPlanError, parse_job
from slipstream.planner.model.bounds_chunks import chunk_bounds
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Problem
from slipstream.schedules.schedule import Worker
from tests.exact.claims import ROUNDING, ask
from tests.exact.generate import Case, draw_case

SCOPES = ("own micro-batches", "whole stages")
EFFORT = 0.2
"""Deterministic time of the solver for one job."""


def draw_cases(scope: str, first: int) -> Iterator[tuple[Case, Problem]]:
    """Draw jobs whose workers hold two stages in little memory, with their problems."""
    for seed in count(first):
        case = draw_case(seed, scope)
        has_chunks = case.job.get("placement", {}).get("chunks", 1) > 1
        if not has_chunks or "memory" not in case.job or "network" in case.job:
            continue
        failed = [Worker(*worker) for worker in case.failed]
        try:
            problem = build_problem(
                parse_job(case.text),
                failed,
                backward=case.backward,
                optimizer=case.optimizer,
                sharing=scope != SCOPES[0],
                down=True,
            )
        except NoPlanError:
            continue
        yield case, problem


def require_true_bounds(scope: str, first: int, jobs: int) -> None:
    """Compare the bounds of some jobs with schedules of the reference.

    At least one bound must be met.
    """
    met = 0
    for case, problem in islice(draw_cases(scope, first), jobs):
        found = ask(case, scope, None, EFFORT)
        bounds = list(chunk_bounds(problem))
        if found.upper is None or not bounds:
            continue
        ticks, counts = max(bounds)
        seconds = ticks * Fraction(repr(problem.tick_seconds))
        assert seconds <= found.upper * (1 + ROUNDING), f"{counts}\n{case.command}\n{case.text}"
        met += seconds * (1 + ROUNDING) >= found.upper
    assert met


@pytest.mark.parametrize("scope", SCOPES)
def test_bounds_of_chunks_are_true(scope):
    require_true_bounds(scope, first=0, jobs=12)


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES)
def test_bounds_of_many_chunks_are_true(scope):
    require_true_bounds(scope, first=100_000, jobs=200)
