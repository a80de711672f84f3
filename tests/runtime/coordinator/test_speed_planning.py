"""What is planned for workers that are slow.

The planner plans a job of four pipelines.
"""

import pytest

from slipstream.planner.failures import FailurePlanner
from slipstream.runtime.coordinator.decisions.slow_workers import decide_for_speeds, period_at
from slipstream.runtime.coordinator.planning.schedule_finder import NoScheduleError
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.running import schedule_for

JOB = grid(4, 2, 8)
SLOW = Worker(1, 1)
FIRST = schedule_for(JOB)
PLAN = FailurePlanner(JOB, FIRST).at_speeds


def test_work_is_shed_from_a_slow_worker_and_given_back():
    decision = decide_for_speeds(FIRST, ((SLOW, 2.0),), PLAN)
    assert decision.schedule is not None and decision.schedule.shed > 0 and decision.left_out == ()
    assert decision.seconds == decision.schedule.seconds(decision.schedule.period_ticks)
    assert decision.seconds < 0.7 * decision.present_seconds
    back = decide_for_speeds(decision.schedule, (), PLAN)
    assert back.schedule is FIRST and back.seconds < back.present_seconds < decision.seconds


def test_what_gains_nothing_changes_nothing():
    decision = decide_for_speeds(FIRST, ((SLOW, 1.01),), PLAN)
    assert decision.schedule is None and decision.seconds == decision.present_seconds


def test_one_that_is_too_slow_to_be_worth_its_place_is_left_out():
    decision = decide_for_speeds(FIRST, ((SLOW, 100.0),), PLAN)
    assert decision.left_out == (SLOW,) and decision.schedule is not None
    assert SLOW not in decision.schedule.seat_of and len(decision.schedule.seats) == 7
    assert decision.seconds <= 1.01 * decision.with_them_seconds


def test_the_last_that_holds_a_stage_is_never_left_out():
    job = grid(1, 2, 4)
    first = schedule_for(job)
    decision = decide_for_speeds(
        first, ((Worker(0, 1), 100.0),), FailurePlanner(job, first).at_speeds
    )
    assert decision.left_out == () and decision.schedule is None


def test_the_present_order_of_ops_is_timed_at_the_speeds_that_were_measured():
    usual = FIRST.seconds(FIRST.period_ticks)
    assert (
        period_at(FIRST, {}) == usual and 1.8 * usual < period_at(FIRST, {SLOW: 2.0}) < 2.1 * usual
    )
    slowed = PLAN((), ((SLOW, 2.0),))
    assert (
        period_at(slowed, {SLOW: 2.0})
        == slowed.seconds(slowed.period_ticks)
        > period_at(slowed, {})
        > usual
    )


def test_a_schedule_of_another_job_is_refused():
    other = schedule_for(grid(4, 2, 6))
    with pytest.raises(NoScheduleError, match="another job"):
        decide_for_speeds(FIRST, ((SLOW, 2.0),), lambda down, speeds: other)


def test_what_is_known_and_knows_no_speeds_is_used_only_where_it_is_better():
    # It is the first one, or a table's, in which the slow worker has as much to do as all others.
    assert PLAN((), ()) is FIRST
    shed = PLAN((), ((SLOW, 2.0),))
    assert shed is not FIRST and period_at(shed, {SLOW: 2.0}) < period_at(FIRST, {SLOW: 2.0})
