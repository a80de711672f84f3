"""Orders of torch's generators.

The checker accepts them, and plans with the same memory are not longer.
"""

import itertools

import pytest

from benchmarks.torch_orders import GENERATORS, Setting, draw_settings, measure, time_torch
from slipstream.planner.model.arrays import ProblemArrays
from slipstream.planner.model.assemble import build_schedule
from slipstream.planner.model.decompose import make_whole_piece
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Bound
from slipstream.planner.search.interleaved_scheduler import (
    InterleavedScheduler,
    iterate_interleaved_rules,
)
from slipstream.planner.search.list_scheduler import assign_hosts
from slipstream.schedules.check import check


@pytest.mark.parametrize("generator", GENERATORS)
def test_orders_of_torch_are_schedules(generator):
    solution, memory, period = time_torch(Setting(generator, 4, 12, 5.0, 6.0, 3.0, 0.5, 0.4))
    problem = solution.arrays.problem
    schedule = build_schedule(
        problem,
        [(make_whole_piece(problem), solution)],
        method="greedy",
        bound=Bound(0, problem.bound_scope),
    )
    assert check(schedule) == []
    assert schedule.seconds(schedule.period_ticks) == pytest.approx(period)
    assert 0 < memory <= 2 * 12 * 1000


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize(("workers", "microbatches"), [(4, 16), (8, 64)])
def test_plans_are_not_longer_than_orders_of_torch(generator, workers, microbatches):
    bubble, result = measure(
        Setting(generator, workers, microbatches, 5.0, 6.0, 3.0, 0.5, 0.4), steps=100_000
    )
    assert result.bound - 1e-9 <= result.bubble <= bubble


@pytest.mark.parametrize(
    ("workers", "microbatches", "weight"), [(4, 8, 3.0), (4, 12, 9.0), (7, 28, 6.5)]
)
def test_the_first_v_order_is_that_of_torch(workers, microbatches, weight):
    setting = Setting("ZBVZeroBubble", workers, microbatches, 5.0, 6.0, weight, 0.5, 0.4)
    _, memory, period = time_torch(setting)
    problem = build_problem(setting.make_job(memory))
    scheduler = InterleavedScheduler(ProblemArrays(problem, assign_hosts(problem, "in turn")))
    ticks = scheduler.evaluate_rule(next(iterate_interleaved_rules(problem)))
    assert ticks * problem.tick_seconds == pytest.approx(period)


def test_the_same_seed_draws_the_same_settings():
    drawn = list(itertools.islice(draw_settings(3), 10))
    assert drawn == list(itertools.islice(draw_settings(3), 10))
    assert [setting.generator for setting in drawn] == [*GENERATORS, *GENERATORS]
    assert all(
        2 * setting.workers <= setting.microbatches <= 8 * setting.workers for setting in drawn
    )
