"""Workers that crash are started again, until they crash too often."""

import itertools
import os
import signal

import pytest

from slipstream.runtime.events import Joined, Noted
from slipstream.runtime.processes import process_manager
from slipstream.runtime.processes.process_manager import ProcessManager, Return
from slipstream.runtime.processes.restart_policy import (
    HOUR_SECONDS,
    LONGEST_PAUSE_SECONDS,
    NODE_FAULT_FACTOR,
    SAME_FAULT_SECONDS,
    FaultHistory,
)
from slipstream.runtime.protocol.to_coordinator import WorkerEnded
from slipstream.runtime.protocol.to_node_agent import StartWorker
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator.clock import Clock
from tests.runtime.failing import Told, tiny, train_until
from tests.runtime.pacing import Pauses

ONE = Worker(0, 0)
OTHER = Worker(0, 1)


def test_pauses_grow_up_to_the_limit_and_an_hour_later_all_is_forgotten():
    faults, pauses = FaultHistory(3), []
    for now in (0.0, 100.0, 200.0, 300.0):
        faults, (pause, reason) = faults.with_fault(ONE, [ONE], now)
        pauses.append(pause)
    assert (
        pauses == [1.0, 2.0, 4.0, None]
        and reason == "worker 0.0 stays out: 4 faults within an hour"
    )
    assert faults.with_fault(OTHER, [OTHER], 300.0)[1].pause_seconds == 1.0
    assert faults.with_fault(ONE, [ONE], 301.0 + HOUR_SECONDS)[1].pause_seconds == 1.0
    many = FaultHistory(1000)
    for now in range(20):
        many, verdict = many.with_fault(ONE, [ONE], float(now))
    assert verdict.pause_seconds == LONGEST_PAUSE_SECONDS


def test_a_node_has_one_fault_where_all_its_workers_crash_at_once_and_stays_out_after_many():
    workers, faults = [Worker(0, column) for column in range(20)], FaultHistory(2)
    for worker in workers:
        faults, verdict = faults.with_fault(worker, workers, 5.0)
    assert verdict.pause_seconds == 1.0
    for number in range(1, NODE_FAULT_FACTOR * 2 + 1):
        faults, verdict = faults.with_fault(
            workers[number], workers, 5.0 + 3 * number * SAME_FAULT_SECONDS
        )
    assert verdict.reason == "worker 0.4 stays out: its node has had 5 faults within an hour"


def test_nobody_is_started_again_where_that_is_not_wanted():
    assert FaultHistory(0).with_fault(ONE, [ONE], 0.0) == (FaultHistory(0), (None, ""))


class Local:
    def __init__(self):
        self.told = []

    def execute_command(self, command):
        self.told.append(command)


def test_a_worker_is_started_again_after_its_pause_unless_it_has_ended_well(monkeypatch):
    clock, local, notes = Clock(), Local(), []
    monkeypatch.setattr(process_manager, "time", clock)
    manager = ProcessManager(local, {ONE: 0, OTHER: 0}, faults_per_hour=1)
    manager.connect_agents(lambda *_: None, notes.append)
    manager.handle_worker_end(WorkerEnded(ONE, -9))
    manager.handle_worker_end(WorkerEnded(OTHER, 0))
    manager.restart_due_workers()
    assert not local.told
    clock.now += 1.0
    manager.restart_due_workers()
    manager.restart_due_workers()
    assert local.told == [StartWorker(ONE)]
    manager.handle_worker_end(WorkerEnded(ONE, 1))
    clock.now += 1000.0
    manager.restart_due_workers()
    assert local.told == [StartWorker(ONE)]
    assert notes == [
        "worker 0.0 is started again in 1 s: 1 fault within an hour",
        "worker 0.0 stays out: 2 faults within an hour",
    ]


@pytest.mark.parametrize("first", [0, 7])
def test_who_is_to_return_in_the_first_iteration_is_started_in_it(first):
    """Whether it was away from the start or dies then; also in a resumed run."""
    local = Local()
    manager = ProcessManager(
        local, {ONE: 0, OTHER: 0}, [Return(ONE, first), Return(OTHER, first)], absent=[ONE]
    )
    manager.begin_iteration(first)
    assert local.told == [StartWorker(ONE)]
    manager.handle_worker_end(WorkerEnded(OTHER, -9))
    assert local.told == [StartWorker(ONE), StartWorker(OTHER)]


@pytest.mark.parametrize("was_told", [False, True])
def test_who_had_crashed_when_another_coordinator_died_is_started_again(monkeypatch, was_told):
    # That one was told, and could not start it any more; or nobody was, and the node tells of it
    # now: one fault.
    clock, sent = Clock(), []
    monkeypatch.setattr(process_manager, "time", clock)
    manager = ProcessManager(Local(), {ONE: 1, OTHER: 1}, absent=[ONE, OTHER], faults_per_hour=1)
    manager.connect_agents(lambda node, command: sent.append((node, command)), lambda _: None)
    manager.record_node_adopted(1, [OTHER])
    if was_told:
        manager.handle_worker_end(WorkerEnded(ONE, -9))
    clock.now += 1.0
    manager.restart_due_workers()
    assert sent == [(1, StartWorker(ONE))]


def test_who_is_to_return_before_its_node_follows_another_node_0_is_started_after_that():
    """And who is alive there is started once it has died."""
    sent, connected = [], []
    manager = ProcessManager(
        Local(), {ONE: 1, OTHER: 1}, [Return(ONE, 3), Return(OTHER, 3)], absent=[ONE, OTHER]
    )
    manager.connect_agents(
        lambda node, command: sent.append(command) if node in connected else None, lambda _: None
    )
    manager.begin_iteration(4)
    connected.append(1)
    manager.record_node_adopted(1, [OTHER])
    manager.begin_iteration(5)
    assert sent == [StartWorker(ONE)]
    manager.handle_worker_end(WorkerEnded(OTHER, -9))
    assert sent == [StartWorker(ONE), StartWorker(OTHER)]


@pytest.mark.slow
def test_a_worker_that_somebody_kills_takes_part_again_and_the_numbers_are_the_same(
    fork_server, tmp_path
):
    iterations, pauses = itertools.count(), Pauses()

    def happened(log: Told):
        number, joined = next(iterations), log.of(Joined, ONE)
        if number == 2:
            os.kill(fork_server.pids["0.0"], signal.SIGKILL)
        pauses.wait(number > 2 and not joined)
        return joined

    log = train_until(
        happened, fork_server, tmp_path, config=tiny(iterations=10_000), faults_per_hour=2
    )
    assert "worker 0.0 is started again in 1 s: 1 fault within an hour" in [
        note.text for note in log.of(Noted)
    ]


def test_another_node_0_counts_those_of_the_one_before_it():
    """Also where the machine was started again, and another clock with it."""
    crash_counts = []
    for fault in range(3):
        manager = ProcessManager(
            None,
            {},
            faults_per_hour=2,
            crashes=crash_counts[-1] if crash_counts else (),
            keep=crash_counts.append,
        )
        said = []
        manager.connect_agents(lambda *_: None, said.append)
        manager._record_crash(ONE)
        assert len(crash_counts[-1][0][1]) == fault + 1
    assert said == ["worker 0.0 stays out: 3 faults within an hour"]
