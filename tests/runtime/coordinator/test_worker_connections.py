"""Whose silence is whose end, where workers share machines."""

import pytest
from msgspec.structs import replace

from slipstream.runtime.coordinator import heartbeat_monitor
from slipstream.runtime.coordinator.run import Run
from slipstream.runtime.coordinator.worker_connections import WorkerConnections
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.coordinator.clock import Clock
from tests.runtime.coordinator.talking import SETUP, Processes
from tests.runtime.running import schedule_for, tiny
from tests.runtime.speaking import SECRET

SCHEDULE = schedule_for(grid(3, 2, 2))
HERE, *THERE = (Worker(pipeline, 0) for pipeline in range(3))
BESIDE = [Worker(pipeline, 1) for pipeline in range(3)]
SHARES = [[HERE, BESIDE[0]], [THERE[0], BESIDE[1]], [THERE[1], BESIDE[2]]]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(heartbeat_monitor, "time", clock)
    return clock


class Killing(Processes):
    """Whose processes are killed, and because of which."""

    def __init__(self, killed):
        super().__init__()
        self._told = killed

    def kill(self, worker, rank=None):
        self._told.append((worker, rank))


class Watched:
    """All workers of three machines; those that are given up, at each look."""

    def __init__(self, clock, out, ranks=1):
        setup = replace(SETUP, nodes=3, failure_domains=tuple(map(tuple, SHARES)), heartbeat_timeout_seconds=1.0)
        self._clock, self._given_up, self._ranks, self.killed = clock, [], ranks, []
        self._workers = WorkerConnections(
            Run(schedule=SCHEDULE, setup=setup, shares=SHARES, config=tiny(tensor_parallel=ranks),
                secret=SECRET, out=out), Killing(self.killed), lambda event: None,
            lambda worker, reason, since: self._given_up.append((worker, reason, round(since, 1))))
        for worker in SCHEDULE.grid.workers():
            self._workers.ready(worker)

    def look(self, seconds, heard, but=()):
        """Look as often as one should, for so long, while these are heard, but for some of their ranks."""
        looks = []
        for _ in range(round(10 * seconds)):
            self._clock.now += 0.1
            for worker in heard:
                for rank in range(self._ranks):
                    if (worker, rank) not in but:
                        self._workers._monitor.heard((worker, rank))
            self._workers.give_up_silent()
            looks += [self._given_up[:]] if self._given_up else []
            self._given_up.clear()
        return looks


def test_all_workers_of_a_machine_that_falls_silent_are_given_up_at_once(clock, tmp_path):
    """Each has said its last word at another time."""
    watched, others = Watched(clock, tmp_path), [HERE, BESIDE[0], *SHARES[2]]
    assert watched.look(0.3, [*others, BESIDE[1]]) == []
    assert watched.look(1.5, others) == [[(THERE[0], "worker 1.0 stopped answering", 100.0),
                                          (BESIDE[1], "worker 1.1 stopped answering", 100.3)]]


def test_one_that_is_heard_shows_that_its_machine_is_there(clock, tmp_path):
    watched = Watched(clock, tmp_path)
    heard = [worker for worker in SCHEDULE.grid.workers() if worker != THERE[0]]
    assert watched.look(3.0, heard) == [[(THERE[0], "worker 1.0 stopped answering", 100.0)]]


def test_the_machine_of_node_0_is_there(clock, tmp_path):
    """As long as anybody looks."""
    watched, others = Watched(clock, tmp_path), [*SHARES[1], *SHARES[2]]
    assert watched.look(0.3, [*others, BESIDE[0]]) == []
    assert watched.look(2.0, others) == [[(HERE, "worker 0.0 stopped answering", 100.0)],
                                         [(BESIDE[0], "worker 0.1 stopped answering", 100.3)]]


def test_a_worker_is_killed_because_of_the_rank_that_is_silent(clock, tmp_path):
    """Where that is one: so it may go on without it. Where all are, nobody knows whose fault it is."""
    watched, everyone = Watched(clock, tmp_path, ranks=2), list(SCHEDULE.grid.workers())
    watched.look(2.0, [worker for worker in everyone if worker != BESIDE[2]], but=[(THERE[0], 1)])
    assert sorted(watched.killed) == [(THERE[0], 1), (BESIDE[2], None)]
