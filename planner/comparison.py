"""Compare candidates by their plans: first all of them, then the best few again."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from slipstream.planner.budget import Clock
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import Plan

Candidate = TypeVar("Candidate", bound=Hashable)


class Round(NamedTuple):
    """One round of a comparison: options of its plans, and seconds for all of them."""

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
    """Return the shortest plan of any candidate, the first of equals; None without any plan.

    All candidates are planned in the first round, and only those with the shortest plans in the
    others. The comparison ends early once no candidate can beat the shortest plan, after an
    interrupted plan (the result then counts as interrupted), or if another plan would probably end
    after the deadline.

    Parameters
    ----------
    candidates
        Candidates, each at most once.
    rounds
        Options of each round, and its seconds.
    plan_candidate
        Function that plans a candidate with options, or returns None if it has no plan.
    clock
        Clock of the search.
    finalists
        Number of candidates after the first round.
    floor
        Period in seconds that no candidate can beat.
    deadline
        Time on the clock after which no plan should end.
    """
    # If list schedules end before their seconds, the choice does not depend on the clock.
    shortest: Plan | None = None
    periods: dict[Candidate, float] = {}
    for options, seconds in rounds:
        within = options.with_limit(seconds / max(1, len(candidates)))
        for candidate in candidates:
            plan = plan_candidate(candidate, within)
            if plan is None:
                continue
            # A later round may find a longer plan than an earlier one: the shorter counts.
            periods[candidate] = min(plan.period, periods.get(candidate, plan.period))
            if shortest is None or plan.period < shortest.period:
                shortest = plan
            # The next plan probably takes about as long as this one.
            is_late = clock.now() + plan.solve_seconds > deadline
            if plan.interrupted or shortest.period <= floor or is_late:
                return msgspec.structs.replace(shortest, interrupted=plan.interrupted)
        candidates = sorted(periods, key=lambda candidate: periods[candidate])[:finalists]
    return shortest
