"""Compare what the planner claims of a tiny job with the exact reference."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from slipstream.planner import NoPlanError, PlanOptions, normalised, parse_job
from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.budget import Budget
from slipstream.planner.model.from_job import build_grid, has_exact_units
from slipstream.planner.placement import find_placement
from slipstream.planner.plan import plan_only
from slipstream.schedules.schedule import Schedule, Scope, Worker
from tests.exact.answer import Answer, answer
from tests.exact.generate import Case
from tests.exact.model import EFFORT
from tests.exact.placements import answer_any_placement
from tests.exact.question import read_question

STEPS = 20_000
WITNESS_STEPS = 10 * STEPS
"""Steps in which the witness, which knows no plan, may prove a bound again."""
ROUNDING = Fraction(1, 10**9)
"""Relative difference by which a decimal number of seconds may differ from an exact one."""


UNKNOWN = Answer(lower=Fraction(0), upper=None, schedule=None)
"""Answer of a question that was not asked."""


class Verdict(NamedTuple):
    """What a plan claims, what is true, and which claims are wrong."""

    case: Case
    schedule: Schedule | None
    answer: Answer
    wrong: Mapping[str, str]
    """Wrong claims by kind, each with a sentence."""

    @property
    def is_decided(self) -> bool:
        """True if the shortest period is known, or that there is no plan."""
        return self.answer.is_exact or (self.schedule is None and self.answer.is_impossible)

    @property
    def distance(self) -> float | None:
        """Return period / optimum - 1, None unless both are known."""
        if self.schedule is None or not self.answer.is_exact or not self.answer.lower:
            return None
        period = self.schedule.seconds(self.schedule.period_ticks)
        return max(0.0, period / float(self.answer.lower) - 1)


def plan_case(case: Case, *, steps: int = STEPS, seed: int = 0) -> Schedule:
    """Return the planner's schedule of a case. Raises NoPlanError."""
    options = PlanOptions(
        steps=steps,
        seed=seed,
        backward=case.backward,
        optimizer=case.optimizer,  # type: ignore[arg-type]
        layers="move" if case.scope == "any layers" else "fixed",
        from_checkpoint=case.scope == "any layers",
    )
    if case.scope == "any placement":
        return find_placement(case.text, options).plan.schedule
    job, failed = parse_job(case.text), [Worker(*worker) for worker in case.failed]
    if case.scope == "roles":
        return normalised(job, failed, options).schedule
    return plan_only(options, job, failed).schedule


def ask(case: Case, scope: str, at_most: Fraction | None, effort: float = EFFORT) -> Answer:
    """Ask the reference for a case's shortest period in a scope."""
    if scope == "any placement":
        return answer_any_placement(
            case.job,
            backward=case.backward,
            optimizer=case.optimizer,
            at_most=at_most,
            effort=effort,
        )
    question = read_question(
        case.job, case.failed, scope=scope, backward=case.backward, optimizer=case.optimizer
    )
    return answer(question, at_most=at_most, effort=effort)


def judge(case: Case, *, steps: int = STEPS, seed: int = 0, effort: float = EFFORT) -> Verdict:
    """Plan a case and compare all claims of its schedule with the reference."""
    try:
        schedule = plan_case(case, steps=steps, seed=seed)
    except NoPlanError as error:
        found = ask(case, case.scope, None, effort)
        wrong = (
            {"no plan": f"refused ({error}); there is one of {_text(found.upper)} s"}
            if found.schedule
            else {}
        )
        return Verdict(case, None, found, wrong)
    except Exception as error:
        return Verdict(case, None, UNKNOWN, {"crash": f"{type(error).__name__}: {error}"})
    period, bound = (
        _seconds(schedule, schedule.period_ticks),
        _seconds(schedule, schedule.lower_bound_ticks),
    )
    if schedule.scope is not Scope.PLACEMENT and schedule.grid != build_grid(parse_job(case.text)):
        # Its placement is not the job's, which the reference knows: nothing is compared.
        return Verdict(case, schedule, UNKNOWN, {})
    found = ask(case, schedule.scope.value, period * (1 + ROUNDING), effort)
    wrong = dict(_wrong_claims(schedule, found, period, bound, _rounding(case, schedule)))
    return Verdict(case, schedule, found, wrong)


def _rounding(case: Case, schedule: Schedule) -> Fraction:
    """Return the seconds that rounding to ticks may add to all ops of a file.

    The witness proves a bound for the times of the file.
    """
    if has_exact_units(parse_job(case.text), [Worker(*worker) for worker in case.failed]):
        return Fraction(0)
    # A time is rounded up to a tick, and once more when it is that of a slow worker.
    ticks = Fraction(0)
    for seat in schedule.seats:
        factor = Fraction(schedule.times.per_mille_of.get(seat.worker, 1000), 1000)
        ticks += len(schedule.programs[seat.program]) * (factor + 1)
    return _seconds(schedule, ticks)


def _wrong_claims(
    schedule: Schedule, found: Answer, period: Fraction, bound: Fraction, rounding: Fraction
) -> Any:
    scope = schedule.scope.value
    if found.is_impossible or period * (1 + ROUNDING) < found.lower:
        yield (
            "too short",
            f"planned {_text(period)} s; the shortest for {scope} is {_text(found.lower)} s",
        )
    if found.upper is None:
        return
    claims = [("bound", bound)]
    if not bound:
        claims.append(("gap", period / (1 + Fraction(schedule.gap))))
    try:
        proven = proven_bound(schedule, Budget.of_steps(WITNESS_STEPS)).ticks
    except Exception as error:
        yield "witness crash", f"{type(error).__name__}: {error}"
    else:
        claims.append(("witness", _seconds(schedule, proven) - rounding))
        if proven < schedule.lower_bound_ticks:
            yield (
                "unproven",
                f"the bound of {_text(bound)} s is not proven by `slipstream check --bound`",
            )
    for kind, claimed in claims:
        if claimed > found.upper * (1 + ROUNDING):
            yield kind, f"{_text(claimed)} s proven for {scope}; {_text(found.upper)} s is possible"


def _seconds(schedule: Schedule, ticks: int) -> Fraction:
    return ticks * Fraction(repr(schedule.tick_seconds))


def _text(seconds: Fraction | None) -> str:
    return f"{float(seconds or 0):.9g}"
