"""Claims of plans of tiny jobs, judged by the exact reference: period, bound, status, witness.

Tables name what is answered wrongly today. When a point is mended, its marks turn red: remove them.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import count, islice, pairwise

import pytest

from slipstream.planner import parse_job
from slipstream.planner.model.from_job import has_exact_units
from slipstream.schedules.schedule import Worker
from tests import patience
from tests.exact.cases import CRASHES, NAMED
from tests.exact.claims import ask, judge
from tests.exact.generate import SCOPES, Case, draw_case
from tests.exact.model import EFFORT

WRONG_CASES: dict[str, str] = {}
"""Named cases with a wrong claim, each with its reason."""
LONG_CASES = {
    "BIDIRECTIONAL": "4",
}
"""Named cases whose plan is longer than the shortest one, each with its reason."""
CRASHING_CASES: dict[str, str] = {}
"""Cases that end in a crash, each with its reason."""
WRONG_SEEDS: dict[tuple[str, int], str] = {}
"""Drawn jobs with a wrong claim, each with its reason."""
KEPT_SEEDS = (
    ("own micro-batches", 26),
    ("own micro-batches", 36),
    ("whole stages", 3),
    ("whole stages", 20),
    ("whole stages", 27),
    ("whole stages", 30),
    ("layers in place", 24),
    ("layers in place", 31),
    ("layers in place", 32),
    ("layers in place", 39),
    ("roles", 4),
    ("roles", 12),
    ("roles", 57),
    ("whole stages", 100_026),
    ("whole stages", 100_139),
    ("roles", 100_022),
    ("roles", 100_038),
    ("any placement", 100_015),
    ("whole stages", 300_185),
    ("any layers", 300_192),
    ("any layers", 300_692),
    ("any placement", 300_195),
    ("roles", 300_252),
    ("roles", 300_611),
    ("layers in place", 300_607),
)
"""Drawn jobs with claims that were wrong once."""
WRONG_SCOPES: dict[str, str] = {}
"""Scopes with a wrong claim about some of many drawn jobs, each with its reason."""

SEEDS = range(4)
QUICK = EFFORT / 10
"""Deterministic time of the solver for a job in the tests of every change."""
MANY_SEEDS = range(1000, 1020)


def marked(values: Iterable[object], wrong: dict[object, str]) -> list[object]:
    params: list[object] = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        marks = [pytest.mark.xfail(strict=True, reason=wrong[value])] if value in wrong else []
        params.append(pytest.param(*arguments, marks=marks))
    return params


@pytest.mark.parametrize("name", marked(sorted(NAMED), WRONG_CASES))
def test_claims_of_a_case_are_true(name):
    verdict = judge(NAMED[name])
    assert verdict.is_decided
    assert not verdict.wrong


@pytest.mark.parametrize("name", marked(sorted(NAMED), LONG_CASES))
def test_a_case_is_planned_as_short_as_possible(name):
    assert judge(NAMED[name]).distance == pytest.approx(0.0, abs=1e-6)  # ticks are rounded


@pytest.mark.parametrize(
    ("scope", "seed"),
    marked(
        sorted(
            {(scope, seed) for scope in SCOPES for seed in SEEDS}
            | {*KEPT_SEEDS}
            | WRONG_SEEDS.keys()
        ),
        WRONG_SEEDS,
    ),
)
def test_claims_of_a_drawn_job_are_true(scope, seed):
    assert not judge(draw_case(seed, scope), effort=QUICK).wrong


@pytest.mark.parametrize("name", marked(CRASHES, CRASHING_CASES))
def test_a_case_does_not_crash(name):
    script = f"""
from contextlib import suppress
from slipstream.planner import NoPlanError
from tests.exact.cases import CRASHES
from tests.exact.claims import plan_case
case, steps = CRASHES[{name!r}]
with suppress(NoPlanError):
    plan_case(case, steps=steps)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=patience.SECONDS).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("scope", marked(SCOPES, WRONG_SCOPES))
def test_claims_of_many_drawn_jobs_are_true(scope):
    wrong = {seed: found for seed in MANY_SEEDS if (found := judge(draw_case(seed, scope)).wrong)}
    assert not wrong


def test_effort_is_shared_by_all_placements_of_a_job():
    """The effort that is asked for is that of the job, not of each question."""
    case = draw_case(1037, "any placement")
    taken = ask(case, case.scope, None, 2 * QUICK).effort
    assert QUICK < taken <= 2 * QUICK * 1.5


@pytest.mark.parametrize(("scope", "seed"), [("any placement", 1027), ("any layers", 300_534)])
def test_fine_ticks_take_no_more_effort(scope, seed):
    """The solver does not raise bounds tick by tick where ticks are fine.

    In the second job it did so for scarce memory, in linear programmes that counted as no effort.
    """
    verdict = judge(draw_case(seed, scope))
    assert verdict.is_decided
    assert verdict.answer.effort < QUICK


def draw_fine_cases(scope: str) -> Iterator[Case]:
    """Draw jobs with overlapping reductions and times finer than the planner's ticks."""
    for seed in count():
        case = draw_case(seed, scope)
        if (
            "memory" in case.job
            or "network" not in case.job
            or "all_reduce" not in case.job["time"]
        ):
            continue
        if not has_exact_units(parse_job(case.text), [Worker(*worker) for worker in case.failed]):
            yield case


@pytest.mark.parametrize("scope", SCOPES[:3])
def test_claims_beside_reductions_are_true_where_times_are_finer_than_ticks(scope):
    """The reference counts these times exactly, and the witness proves what is claimed."""
    verdicts = [
        judge(case, steps=2_000, effort=QUICK) for case in islice(draw_fine_cases(scope), 4)
    ]
    assert not any(verdict.wrong for verdict in verdicts)
    assert any(verdict.is_decided for verdict in verdicts)


def test_a_scope_is_as_short_as_the_scopes_within_it():
    """The wider the scope, the shorter the period."""
    for seed in SEEDS[:2]:
        case = draw_case(seed, "layers in place")
        found = [ask(case, scope, None, QUICK) for scope in SCOPES[:5]]
        for narrow, wide in pairwise(found):
            assert narrow.upper is None or wide.lower <= narrow.upper
