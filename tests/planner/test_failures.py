"""What a run asks for when workers fail."""

import msgspec
import pytest

from slipstream.planner import failures as failures_module
from slipstream.planner.failures import FailurePlanner
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.params import ListParams, SearchParams
from slipstream.planner.plan import plan_only
from slipstream.planner.repetition import TooLargeError
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Worker
from tests.jobs import grid

JOB = grid(3, 2, 2)
FIRST = plan_only(PlanOptions(method="greedy", time_limit=0.1), JOB, ()).schedule


@pytest.mark.parametrize("enough", [1.0, 1e9])
def test_a_job_too_large_to_be_planned_at_once_has_more_time(monkeypatch, enough):
    """Where that is too little, too, there is no plan; the run asks for others then."""
    def plan(options, job, down):
        if options.time_limit < enough:
            raise TooLargeError("too large")
        return plan_only(msgspec.structs.replace(options, time_limit=0.1), job, down)

    asked, failures = (Worker(1, 1),), FailurePlanner(JOB, FIRST)
    monkeypatch.setattr(failures_module, "plan_only", plan)
    if enough > 1.0:
        with pytest.raises(NoPlanError, match="too large"):
            failures.after(asked)
    else:
        schedule = failures.after(asked)
        assert schedule.failed == asked and not check(schedule)


def test_the_first_answer_to_a_failure_of_a_large_job_is_the_first_plan_whatever_the_machine_does(monkeypatch):
    """It takes one step, and cuts no micro-batch; the same failure has the same answer again."""
    job, asked = grid(80, 2, 80), []

    def plan(options, job, down):
        asked.append(options)
        return plan_only(options, job, down)

    failures = FailurePlanner(job, plan_only(PlanOptions(method="greedy", steps=1), job, ()).schedule)
    monkeypatch.setattr(failures_module, "plan_only", plan)
    schedule, again = failures.after((Worker(1, 1),)), failures.after((Worker(1, 1),))
    assert schedule == again and not check(schedule) and not schedule.slices
    assert [(one.steps, one.slices) for one in asked] == [(1, False)] * 2
    small = FailurePlanner(JOB, FIRST)
    small.after((Worker(1, 1),))
    assert asked[-1].steps is None and asked[-1].slices


def test_what_steers_the_search_is_passed_on(monkeypatch):
    asked = []
    monkeypatch.setattr("slipstream.planner.failures.plan_only",
                        lambda options, *_: asked.append(options.params) or plan_only(options, *_))
    params = SearchParams(lists=ListParams(most_steps=9))
    FailurePlanner(JOB, FIRST, params=params).after((Worker(1, 1),))
    assert asked == [params]
