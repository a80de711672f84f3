"""Schedules are found in threads.

The one that all wait for waits for no other.
"""

import asyncio
import threading

from slipstream.runtime.coordinator.decisions.effects import ScheduleRequest
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedRequest
from slipstream.runtime.coordinator.planning import schedule_finder
from slipstream.runtime.coordinator.planning.schedule_finder import (
    NoScheduleError,
    SchedulePlanners,
    ScheduleService,
)
from slipstream.schedules.schedule import Worker
from tests.general import layers_moved
from tests.jobs import grid
from tests.runtime.coordinator.clock import Clock
from tests.runtime.failing import Planning
from tests.runtime.running import schedule_for
from tests.runtime.speaking import until

JOB = grid(2, 2, 2)
FIRST = schedule_for(JOB, [])
JOIN = ScheduleRequest(())
DEATH = ScheduleRequest((Worker(1, 1),))
LATER = ScheduleRequest((Worker(1, 0), Worker(1, 1)))


class Asked:
    """A service, and its answers as they come."""

    def __init__(self, scheduler, **options) -> None:
        self.answers, self.came = {}, asyncio.Event()
        self.service = ScheduleService(
            FIRST.grid, SchedulePlanners(scheduler), self.found, **options
        )

    def found(self, found) -> None:
        self.answers[found.question] = found.answer
        self.came.set()

    async def answer(self, question):
        """Asks again after each answer, as the state does."""
        while question not in self.answers:
            self.service.request_schedule(question)
            self.came.clear()
            if question not in self.answers:
                await asyncio.wait_for(self.came.wait(), 20)
        return self.answers[question]


def test_a_death_does_not_wait_for_the_plan_of_a_join():
    """Nor is more planned than two at a time."""
    release, asked = threading.Event(), []

    def scheduler(down):
        asked.append(down)
        if down != DEATH.down:
            release.wait(20)
        return schedule_for(JOB, list(map(str, down)))

    async def script():
        finder = Asked(scheduler)
        for question in (JOIN, DEATH, LATER, DEATH):
            finder.service.request_schedule(question)
        await finder.answer(DEATH)
        await until(lambda: len(asked) == 2)
        assert JOIN not in finder.answers and sorted(asked) == sorted([JOIN.down, DEATH.down])
        finder.service.request_schedule(LATER)
        release.set()
        await finder.answer(JOIN)
        await finder.answer(LATER)
        assert asked[2:] == [LATER.down]

    asyncio.run(script())


def test_plans_that_hang_do_not_hold_up_the_one_that_is_needed(monkeypatch):
    release, clock = threading.Event(), Clock()
    monkeypatch.setattr(schedule_finder, "time", clock)

    def scheduler(down):
        if down != LATER.down:
            release.wait(20)
        return schedule_for(JOB, list(map(str, down)))

    async def script():
        finder = Asked(scheduler)
        for question in (JOIN, DEATH):
            finder.service.request_schedule(question)
        clock.now += schedule_finder.STUCK_REQUEST_SECONDS + 1
        assert (
            await finder.answer(LATER)
        ).schedule.failed == LATER.down and finder.answers.keys() == {LATER}
        release.set()

    asyncio.run(script())


def test_what_the_scheduler_raises_is_the_answer():
    def scheduler(_):
        raise NoScheduleError("none")

    async def script():
        answer = await Asked(scheduler).answer(DEATH)
        assert isinstance(answer, NoScheduleError) and str(answer) == "none"
        assert isinstance(await Asked(None).answer(DEATH), NoScheduleError)

    asyncio.run(script())


def test_for_speeds_nothing_moves_that_workers_hold():
    rebalancer, moved = Planning(JOB), layers_moved()
    service = ScheduleService(
        FIRST.grid,
        SchedulePlanners(schedule_for, rebalancer.plan_at_once, rebalancer),
        lambda _: None,
    )

    def planner(present):
        return service._choose_speed_planner(SpeedRequest(1, present, ()))

    assert planner(FIRST) == rebalancer.plan_at_once and planner(moved) != rebalancer.plan_at_once
