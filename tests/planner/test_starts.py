"""Plans of every placement are never longer than a schedule they start from.

Failures are drawn, too.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.job.file import Job
from slipstream.planner.model.arrays import ProblemArrays, Solution
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Problem
from slipstream.planner.params import DEFAULTS
from slipstream.planner.plan import plan_job
from slipstream.planner.search.incumbent import divide_problem, order_pieces
from slipstream.planner.search.list_scheduler import (
    ASSIGNMENT_RULES,
    BASELINES,
    AssignmentRule,
    ListScheduler,
    StuckError,
    assign_hosts,
)
from slipstream.planner.search.list_search import Rule, iterate_shortlist
from slipstream.planner.search.round_scheduler import (
    RoundRule,
    RoundScheduler,
    iterate_round_rules,
)
from slipstream.schedules.schedule import Worker
from tests.jobs import grid

PLACEMENTS = ("linear", "interleaved", "v", "bidirectional")
STEPS = 20_000


class Start(NamedTuple):
    """List schedule from which a search may start: a rule, and who runs re-routed micro-batches."""

    assignment: AssignmentRule
    rule: Rule

    def order(self, problem: Problem) -> Solution:
        """Return the schedule; raise StuckError if there is none for lack of memory."""
        kind = RoundScheduler if isinstance(self.rule, RoundRule) else ListScheduler
        scheduler = kind(ProblemArrays(problem, assign_hosts(problem, self.assignment)))
        scheduler.evaluate_rule(self.rule)
        return scheduler.last_solution()


@st.composite
def placed(draw, placement: str) -> tuple[Job, list[Worker]]:
    """A small job of a placement, and up to three failures.

    Its memory is one to two times that of 1F1B.
    """
    pipelines, stages = draw(st.sampled_from([(2, 2), (3, 2), (2, 4), (3, 4)]))
    chunks = 2 if placement in ("interleaved", "v") else 1
    ticks = st.integers(1, 4)
    times = "\n".join(
        f"{key} = {draw(ticks)}" for key in ("forward", "backward_input", "backward_weight")
    )
    stash = draw(st.sampled_from([0.5, 1, 1.5]))
    room = draw(st.sampled_from([1, 1.25, 1.5, 2])) * stages * chunks
    more = (
        f"[placement]\norder = '{placement}'\n"
        + (f"chunks = {chunks}\n" if chunks > 1 else "")
        + f"[memory]\ncapacity = {max(room, 2 * chunks * stash)}\nactivation = 1\n"
        f"weight_stash = {stash}\n"
    )
    job = grid(
        pipelines,
        stages,
        draw(st.integers(2, 6)),
        times=f"{times}\ntransfer = {draw(st.integers(0, 1))}\noptimizer = 1",
        more=more,
    )
    column = st.integers(0, stages - 1)
    dead = draw(
        st.lists(st.builds(Worker, st.integers(0, pipelines - 2), column), unique=True, max_size=3)
    )
    return job, dead


def iterate_starts(problem: Problem) -> Iterator[Callable[[Problem], Solution]]:
    """Iterate over the starts of a search: the shortlist, orders in rounds, 1F1B and ReCycle.

    With failures, rounds are tried under the best assignment only, which differs by search.
    """
    yield from BASELINES.values()
    for index, rule in iterate_shortlist(problem, DEFAULTS.lists):
        yield Start(ASSIGNMENT_RULES[index], rule).order
    if not problem.failed:
        for round_rule in iterate_round_rules(problem):
            yield Start(ASSIGNMENT_RULES[0], round_rule).order


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(PLACEMENTS))
def test_a_plan_is_no_longer_than_any_of_its_starts(data, placement):
    job, failed = data.draw(placed(placement))
    problem = build_problem(job, failed)
    pieces = divide_problem(problem).pieces
    periods = []
    for start in iterate_starts(problem):
        with suppress(StuckError):
            periods.append(order_pieces(problem, pieces, start).period)
    assert periods
    plan = plan_job(job, failed, steps=STEPS)
    assert plan.schedule.period_ticks <= min(periods)
