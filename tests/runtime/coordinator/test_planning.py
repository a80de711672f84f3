"""Schedules are found in threads, and the one that all wait for waits for no other."""

import asyncio
import threading

import pytest

from slipstream.runtime.coordinator import planning
from slipstream.runtime.coordinator.planning import Finders, NoScheduleError, ScheduleService
from slipstream.schedules.schedule import Worker
from tests.general import layers_moved
from tests.jobs import grid
from tests.runtime.coordinator.clock import Clock
from tests.runtime.failing import Planning
from tests.runtime.running import schedule_for

JOB = grid(2, 2, 2)
JOIN, DEATH, LATER = (), (Worker(1, 1),), (Worker(1, 0), Worker(1, 1))


def test_a_death_does_not_wait_for_the_plan_of_a_join():
    """Nor is more planned than two at a time."""
    release, asked = threading.Event(), []

    def scheduler(down):
        asked.append(down)
        if down != DEATH:
            release.wait(20)
        return schedule_for(JOB, list(map(str, down)))

    async def script():
        answers = asyncio.Event()
        service = ScheduleService(schedule_for(JOB, []), scheduler, answers.set)
        assert service.get(JOIN) is None and service.get(DEATH) is None and service.get(LATER) is None
        assert service.get(DEATH) is None
        await asyncio.wait_for(answers.wait(), 20)
        assert service.get(DEATH) is not None and service.get(JOIN) is None
        assert asked == [JOIN, DEATH]
        assert service.get(LATER) is None
        release.set()
        while service.get(JOIN) is None or service.get(LATER) is None:
            answers.clear()
            await asyncio.wait_for(answers.wait(), 20)
        assert asked == [JOIN, DEATH, LATER]
        service.forget()
        assert service.get(DEATH) is None

    asyncio.run(script())


def test_plans_that_hang_do_not_hold_up_the_one_that_is_needed(monkeypatch):
    release, clock = threading.Event(), Clock()
    monkeypatch.setattr(planning, "time", clock)

    def scheduler(down):
        if down != LATER:
            release.wait(20)
        return schedule_for(JOB, list(map(str, down)))

    async def script():
        answers = asyncio.Event()
        service = ScheduleService(schedule_for(JOB, []), scheduler, answers.set)
        assert service.get(JOIN) is None and service.get(DEATH) is None and service.get(LATER) is None
        clock.now += planning.STUCK_SECONDS + 1
        assert service.get(LATER) is None
        await asyncio.wait_for(answers.wait(), 20)
        assert service.get(LATER) is not None
        release.set()

    asyncio.run(script())


def test_what_the_scheduler_raises_is_raised():
    def scheduler(_):
        raise NoScheduleError("none")

    async def script():
        answered = asyncio.Event()
        service = ScheduleService(schedule_for(JOB, []), scheduler, answered.set)
        assert service.get(DEATH) is None
        await asyncio.wait_for(answered.wait(), 20)
        with pytest.raises(NoScheduleError, match="none"):
            service.get(DEATH)

    asyncio.run(script())


def test_a_run_that_has_nothing_for_speeds_plans_for_none_where_layers_have_moved_either():
    """Else it would change between a schedule for a slow worker and a settled one, which is not for it, for ever."""
    first = schedule_for(JOB, [])
    rebalancer, moved = Planning(JOB), layers_moved()
    without = ScheduleService(first, schedule_for, lambda: None, rebalancer=rebalancer)
    given = ScheduleService(first, schedule_for, lambda: None, at_speeds=rebalancer.at_once, rebalancer=rebalancer)
    assert without.planner_at_speeds(moved) is None and without.planner_at_speeds(first) is None
    assert given.planner_at_speeds(moved) not in {None, rebalancer.at_once}
    assert given.planner_at_speeds(first) == rebalancer.at_once


def test_while_workers_go_on_as_half_their_processes_others_are_asked():
    """Also for all workers, and for none of those that are dead or whole again."""
    asked, first = [], schedule_for(JOB, [])

    def with_degraded(workers):
        asked.append(workers)
        return Finders(lambda down: schedule_for(JOB, list(map(str, down))))

    async def answer(service, live):
        while (found := service.for_workers(live)) is None:
            await asyncio.sleep(0.01)
        return found

    async def script():
        service = ScheduleService(first, lambda _: first, lambda: None, with_degraded=with_degraded)
        everyone = [seat.worker for seat in first.seats]
        assert await answer(service, everyone) is first
        service.stand_for = {Worker(0, 1): 2, Worker(1, 1): 2, Worker(0, 0): 1}
        assert await answer(service, everyone) is not first and asked == [(Worker(0, 1), Worker(1, 1))]
        left = [worker for worker in everyone if worker not in DEATH]
        assert (await answer(service, left)).failed == DEATH and asked[1:] == [(Worker(0, 1),)]

    asyncio.run(script())
