"""Bounds against the true optimum of tiny jobs, and against bounds worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.job.file import parse_job
from slipstream.planner.model.bounds_layouts import (
    min_fill_ticks,
    period_bound,
    whole_bound,
    work_bound,
)
from slipstream.planner.model.from_job import build_layered_problem, build_problem
from slipstream.planner.model.problem import AllowedLayouts
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.planner.layout.layouts import problem
from tests.planner.search.brute_force import optimal_period

TINY = """
pipelines = {pipelines}
stages = {stages}
microbatches = {microbatches}
[time]
forward = {forward}
backward_input = {backward}
backward_weight = 3
optimizer = {optimizer}
transfer = {transfer}
[memory]
capacity = {capacity}
activation = 1
weight_stash = 1
"""


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([(1, 2, 1), (1, 2, 2), (1, 3, 1), (2, 2, 1)]),
    forward=st.integers(1, 5),
    backward=st.integers(1, 5),
    optimizer=st.integers(0, 3),
    transfer=st.integers(0, 3),
    capacity=st.integers(1, 2),
    failed=st.booleans(),
)
def test_no_bound_is_above_the_true_optimum(
    shape, forward, backward, optimizer, transfer, capacity, failed
):
    pipelines, stages, microbatches = shape
    job = parse_job(
        TINY.format(
            pipelines=pipelines,
            stages=stages,
            microbatches=microbatches,
            forward=forward,
            backward=backward,
            optimizer=optimizer,
            transfer=transfer,
            capacity=capacity,
        )
    )
    down = [Worker(0, 1)] if failed and pipelines > 1 else []
    least = optimal_period(build_problem(job, down))
    for layers in ("fixed", "move"):
        assert (
            period_bound(build_layered_problem(job, down, AllowedLayouts(layers=layers))).ticks
            <= least
        )
    assert whole_bound(build_layered_problem(job, down)) <= least


def test_fill_bound_is_met():
    """Stage 0 waits for F and I of stage 1 and two transfers.

    One pipeline of two stages has room for one micro-batch.
    """
    job = parse_job(
        TINY.format(
            pipelines=1,
            stages=2,
            microbatches=1,
            forward=4,
            backward=5,
            optimizer=0,
            transfer=2,
            capacity=1,
        )
    )
    given_problem = build_layered_problem(job)
    # A tick for rounding.
    assert min_fill_ticks(given_problem, Worker(0, 0)) == 4 + 4 + 5 + 4 - 4 - 1
    assert optimal_period(build_problem(job)) == period_bound(given_problem).ticks + 1


@pytest.mark.parametrize(("activation", "capacity"), [(100, 100), (0, 0)])
def test_bounds_are_reckoned_in_whole_numbers(activation, capacity):
    """The bound is 29, and not 28.999999999999996 as in floating point.

    29 ticks take 100 units of memory, of which there are 100.
    """
    job = grid(
        1,
        2,
        1,
        times="forward = [29, 0]\nbackward_input = [1, 0]\nbackward_weight = [1, 0]\n",
        more=f"[memory]\ncapacity = {capacity}\nactivation = {activation}\n",
    )
    for layers in ("fixed", "move"):
        assert (
            period_bound(build_layered_problem(job, question=AllowedLayouts(layers=layers))).ticks
            <= 31
        )
    assert optimal_period(build_problem(job)) == 31


def test_somebody_runs_one_layer_of_a_micro_batch_more_than_the_mean():
    """16 layers of 16 micro-batches over 7 workers are 37 or more on some worker.

    It holds three layers for that.
    """
    given_problem = problem(2, 4, 8, 4, failed=["1.2"])
    assert work_bound(given_problem) == 1 + 1098
    assert period_bound(given_problem).ticks == 37 * 30 + 3


def test_slow_workers_run_whole_layers_of_whole_micro_batches_too():
    """Two workers of 30 and 40 ticks a layer run 5 and 3.

    They share 2 layers of 4 micro-batches.
    """
    assert period_bound(problem(2, 1, 2, 2, slow={"1.0": 1333})).ticks == 5 * 30 + 2


@pytest.mark.parametrize(("slow", "least"), [(1340, 35), (2000, 37)])
def test_whole_micro_batches_of_a_stage_with_a_slow_worker(slow, least):
    """The slow worker of a stage takes 26 x 1.34 or 18 x 2.

    That is less than what the three others then have. The grid is 4 x 8 with 32 micro-batches each.
    """
    given_problem = problem(4, 8, 32, 4, slow={"1.3": slow}, layers="fixed", optimizer=0)
    assert whole_bound(given_problem) <= least * 120
    assert whole_bound(given_problem) == max(whole_bound(given_problem), work_bound(given_problem))
