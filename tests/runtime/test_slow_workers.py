"""Workers that really compute longer are found and relieved.

The numbers are those of one process all the same.

What is measured is noise on a busy machine. Where only what follows from it is tested, ops take as
long as `speeds` has it; nothing is expected within a number of iterations.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from benchmarks.sleeping import MODEL, TRAINING, sleeping
from slipstream.planner.failures import FailurePlanner
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.coordinator.decisions import slow_detector, slow_workers
from slipstream.runtime.coordinator.decisions.rebalancing import Rebalancing
from slipstream.runtime.coordinator.decisions.slow_detector import SlowDetector
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent
from slipstream.runtime.events import (
    Failed,
    HandedOver,
    LeftOut,
    Noted,
    OrderGiven,
    Recovered,
    SettlingChosen,
    Slowed,
    WentBack,
)
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.protocol.failure_injection import Slowdown, find_slowdown_factor
from slipstream.runtime.worker.injected_faults import prolong_block
from slipstream.schedules.files import write_atomically
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import Planning, dead, train, train_until
from tests.runtime.forked import own_fork_server
from tests.runtime.running import schedule_for

JOB = grid(3, 2, 4, more="optimizer = 1")
SLOW = Worker(1, 1)
AT_SPEEDS = FailurePlanner(JOB, schedule_for(JOB), None).at_speeds
MOST = 5000
"""Iterations: no run takes so many."""
CONFIG = parse_run_config(
    {**MODEL, "blocks": 2}, {**TRAINING, "iterations": MOST, "dtype": "float64"}
)
OP_SECONDS = 0.005
"""Seconds of ops that sleep.

Other processes on this machine make none of them much longer than another.
"""
USUAL = 8
"""Iterations before somebody becomes slow."""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Each iteration is an observation, although it takes milliseconds."""
    monkeypatch.setattr(slow_detector, "OBSERVATION_SECONDS", 0.0)


@contextmanager
def fork_server_of_sleepers(slow: Path | None = None) -> Iterator[ForkServer]:
    """Ops of its workers sleep, as `sleeping` says; those of this process do not."""
    with sleeping(*4 * [OP_SECONDS], slow=slow):
        fork_server = own_fork_server(sleeping.__module__)
    with fork_server, sleeping(0, 0, 0, 0):
        yield fork_server


@pytest.fixture
def fork_server_of_idlers() -> Iterator[ForkServer]:
    """Ops take no time."""
    with sleeping(0, 0, 0, 0), own_fork_server(sleeping.__module__) as fork_server:
        yield fork_server


@pytest.fixture
def speeds(monkeypatch) -> dict[Worker, float]:
    """By how much longer workers take than planned: this is what is measured."""
    factors: dict[Worker, float] = {}
    observe = SlowDetector.add_iteration

    def as_given(detector, iteration, seconds, measured):
        slowed = {}
        for worker, cells in measured.items():
            factor = factors.get(worker, 1.0)
            slowed[worker] = [
                cell._replace(seconds=cell.planned_seconds * factor) for cell in cells
            ]
        return observe(detector, iteration, seconds, slowed)

    monkeypatch.setattr(SlowDetector, "add_iteration", as_given)
    return factors


def after(iterations: int, act: Callable[[], object]) -> Callable[[], None]:
    """To be called after each iteration: does something once so many are over."""
    iterations_left = [iterations]

    def count() -> None:
        iterations_left[0] -= 1
        if iterations_left[0] == 0:
            act()

    return count


def changes_of(log):
    return [
        (event, change)
        for event in log.speed_events
        for change in event.changes
        if change.worker == SLOW
    ]


def test_work_is_shed_and_given_back(tmp_path, monkeypatch):
    """The worker sleeps longer, and that is measured."""
    # it may be left out where it seems to be very slow
    monkeypatch.setattr(slow_workers, "FIRST_EXCLUSION_SECONDS", 0.2)
    slow = tmp_path / "slow"
    slow.mkdir()
    with fork_server_of_sleepers(slow) as fork_server:

        def file():
            return slow / str(fork_server.pids[str(SLOW)])

        def happened(log):
            begins()
            if any(event.changed and change.factor > 1 for event, change in changes_of(log)):
                file().unlink(missing_ok=True)
            return log.of(Recovered, SLOW)

        begins = after(USUAL, lambda: write_atomically(file(), b"2.2"))
        log = train_until(
            happened, fork_server, tmp_path / "out", job=JOB, config=CONFIG, at_speeds=AT_SPEEDS
        )
    found = changes_of(log)
    event, change = next(
        (event, change) for event, change in found if change.factor > 1 and event.changed
    )
    assert change.since >= 1 and event.planned_seconds < event.present_seconds
    assert str(event).startswith(f"worker {SLOW} takes ") and "instead of" in str(event)
    assert any(change.factor == 1.0 for _, change in found)
    assert not any(recovery.dead for recovery in log.recoveries), (
        "no recovery: it changes between two iterations"
    )
    assert log.of(Slowed, SLOW)


def test_without_a_scheduler_for_speeds_they_are_told_of(tmp_path):
    with fork_server_of_sleepers() as fork_server:
        log = train_until(
            changes_of,
            fork_server,
            tmp_path,
            job=JOB,
            config=CONFIG,
            slowdowns=(Slowdown(SLOW, USUAL, 4.0),),
        )
    event, change = changes_of(log)[0]
    assert change.factor > 1 and not event.changed and "the schedule stays" in str(event)
    assert [note.text for note in log.of(Noted) if "on purpose" in note.text] == [
        f"worker {SLOW} takes 4 times as long from iteration {USUAL} on, on purpose"
    ]


def test_a_worker_that_gains_next_to_nothing_is_left_out_with_the_reason():
    event = SpeedEvent(
        changes=(),
        iteration=9,
        present_seconds=0.3,
        planned_seconds=0.187,
        left_out=(SLOW,),
        with_them_seconds=0.187,
    )
    assert str(event).endswith(
        "it would shorten an iteration by less than 1%, and all would wait for it"
    )
    assert str(replace(event, with_them_seconds=0.25)).endswith("0.25 s with it, instead of 0.3 s")


def test_one_that_is_left_out_comes_back_after_a_pause(
    speeds, fork_server_of_idlers, tmp_path, monkeypatch
):
    monkeypatch.setattr(slow_workers, "FIRST_EXCLUSION_SECONDS", 0.2)
    begins = after(USUAL, lambda: speeds.update({SLOW: 20.0}))

    def happened(log):
        begins()
        if log.of(LeftOut, SLOW):
            speeds.clear()
        return any(SLOW in recovery.returned for recovery in log.recoveries)

    log = train_until(
        happened, fork_server_of_idlers, tmp_path, job=JOB, config=CONFIG, at_speeds=AT_SPEEDS
    )
    events = [event for event in log.speed_events if SLOW in event.left_out]
    assert events and "is left out from iteration" in str(events[0])
    back = next(recovery for recovery in log.recoveries if SLOW in recovery.returned)
    assert back.iteration > events[0].iteration


@pytest.mark.usefixtures("plans_here")
def test_a_death_meanwhile_is_planned_for_with_the_speeds_that_are_known(
    speeds, fork_server_of_idlers, tmp_path
):
    asked, killed, begins = [], [], after(USUAL, lambda: speeds.update({SLOW: 2.2}))

    def at_speeds(down, speeds):
        asked.append((down, dict(speeds)))
        return AT_SPEEDS(down, speeds)

    def happened(log):
        begins()
        if changes_of(log) and not killed:
            killed.append(fork_server_of_idlers.pids["2.0"])
            os.kill(killed[0], signal.SIGKILL)
        return log.recoveries

    log = train_until(
        happened, fork_server_of_idlers, tmp_path, job=JOB, config=CONFIG, at_speeds=at_speeds
    )
    assert dead(log) == ["2.0"]
    assert any(down == (Worker(2, 0),) and SLOW in speeds for down, speeds in asked)


def test_layers_move_to_the_others_and_back_once_it_has_recovered(
    speeds, fork_server_of_idlers, tmp_path
):
    # First work is shed, then it settles for these speeds; and for the usual ones again.
    job, slow = grid(2, 2, 4, more="optimizer = 1\n[placement]\nlayers = [4, 4]"), Worker(1, 0)
    config = parse_run_config(
        {**MODEL, "blocks": 8}, {**TRAINING, "iterations": MOST, "dtype": "float64"}
    )
    begins = after(USUAL, lambda: speeds.update({slow: 3.0}))

    def happened(log):
        begins()
        if log.of(HandedOver):
            speeds.clear()
        orders = log.of(OrderGiven)
        back = orders[-1].phase == "whole" and orders[-1].schedule == orders[0].schedule
        return log.of(Recovered, slow) and back

    log = train_until(
        happened,
        fork_server_of_idlers,
        tmp_path,
        job=job,
        config=config,
        settling=Rebalancing(),
        rebalancer=Planning(job),
        at_speeds=FailurePlanner(job, schedule_for(job), None).at_speeds,
    )
    kinds, orders = [type(event) for event in log.events], log.of(OrderGiven)
    chosen = next(choice for choice in log.of(SettlingChosen) if choice.settles)
    assert (
        "settled" in [order.phase for order in orders]
        and chosen.settled_period < chosen.present_period
    )
    assert (
        kinds.index(Slowed)
        < log.events.index(chosen)
        < kinds.index(HandedOver)
        < kinds.index(Recovered)
    )
    assert orders[-1].phase == "whole" and orders[-1].schedule == orders[0].schedule
    assert not {Failed, WentBack} & set(kinds)


def test_a_model_with_dropout_has_the_same_numbers_with_shed_work(fork_server, tmp_path):
    job = grid(3, 2, 4, more=f'optimizer = 1\nslow = {{"{SLOW}" = 2.0}}')
    assert schedule_for(job).shed > 0
    train([], fork_server, tmp_path, job=job, slowdowns=(Slowdown(SLOW, 0, 2.0),))


def test_a_slowdown_lasts_until_the_next():
    slowdowns = [Slowdown(SLOW, 10, 1.0), Slowdown(SLOW, 4, 2.0)]
    assert [find_slowdown_factor(slowdowns, iteration) for iteration in (0, 3, 4, 9, 10, 99)] == [
        1,
        1,
        2,
        2,
        1,
        1,
    ]


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_what_computes_computes_longer_and_what_sleeps_sleeps_longer(factor):
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # what the first one loads does not count
    with prolong_block(factor, CPU):
        began = time.thread_time()  # within, so that what lasts longer is at least this
        while time.thread_time() - began < 0.2:
            pass
        computed = time.thread_time() - began
    assert computed * factor <= time.thread_time() - began < computed * factor + 0.1
    began, busy = time.perf_counter(), time.thread_time()
    with prolong_block(factor, CPU):
        time.sleep(0.02)
    assert time.perf_counter() - began >= 0.02 * factor * 0.99 and time.thread_time() - busy < 0.03
