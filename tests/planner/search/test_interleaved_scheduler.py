"""Interleaved orders keep every rule.

At the memory of published schedules they are those.
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
from slipstream.planner.model.problem import Bound
from slipstream.planner.search.interleaved_scheduler import (
    InterleavedRule,
    InterleavedScheduler,
    change_interleaved_rule,
    iterate_interleaved_rules,
)
from slipstream.planner.search.list_scheduler import ASSIGNMENT_RULES, StuckError, assign_hosts
from slipstream.schedules.check import check
from tests.jobs import failures, grid, jobs

MODES = st.tuples(
    st.sampled_from(["split", "fused"]), st.sampled_from(["staggered", "synchronous"])
)


def draw_rule(seed: int) -> InterleavedRule:
    drawn = random.Random(seed)
    rule = InterleavedRule(group=drawn.randint(0, 4), slope=1.0)
    for _ in range(seed % 6):
        rule = change_interleaved_rule(rule, drawn)
    return rule


def interleave(problem, assignment: str, rule: InterleavedRule):
    """Return the period and the solution by a rule.

    Skips the example if the rule gets stuck.
    """
    scheduler = InterleavedScheduler(ProblemArrays(problem, assign_hosts(problem, assignment)))
    try:
        return scheduler.evaluate_rule(rule), scheduler.last_solution()
    except StuckError:
        assume(False)


@settings(max_examples=100, deadline=None)
@given(st.data(), jobs(), MODES, st.sampled_from(ASSIGNMENT_RULES[:3]), st.integers(0, 999))
def test_interleaved_orders_keep_every_rule(data, job, modes, assignment, seed):
    problem = build_problem(
        job, data.draw(failures(job)), backward=modes[0], optimizer=modes[1], sharing=False
    )
    period, solution = interleave(problem, assignment, draw_rule(seed))
    schedule = build_schedule(
        problem,
        [(make_whole_piece(problem), solution)],
        method="greedy",
        bound=Bound(0, problem.bound_scope),
    )
    assert check(schedule) == []
    assert schedule.period_ticks == period


@settings(max_examples=20, deadline=None)
@given(jobs(), st.integers(0, 999))
def test_interpreted_and_compiled_make_the_same_orders(job, seed):
    problem = build_problem(job, [], sharing=False)
    period, solution = interleave(problem, "least-loaded", draw_rule(seed))
    with mock.patch.object(loops, "is_plain_python", lambda: True):
        interpreted, same = interleave(problem, "least-loaded", draw_rule(seed))
    assert (interpreted, same.start_by_key) == (period, solution.start_by_key)


@pytest.mark.parametrize(
    ("order", "chunks", "tried"),
    [
        ("interleaved", 2, True),
        ("interleaved", 3, True),
        ("v", 2, True),
        ("v", 3, False),
        ("linear", 1, False),
    ],
)
def test_tried_where_stages_of_a_worker_follow_each_other(order, chunks, tried):
    job = grid(1, 4, 8, more=f"[placement]\norder = '{order}'\nchunks = {chunks}\n")
    assert any(iterate_interleaved_rules(build_problem(job, []))) is tried


@pytest.mark.parametrize("chunks", [2, 3])
def test_with_unlimited_memory_and_full_groups_only_warm_up_and_drain_are_lost(chunks):
    """Narayanan et al. 2021: p - 1 times F and I of one chunk, if W hold nobody up."""
    stages, groups = 4, 3
    job = grid(
        1, stages, stages * groups, more=f"[placement]\norder = 'interleaved'\nchunks = {chunks}\n"
    )
    problem = build_problem(job, [])
    scheduler = InterleavedScheduler(ProblemArrays(problem, assign_hosts(problem, "least-loaded")))
    period = scheduler.evaluate_rule(InterleavedRule(group=stages, slope=2.0, waiting="none"))
    work = 3 * chunks * stages * groups
    assert period * problem.tick_seconds == pytest.approx(work + 2 * (stages - 1), abs=1e-9)
