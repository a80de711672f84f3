"""The published worked example (ReCycle, SOSP 2024).

It has 3 pipelines x 4 stages x 6 micro-batches, optimizer 3 slots.
"""

from pathlib import Path

import pytest

import slipstream.cli as cli
from slipstream.planner.job.file import Job, parse_job, read_job
from slipstream.planner.plan import Plan, plan_job
from slipstream.schedules.schedule import Worker

JOB = Path(cli.__file__).parent / "jobs" / "worked-example.toml"
DEAD = Worker(1, 2)


def job(capacity: str | None = None) -> Job:
    if capacity is None:
        return read_job(JOB)
    return parse_job(f"{JOB.read_text()}\n[memory]\ncapacity = {capacity}\n")


def period(plan: Plan) -> int:
    return plan.schedule.period_ticks


def test_fault_free_1f1b_takes_30():
    assert period(plan_job(job(), method="1f1b")) == 30


def test_1f1b_with_a_dead_worker_and_no_better_plan_pays_for_it():
    """39 is the proven optimum of re-routing alone (fused, synchronous, the memory of 1F1B)."""
    assert period(plan_job(job("[4, 3, 2, 1]"), [DEAD], method="1f1b")) >= 39


@pytest.mark.parametrize("method", ["greedy", "cp-sat"])
@pytest.mark.parametrize(
    ("failed", "optimizer", "optimum"),
    [([], "staggered", 22), ([DEAD], "synchronous", 32), ([DEAD], "staggered", 30)],
)
def test_split_backward_reaches_the_proven_optimum(method, failed, optimizer, optimum):
    plan = plan_job(job(), failed, optimizer=optimizer, method=method)
    assert (period(plan), plan.schedule.lower_bound_ticks, plan.schedule.status) == (
        optimum,
        optimum,
        "optimal",
    )


def test_fused_and_synchronous_with_the_memory_of_1f1b():
    plan = plan_job(job("[4, 3, 2, 1]"), [DEAD], backward="fused", optimizer="synchronous")
    assert period(plan) <= 39


def test_fault_free_with_room_for_four_takes_24():
    plan = plan_job(job("4"))
    assert (period(plan), plan.schedule.status) == (24, "optimal")


def test_nothing_is_lost_against_fault_free_1f1b():
    # This is the point of the paper: with one worker dead, the adapted schedule is as fast as 1F1B
    # with all alive.
    assert period(plan_job(job(), [DEAD])) == period(plan_job(job(), method="1f1b"))
