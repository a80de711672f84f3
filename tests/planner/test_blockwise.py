"""Schedules of many micro-batches as blocks of fewer.

They keep every rule, cost little, and what is too large is said.
"""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.jobs import uniform_job
from slipstream.planner import blockwise
from slipstream.planner.blockwise import (
    Blocks,
    Pace,
    Speed,
    TooLargeError,
    _even_block_count,
    blocks_of,
    choose_blocks,
    join_blocks,
    measure_pace,
    plan_in_blocks,
    sample_of,
)
from slipstream.planner.budget import Clock, StepClock
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.decompose import decompose
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Bound
from slipstream.planner.options import PlanOptions
from slipstream.planner.params import DEFAULTS
from slipstream.planner.plan import plan_only, plan_with
from slipstream.schedules.check import check
from slipstream.schedules.schedule import OpKind, Scope, Worker
from tests.jobs import failures, jobs

GREEDY = PlanOptions(method="greedy", time_limit=0.01)


def in_blocks(job, count, failed=()):
    bound = strongest_bound(build_problem(job, failed))
    return join_blocks(
        job, [plan_only(GREEDY, block, failed).schedule for block in blocks_of(job, count)], bound
    )


@settings(max_examples=60)
@given(st.data(), jobs(max_microbatches=12))
def test_blocks_one_after_the_other_keep_every_rule(data, job):
    fewest = min(job.microbatches) // job.chains
    if not fewest:
        counts = tuple(job.chains + n for n in job.microbatches)
        job = msgspec.structs.replace(job, microbatches=counts)
    down = data.draw(failures(job))
    schedule = in_blocks(job, data.draw(st.integers(1, max(1, fewest))), down)
    assert check(schedule) == [] and schedule.grid.microbatches == job.microbatches
    assert schedule.period_ticks >= schedule.lower_bound_ticks
    forwards = sum(op.kind is OpKind.F for op in schedule.all_ops())
    assert forwards == sum(job.microbatches) * job.depth


def test_equal_pipelines_share_their_programs_and_their_blocks():
    job = uniform_job(4, 4, 64, capacity=8)
    schedule = in_blocks(job, 4)
    assert len(schedule.programs) == 4 and schedule.gap < 0.25
    assert [block.microbatches for block in blocks_of(uniform_job(2, 2, 7), 3)] == [
        (3, 3),
        (2, 2),
        (2, 2),
    ]


def test_a_block_costs_one_filling_and_draining():
    job, down = uniform_job(3, 4, 60, capacity=8), [Worker(1, 2)]
    block = plan_only(GREEDY, uniform_job(3, 4, 20, capacity=8), down).schedule
    optimizer = 5
    joined = join_blocks(job, [block] * 3, Bound(0, Scope.STAGES))
    assert joined.period_ticks <= 3 * (block.period_ticks - optimizer) + optimizer


def test_what_cannot_be_put_together_in_time_is_refused_at_once_with_what_can(monkeypatch):
    """A job too large for its time is refused at once with a remedy.

    1,572,864 ops at 10 us each, and a quarter more, take 19.7 s. No list schedule of them is begun,
    which takes 0.5 s.
    """
    monkeypatch.setattr(blockwise, "measure_pace", lambda *_: Pace(1e-5, 1e-5))
    clock = StepClock()
    with pytest.raises(
        TooLargeError,
        match=r"65,536 micro-batches.*about 19\.7 s.*about [\d,]+ micro-batches a "
        r"pipeline fit.*--time-limit 41",
    ):
        plan_with(PlanOptions(steps=400_000), uniform_job(4, 8, 65_536, capacity=16), clock=clock)
    assert clock.steps < 40_000


@pytest.mark.real_clock
def test_the_pace_of_this_machine_is_measured_by_a_part_of_the_job():
    job, planned = uniform_job(1, 8, 100, capacity=16), []

    def plan_block(block, seconds):
        planned.append((block, seconds))
        return plan_only(GREEDY, block, ()).schedule

    pace = measure_pace(job, 8 * 3 * 100, plan_block, Clock())
    assert planned == [(job, 0.0)] and pace.plan > 0 and pace.join > 0


def test_many_micro_batches_are_planned_in_blocks():
    """Six pipelines with one worker down; each different block is planned once."""
    job, down, planned = uniform_job(6, 4, 256, capacity=8), (Worker(1, 3),), []

    def plan_block(block, seconds):
        planned.append((block.microbatches[0], seconds))
        return plan_only(GREEDY.with_limit(seconds), block, down).schedule

    schedule = plan_in_blocks(
        job, Blocks(7, 2.0), strongest_bound(build_problem(job, down)), plan_block
    )
    assert planned == [(37, 1.0), (36, 1.0)]
    assert check(schedule) == [] and schedule.gap < 0.05


def test_blocks_are_equal_where_the_micro_batches_divide_evenly():
    """One plan does for all blocks then."""
    assert (
        _even_block_count(5, uniform_job(4, 4, 1024)) == 4
        and _even_block_count(7, uniform_job(4, 4, 100)) == 7
    )


@pytest.mark.real_clock
def test_the_pace_of_the_machine_is_measured_once_a_plan_and_the_reference_has_no_grace():
    # 98,304 ops in no time are blocks within the second of grace, and are not planned without it.
    job, planned = uniform_job(1, 8, 4096, capacity=16), []

    def ops_of(job):
        return 8 * 3 * max(job.microbatches)

    def plan_block(block, seconds):
        planned.append(block.microbatches[0])
        return plan_only(GREEDY.with_limit(seconds), block, ()).schedule

    speed = Speed(60.0, Clock())
    with pytest.raises(TooLargeError, match="--time-limit"):
        choose_blocks(job, ops_of, 0.01, plan_block, speed, grace=False)
    blocks = choose_blocks(job, ops_of, 0.01, plan_block, speed)
    assert blocks is not None and 4096 % blocks.number == 0
    assert planned == [1024], "one sample"


def test_the_pace_is_not_measured_by_a_part_that_is_hardly_any_ops():
    """A part with a hundredth of the ops does not measure the pace.

    Of 4,096 workers five are down: a twelfth of the micro-batches has so few ops, as fewer workers
    share them.

    255,000 ops were refused for that in 10 s, of which they need 3.
    """
    job, down = uniform_job(256, 16, 32, capacity=32), [Worker(index, index) for index in range(5)]

    def ops_of(part):
        return sum(piece.problem.operation_count for piece in decompose(build_problem(part, down)))

    sample = DEFAULTS.blocks.sample
    assert (
        ops_of(job) > 10 * sample
        and ops_of(next(blocks_of(job, ops_of(job) // sample))) < sample / 6
    )
    assert sample / 2 < ops_of(sample_of(job, ops_of, sample)) < 4 * sample
