"""Compare candidates by their plans: first all of them, then the best few again."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from slipstream.planner.budget import Clock
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import Plan

Candidate = TypeVar("Candidate", bound=Hashable)


class Round(NamedTuple):
    """Options of the plans of one round, and the seconds for all of them."""

    options: PlanOptions
    seconds: float


def plan_in_rounds(
    candidates: Sequence[Candidate],
    rounds: Sequence[Round],
    plan_candidate: Callable[[Candidate, PlanOptions], Plan | None],
    clock: Clock,
    *,
    finalists: int,
    floor: float,
    deadline: float,
) -> Plan | None:
    """Return the shortest plan of any candidate, the first of equals.

    None if none has a plan. All candidates are planned in the first round, the `finalists` with the
    shortest plans in the others. The function `plan_candidate` returns None for a candidate without
    a plan. If the first round is longer than list schedules need, its choice does not depend on the
    clock. The comparison ends early at a period of `floor` seconds, which none can beat, at Ctrl-C,
    or where another plan would probably end after the `deadline`.
    """
    shortest: Plan | None = None
    periods: dict[Candidate, float] = {}
    for options, seconds in rounds:
        within = options.with_limit(seconds / max(1, len(candidates)))
        for candidate in candidates:
            plan = plan_candidate(candidate, within)
            if plan is None:
                continue
            periods[candidate] = min(plan.period, periods.get(candidate, plan.period))
            if shortest is None or plan.period < shortest.period:
                shortest = plan
            is_late = clock.now() + plan.solve_seconds > deadline
            if plan.interrupted or shortest.period <= floor or is_late:
                return msgspec.structs.replace(shortest, interrupted=plan.interrupted)
        candidates = sorted(periods, key=lambda candidate: periods[candidate])[:finalists]
    return shortest
