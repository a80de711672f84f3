"""The default is never worse than what others run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.plan import plan_job
from slipstream.schedules.check import check
from slipstream.schedules.schedule import OpKind, Worker
from tests.jobs import failures, grid, jobs


@settings(max_examples=25, deadline=None)
@given(
    st.data(),
    jobs(max_pipelines=3, max_microbatches=4),
    st.sampled_from(["split", "fused"]),
    st.sampled_from(["staggered", "synchronous"]),
)
def test_never_worse_than_a_baseline(data, job, backward, optimizer):
    down = data.draw(failures(job))
    kinds = {"backward": backward, "optimizer": optimizer, "steps": 40_000}
    ours = plan_job(job, down, **kinds).schedule
    for method in ("greedy", "1f1b", "recycle"):
        other = plan_job(job, down, method=method, **kinds).schedule
        assert check(other) == [] and ours.period_ticks <= other.period_ticks, method


def test_recycle_deals_round_robin():
    schedule = plan_job(grid(4, 2, 6), [Worker(1, 1)], method="recycle").schedule
    ops = [op for op in schedule.all_ops() if (op.kind, op.slice, op.pipeline) == (OpKind.F, 1, 1)]
    hosts = [op.worker.pipeline for op in sorted(ops, key=lambda op: op.microbatch)]
    assert hosts == [0, 2, 3, 0, 2, 3]


@pytest.mark.parametrize("backward", ["split", "fused"])
def test_without_failures_recycle_is_1f1b_with_weights_in_the_bubbles(backward):
    """8 micro-batches over 4 stages: the forwards and backwards of 1F1B; fused, exactly 1F1B."""
    job = grid(1, 4, 8)
    ours, usual = (
        plan_job(job, method=method, backward=backward, optimizer="synchronous").schedule
        for method in ("recycle", "1f1b")
    )
    assert (ours.period_ticks == usual.period_ticks) == (backward == "fused")
    assert ours.period_ticks <= usual.period_ticks
