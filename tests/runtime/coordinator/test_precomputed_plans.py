"""Schedules for the failures that may come next are planned ahead.

Workers that may change places are planned for once.
"""

from slipstream.runtime.coordinator.planning.background import capture_result
from slipstream.runtime.coordinator.planning.precomputed_plans import FailurePrecomputer
from slipstream.runtime.failure_domains import NO_SHARED_DOMAINS, FailureDomains
from slipstream.schedules.check import check
from slipstream.schedules.schedule import NoScheduleError, Worker
from slipstream.schedules.shares import divide_schedule
from tests.general import layers_moved
from tests.jobs import grid
from tests.runtime.running import schedule_for

JOB = grid(4, 3, 4)
FIRST = schedule_for(JOB, [])


class Ahead:
    """What is asked for, and when."""

    def __init__(self, domains=NO_SHARED_DOMAINS, scheduler=None):
        self.asked, self.waiting = [], []
        self.ahead = FailurePrecomputer(
            FIRST, scheduler or self._schedule, self._later, domains, divide_schedule
        )

    def _schedule(self, down):
        self.asked.append(down)
        return schedule_for(JOB, list(map(str, down)))

    def _later(self, work, done, *, awaited):
        assert not awaited and not self.waiting  # one at a time
        self.waiting.append((work, done))

    def plan(self, schedule, limit=100):
        self.ahead.precompute_for(schedule)
        while self.waiting and limit:
            work, done = self.waiting.pop()
            done(capture_result(work))
            limit -= 1


def test_one_answer_for_each_stage_does_for_all_pipelines():
    plans = Ahead()
    plans.plan(FIRST)
    assert len(plans.asked) == 3
    for worker in FIRST.grid.workers():
        found, parts = plans.ahead.find_plan((worker,))
        assert found.failed == parts.failed == (worker,) and not check(found) and not found.moves
        assert parts.shares.keys() == found.seat_of.keys()
        assert found.period_ticks == schedule_for(JOB, [str(worker)]).period_ticks
    assert len(plans.asked) == 3


def test_the_likeliest_failures_come_first_and_what_is_not_known_is_asked_for():
    machines = FailureDomains([Worker(pipeline, 0), Worker(pipeline, 1)] for pipeline in range(4))
    plans = Ahead(machines)
    plans.plan(FIRST, 3)
    assert {failure[0].column for failure in plans.asked} == {0, 1, 2}
    assert all(len(failure) == 1 for failure in plans.asked)
    down = machines.workers_failing_with(Worker(2, 1))
    assert plans.ahead.find_plan(down) is None
    plans.plan(FIRST)
    asked = len(plans.asked)
    assert asked == 4  # and a machine's
    assert (
        plans.ahead.find_plan(machines.workers_failing_with(Worker(3, 1)))
        and len(plans.asked) == asked
    )
    plans.plan(schedule_for(JOB, ["1.1"]))
    assert (
        plans.ahead.find_plan((Worker(0, 0), Worker(2, 1))) and Worker(1, 1) in plans.asked[asked]
    )


def test_what_has_no_answer_is_asked_for_once():
    def scheduler(down):
        asked.append(down)
        raise NoScheduleError("none")

    asked = []
    plans = Ahead(scheduler=scheduler)
    plans.plan(FIRST)
    plans.plan(FIRST)
    assert len(asked) == 3
    assert plans.ahead.find_plan((Worker(0, 0),)) is None


def test_nothing_is_planned_ahead_where_layers_have_moved():
    plans = Ahead()
    plans.plan(FIRST, 1)
    plans.plan(layers_moved())
    assert len(plans.asked) <= 2
