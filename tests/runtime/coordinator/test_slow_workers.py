"""What becomes of slow workers, by reports that are made up: of workers that take so many times as long as others."""

import asyncio

from slipstream.planner.failures import FailurePlanner
from slipstream.runtime.coordinator import slow_workers
from slipstream.runtime.coordinator.planning import ScheduleService
from slipstream.runtime.coordinator.slow_workers import SlowWorkers
from slipstream.runtime.protocol.to_coordinator import Ran, SpeedMeasured
from slipstream.runtime.replay.recorder import OpTime
from slipstream.schedules.schedule import COMPUTE_KINDS, Worker
from tests.jobs import grid
from tests.runtime.running import schedule_for

JOB = grid(4, 2, 8)
FIRST = schedule_for(JOB)
LEFT_OUT, OTHER = Worker(1, 1), Worker(2, 0)


class Run:
    """Workers that train by whatever is decided; the coordinator's part is to carry decisions out at once."""

    def __init__(self):
        self.told, self.answered, self.iteration, self.order = [], asyncio.Event(), 0, 0
        service = ScheduleService(FIRST, None, self.answered.set, at_speeds=FailurePlanner(JOB, FIRST).at_speeds)
        self.slow = SlowWorkers(service, self.told.append, lambda worker: None)
        self.begin(FIRST)

    def begin(self, schedule):
        self.order, self.schedule = self.order + 1, schedule
        self.slow.order_begins(self.order, schedule, self.iteration)

    def train(self, iterations, factors):
        for _ in range(iterations):
            for worker in self.schedule.seat_of:
                self.slow.ran(Ran(worker, self.order, self.iteration, 1.0, 1.0, times(worker, factors)))
            self.iteration += 1

    async def look(self):
        """Who may come in again, once what is planned for the speeds of now is known."""
        self.answered.clear()
        self.slow.look(self.schedule, self.iteration)
        await asyncio.wait_for(self.answered.wait(), 60)
        return self.slow.look(self.schedule, self.iteration)


def times(worker, factors):
    return tuple(OpTime(kind, worker.column, 8, 0.1 * factors.get(worker, 1.0)) for kind in COMPUTE_KINDS)


def test_a_change_that_a_return_comes_before_is_told_once_it_is_decided_with_who_is_back(monkeypatch):
    monkeypatch.setattr(slow_workers, "FIRST_PAUSE_SECONDS", 600.0)

    async def play():
        run = Run()
        run.train(12, {LEFT_OUT: 100.0})
        assert not await run.look() and run.slow.decision.left_out == (LEFT_OUT,)
        run.begin(run.slow.decision.schedule)
        assert [event.left_out for event in run.told] == [(LEFT_OUT,)] and run.slow.left_out == {LEFT_OUT}
        run.train(12, {OTHER: 2.5})
        run.slow.measured(SpeedMeasured(LEFT_OUT, times(LEFT_OUT, {})))
        assert await run.look() == {LEFT_OUT} and run.slow.decision is None
        assert len(run.told) == 1, "nothing has changed yet: who comes back does so by an order of its own"
        run.begin(FIRST)
        assert not await run.look()
        run.begin(run.slow.decision.schedule)
        assert {change.worker for change in run.told[1].changes} == {OTHER}
        assert run.told[1].changed and set(run.schedule.seat_of) == set(FIRST.seat_of)

    asyncio.run(play())
