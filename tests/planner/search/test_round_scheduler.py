"""Orders in rounds keep every rule.

They are no longer than published schedules where memory binds.
"""

import random
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipstream.planner import loops
from slipstream.planner.model.arrays import ProblemArrays
from slipstream.planner.model.assemble import build_schedule
from slipstream.planner.model.decompose import make_whole_piece
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Bound, Problem
from slipstream.planner.plan import plan_job
from slipstream.planner.search.list_scheduler import ASSIGNMENT_RULES, StuckError, assign_hosts
from slipstream.planner.search.round_scheduler import RoundRule, RoundScheduler, change_round_rule
from slipstream.schedules.check import check
from tests.jobs import failures, grid, jobs

MODES = st.tuples(
    st.sampled_from(["split", "fused"]), st.sampled_from(["staggered", "synchronous"])
)


def draw_rule(problem: Problem, seed: int) -> RoundRule:
    drawn, rule = random.Random(seed), RoundRule()
    for _ in range(seed % 12):
        rule = change_round_rule(rule, len(problem.layers_by_slice), drawn)
    return rule


def schedule_in_rounds(problem, assignment: str, rule: RoundRule):
    """Return the period and the solution by a rule.

    Skips the example if the rule gets stuck.
    """
    scheduler = RoundScheduler(ProblemArrays(problem, assign_hosts(problem, assignment)))
    try:
        return scheduler.evaluate_rule(rule), scheduler.last_solution()
    except StuckError:
        assume(False)


@settings(max_examples=150, deadline=None)
@given(st.data(), jobs(), MODES, st.sampled_from(ASSIGNMENT_RULES[:3]), st.integers(0, 999))
def test_orders_in_rounds_keep_every_rule(data, job, modes, assignment, seed):
    problem = build_problem(
        job, data.draw(failures(job)), backward=modes[0], optimizer=modes[1], sharing=False
    )
    period, solution = schedule_in_rounds(problem, assignment, draw_rule(problem, seed))
    schedule = build_schedule(
        problem,
        [(make_whole_piece(problem), solution)],
        method="greedy",
        bound=Bound(0, problem.bound_scope),
    )
    assert check(schedule) == []
    assert schedule.period_ticks == period


@settings(max_examples=20, deadline=None)
@given(st.data(), jobs(), st.integers(0, 999))
def test_interpreted_and_compiled_make_the_same_orders(data, job, seed):
    problem = build_problem(job, data.draw(failures(job)), sharing=False)
    period, solution = schedule_in_rounds(problem, "least-loaded", draw_rule(problem, seed))
    with mock.patch.object(loops, "is_plain_python", lambda: True):
        interpreted, same = schedule_in_rounds(problem, "least-loaded", draw_rule(problem, seed))
    assert (interpreted, same.start_by_key) == (period, solution.start_by_key)


@pytest.mark.parametrize(
    ("workers", "microbatches", "times", "stash", "memory", "published"),
    [
        (6, 12, (7.885, 7.329, 5.432, 0.885), 0.6, 1.0, 0.0801),
        (20, 60, (8.689, 9.733, 6.577, 1.044), 0.6, 1.2, 0.0441),
        (16, 48, (14.307, 13.359, 12.617, 1.323), 0.8, 1.0, 0.0380),
        (16, 48, (14.407, 14.38, 9.676, 1.61), 131072 / 303104, 1.25, 0.0306),
    ],
)
def test_v_placements_with_little_memory_are_no_longer_than_the_published_rule(
    workers, microbatches, times, stash, memory, published
):
    """Bubbles of the V rule's authors' own code (arXiv 2405.15362), one chunk a direction."""
    forward, gradient, weight, transfer = times
    job = grid(
        1,
        workers,
        microbatches,
        times=f"forward = {forward}\nbackward_input = {gradient}\nbackward_weight = {weight}\n"
        f"transfer = {transfer}",
        more=f"[memory]\ncapacity = {2 * memory * workers}\nactivation = 1\n"
        f"weight_stash = {stash}\n"
        "[placement]\norder = 'v'\nchunks = 2\n",
    )
    period = plan_job(job, steps=400_000).period
    assert 1 - 2 * microbatches * (forward + gradient + weight) / period < published
