"""The search over list schedules: what it changes, and what it finds."""

import random
from collections import Counter
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.budget import Budget, SearchEnd
from slipstream.planner.layout.candidates import generate_layouts
from slipstream.planner.model.arrays import ProblemArrays
from slipstream.planner.model.assemble import build_schedule
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.decompose import decompose
from slipstream.planner.model.from_job import build_layered_problem, build_problem, with_layout
from slipstream.planner.model.problem import AllowedLayouts
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.params import DEFAULTS
from slipstream.planner.search.engine import find_best_candidate
from slipstream.planner.search.list_scheduler import (
    ASSIGNMENT_RULES,
    DispatchRule,
    ListScheduler,
    assign_hosts,
)
from slipstream.planner.search.list_search import (
    _exchange_hosts,
    change_rule,
    search_list_schedules,
)
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Worker
from tests.jobs import failures, grid, jobs


@settings(max_examples=60, deadline=None)
@given(st.data(), jobs(), st.sampled_from(ASSIGNMENT_RULES), st.integers(0, 99))
def test_an_exchange_keeps_loads_and_holders(data, job, rule, seed):
    problem = build_problem(job, data.draw(failures(job)), sharing=rule == "by-speed")
    before = ProblemArrays(problem, assign_hosts(problem, rule))
    after = _exchange_hosts(before, random.Random(seed))
    assert after.hosts.keys() == before.hosts.keys()
    assert all(
        after.hosts[unit] in problem.allowed_hosts(unit.slice, unit.pipeline)
        for unit in after.hosts
    )
    counts = Counter((unit.slice, worker) for unit, worker in before.hosts.items())
    assert Counter((unit.slice, worker) for unit, worker in after.hosts.items()) == counts
    anew = ProblemArrays(problem, after.hosts)
    for arcs in ("predecessors", "successors"):
        assert all(map(np.array_equal, getattr(after.ops, arcs), getattr(anew.ops, arcs)))
    assert np.array_equal(after.ops.worker, anew.ops.worker) and np.array_equal(
        after.ops.duration, anew.ops.duration
    )
    assert np.array_equal(after.load, anew.load)


def test_exchanges_find_what_no_assignment_rule_gives():
    """Exchanges find a plan 4.4 % shorter than the rules of assignment.

    Three pipelines each have a dead worker of another stage.
    """
    job = grid(
        3,
        4,
        8,
        times="forward = 10\nbackward_input = 10\nbackward_weight = 10\ntransfer = 1\n"
        "optimizer = 5",
        more="[memory]\ncapacity = 8\nweight_stash = 1\n",
    )
    problem = build_problem(job, [Worker(0, 2), Worker(1, 3), Worker(2, 0)], sharing=False)
    (piece,) = decompose(problem)
    bound = strongest_bound(problem)
    solution, period = search_list_schedules(problem, bound.ticks, Budget.of_steps(40_000_000))
    assert period <= 1.02 * bound.ticks
    schedule = build_schedule(problem, [(piece, solution)], bound=bound, method="greedy")
    assert check(schedule) == []
    assert schedule.period_ticks == period


def layout_with_routes():
    """Two pipelines of eight stages, one worker down; cut anew, in one piece."""
    job = grid(
        2,
        8,
        16,
        times="forward = 4\nbackward_input = 4\nbackward_weight = 4\ntransfer = 1\noptimizer = 2\n",
        more=f"[placement]\nlayers = {[4] * 8}\n",
    )
    failed = [Worker(1, 3)]
    layered_problem = build_layered_problem(job, failed, AllowedLayouts(layers="move"))
    (piece,) = decompose(with_layout(layered_problem, next(generate_layouts(layered_problem))))
    return piece.problem


def test_walks_from_the_shortlist_find_shorter_plans_and_the_same_ones_again():
    problem = layout_with_routes()

    def found(steps, seed=0):
        solution, period = search_list_schedules(
            problem, 1, Budget.of_steps(40_000_000, seed), steps=steps
        )
        assert solution_period(solution) == period
        return period, solution.start_by_key

    assert found(0)[0] > found(300)[0] == found(300)[0]
    assert found(300)[1] == found(300)[1]


def test_walks_end_where_nothing_is_found():
    """With one worker all orders are as long: a few walks, and no more."""
    job = grid(1, 1, 4, more="[placement]\nlayers = [2]\n")
    layered_problem = build_layered_problem(job, [], AllowedLayouts(layers="move"))
    (piece,) = decompose(with_layout(layered_problem, next(generate_layouts(layered_problem))))
    with mock.patch.object(
        ListScheduler, "order_ops", autospec=True, side_effect=ListScheduler.order_ops
    ) as order:
        search_list_schedules(piece.problem, 1, Budget.of_steps(40_000_000))
    assert order.call_count <= 50 + DEFAULTS.lists.stale_starts * DEFAULTS.lists.stale_steps


@settings(max_examples=60, deadline=None)
@given(jobs(), st.integers(0, 99))
def test_random_steps_keep_to_the_micro_batches_and_slices_there_are(job, seed):
    problem, drawn, rule = build_problem(job), random.Random(seed), DispatchRule()
    for _ in range(30):
        rule = change_rule(problem, rule, drawn, DEFAULTS.lists)
    assert all(
        change.microbatch < problem.grid.microbatches[change.pipeline] and change.places
        for change in (*rule.places, *rule.gradient_places)
    )
    assert all(
        share is None or len(share) == len(problem.layers_by_slice)
        for share in (rule.fill_wait, rule.in_flight)
    )
    ListScheduler(ProblemArrays(problem, assign_hosts(problem, ASSIGNMENT_RULES[0]))).evaluate_rule(
        rule
    )


def test_list_schedules_have_all_steps_where_a_job_is_too_large_for_anything_else():
    problem = build_problem(
        grid(
            1,
            6,
            120,
            times="forward = 7.885\nbackward_input = 7.329\nbackward_weight = 5.432\n"
            "transfer = 0.885",
            more="[memory]\ncapacity = 14\nactivation = 1\nweight_stash = 0.6\n[placement]\n"
            "order = 'v'\nchunks = 2\n",
        )
    )
    steps = 20_000
    budget = Budget.of_steps(steps)
    best = find_best_candidate(problem, "cp-sat", budget)
    assert best.end is SearchEnd.STEPS and best.orders == 0
    assert budget.clock.steps > steps / 2
