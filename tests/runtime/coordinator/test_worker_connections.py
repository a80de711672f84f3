"""Whose silence is whose end, where workers share machines."""

import pytest

from slipstream.runtime.coordinator.connections import worker_connections
from slipstream.runtime.coordinator.connections.server import Connection, Server
from slipstream.runtime.coordinator.connections.worker_connections import WorkerConnections
from slipstream.runtime.coordinator.decisions.run_state import RunFacts
from slipstream.runtime.coordinator.run_options import RunRequest
from slipstream.runtime.coordinator.run_spec import RunSpec
from slipstream.runtime.protocol.to_coordinator import JoinWorker
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.coordinator.clock import Clock
from tests.runtime.coordinator.talking import Processes, setup_with
from tests.runtime.running import schedule_for, tiny
from tests.runtime.speaking import SECRET

SCHEDULE = schedule_for(grid(3, 2, 2))
HERE, *THERE = (Worker(pipeline, 0) for pipeline in range(3))
BESIDE = [Worker(pipeline, 1) for pipeline in range(3)]
SHARES = [[HERE, BESIDE[0]], [THERE[0], BESIDE[1]], [THERE[1], BESIDE[2]]]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(worker_connections, "time", clock)
    return clock


class Killing(Processes):
    """Whose processes are killed."""

    def __init__(self, killed):
        super().__init__()
        self._told = killed

    def kill_worker(self, worker):
        self._told.append(worker)


def connected(worker, rank):
    """A connection of a worker's process, over which nothing is sent."""
    connection = Connection(Server(SECRET, lambda *_: None, print, 0))
    connection.peer, connection.rank = worker, rank
    return connection


class Watched:
    """All workers of three machines; those that are given up, at each look."""

    def __init__(self, clock, out, ranks=1):
        setup = setup_with(
            nodes=3, failure_domains=tuple(map(tuple, SHARES)), heartbeat_timeout_seconds=1.0
        )
        self._clock, self._given_up, self.killed = clock, [], []
        self._workers = WorkerConnections(
            RunSpec(
                request=RunRequest(schedule=SCHEDULE, config=tiny(tensor_parallel=ranks), out=out),
                setup=setup,
                facts=RunFacts(shares=SHARES),
            ),
            Killing(self.killed),
            lambda event: None,
            lambda worker, reason, since: self._given_up.append((worker, reason, round(since, 1))),
        )
        self._processes = [
            connected(worker, rank) for worker in SCHEDULE.grid.workers() for rank in range(ranks)
        ]
        for process in self._processes:
            assert self._workers.admit_process(process, JoinWorker(process.peer, rank=process.rank))
        for worker in SCHEDULE.grid.workers():
            self._workers.expect_heartbeats(worker)

    def end(self, worker):
        """The connection of a worker has ended, and its process may live."""
        assert self._workers.handle_disconnect(
            next(process for process in self._processes if process.peer == worker)
        )
        assert worker not in self._workers

    def look(self, seconds, heard, but=(), pause=0.1):
        """Look at an interval for so long, while these workers are heard.

        Some of their ranks may not be.
        """
        looks = []
        for _ in range(round(seconds / pause)):
            self._clock.now += pause
            for process in self._processes:
                if process.peer in heard and (process.peer, process.rank) not in but:
                    self._workers.record_sign_of_life(process)
            self._workers.give_up_silent()
            looks += [self._given_up[:]] if self._given_up else []
            self._given_up.clear()
        return looks


def test_all_workers_of_a_machine_that_falls_silent_are_given_up_at_once(clock, tmp_path):
    """Each has said its last word at another time."""
    watched, others = Watched(clock, tmp_path), [HERE, BESIDE[0], *SHARES[2]]
    assert watched.look(0.3, [*others, BESIDE[1]]) == []
    assert watched.look(1.5, others) == [
        [
            (THERE[0], "worker 1.0 stopped answering", 100.0),
            (BESIDE[1], "worker 1.1 stopped answering", 100.3),
        ]
    ]


def test_one_that_is_heard_shows_that_its_machine_is_there(clock, tmp_path):
    watched = Watched(clock, tmp_path)
    heard = [worker for worker in SCHEDULE.grid.workers() if worker != THERE[0]]
    assert watched.look(3.0, heard) == [[(THERE[0], "worker 1.0 stopped answering", 100.0)]]


def test_the_machine_of_node_0_is_there(clock, tmp_path):
    """As long as anybody looks."""
    watched, others = Watched(clock, tmp_path), [*SHARES[1], *SHARES[2]]
    assert watched.look(0.3, [*others, BESIDE[0]]) == []
    assert watched.look(2.0, others) == [
        [(HERE, "worker 0.0 stopped answering", 100.0)],
        [(BESIDE[0], "worker 0.1 stopped answering", 100.3)],
    ]


def test_a_worker_is_killed_where_one_of_its_ranks_is_silent(clock, tmp_path):
    watched, everyone = Watched(clock, tmp_path, ranks=2), list(SCHEDULE.grid.workers())
    watched.look(2.0, [worker for worker in everyone if worker != BESIDE[2]], but=[(THERE[0], 1)])
    assert sorted(watched.killed) == [THERE[0], BESIDE[2]]


def test_who_is_silent_is_told_also_where_this_process_never_gets_to_look_in_time(clock, tmp_path):
    watched, everyone = Watched(clock, tmp_path), list(SCHEDULE.grid.workers())
    (missed,) = watched.look(6.0, [worker for worker in everyone if worker != THERE[0]], pause=0.4)
    assert [worker for worker, *_ in missed] == [THERE[0]]


def test_time_in_which_this_process_did_not_listen_is_nobodys_fault(clock, tmp_path):
    watched = Watched(clock, tmp_path)
    assert watched.look(60.0, [], pause=60.0) == [] and watched.look(0.8, []) == []
    assert watched.look(0.4, [])


def test_one_whose_connection_has_ended_and_whose_process_lives_is_missed_like_any(clock, tmp_path):
    # Else all would wait for it without end: it may have been cut off, or its network be gone.
    watched, everyone = Watched(clock, tmp_path), list(SCHEDULE.grid.workers())
    watched.end(THERE[0])
    assert watched.look(2.0, [worker for worker in everyone if worker != THERE[0]]) == [
        [(THERE[0], "worker 1.0 stopped answering", 100.0)]
    ]
