"""What becomes of a thread that does not come back when its order has ended."""

import threading
import time
from types import SimpleNamespace

import pytest

from slipstream.runtime.protocol.to_coordinator import IterationReport
from slipstream.runtime.replay.group_cache import GenerationEndedError
from slipstream.runtime.replay.stuck_calls import OPEN_CALLS, OpenCall
from slipstream.runtime.worker import generation, iteration_reports
from slipstream.runtime.worker.context import Activity
from slipstream.runtime.worker.generation import GenerationRunner, StuckDeviceError
from slipstream.runtime.worker.iteration_reports import IterationReports
from slipstream.schedules.program import build_program
from slipstream.schedules.schedule import Worker
from tests.runtime.failing import WIDE
from tests.runtime.running import schedule_for

THREAD = 1
"""No thread's."""


@pytest.fixture
def stuck(monkeypatch):
    """A generation whose thread has been in a call for ten seconds.

    Its order ended five seconds ago.
    """
    monkeypatch.setitem(OPEN_CALLS._calls, THREAD, OpenCall("receiving", time.monotonic() - 10))
    runner, calls = GenerationRunner.__new__(GenerationRunner), []
    runner._ended_at, runner._thread = time.monotonic() - 5, SimpleNamespace(ident=THREAD)
    runner._session = SimpleNamespace(
        is_quiescent=lambda: runner.over,
        release=lambda: calls.append("released"),
        reduction_threads=list,
    )
    runner._training = SimpleNamespace(free_microbatches=lambda: calls.append("freed"))
    runner._send_paused, runner.over, runner.told = calls.append, True, calls
    yield runner
    OPEN_CALLS._abandoned.discard(THREAD)


def test_it_is_left_behind_with_nothing(stuck):
    stuck.abandon_if_stuck()
    assert stuck.told == ["freed", "released", "stuck while receiving"]


def test_it_is_not_left_behind_while_the_device_may_write_what_the_worker_holds(stuck, monkeypatch):
    """The process ends instead, if that goes on."""
    stuck.over = False
    stuck.abandon_if_stuck()
    assert not stuck.told
    monkeypatch.setattr(generation, "ABORT_SECONDS", 4.0)
    with pytest.raises(StuckDeviceError, match="after an abort"):
        stuck.abandon_if_stuck()
    assert not stuck.told


def test_a_report_is_not_waited_for_once_the_order_has_ended(monkeypatch):
    # Members are acknowledged only with one that runs no micro-batch, which may have died before it
    # has reported.
    monkeypatch.setattr(iteration_reports, "ANSWER_SECONDS", 0.01)
    runner = GenerationRunner.__new__(GenerationRunner)
    runner._session, runner._context = (
        SimpleNamespace(abort=lambda: None),
        SimpleNamespace(group=None),
    )
    runner._reports = IterationReports(
        SimpleNamespace(
            order=SimpleNamespace(first_iteration=7),
            activity=SimpleNamespace(doing="", set_activity=lambda _: None),
            context=SimpleNamespace(reporter=SimpleNamespace(gathered=False)),
        )
    )
    runner._reports._open = IterationReport(Worker(0, 0), 1, 7, 1.0, 0.1)
    runner.end_order()
    with pytest.raises(GenerationEndedError):
        runner._reports.wait_until_acknowledged()


def test_a_worker_that_waits_says_for_whom():
    activity, program = Activity(), build_program(schedule_for(WIDE), Worker(0, 0))
    activity.set_activity("waits for layers to move", [Worker(1, 0)])
    status = activity.build_status(Worker(0, 0), program, None)
    assert status.waits and status.awaited == (Worker(1, 0),)
    activity.set_activity((3, 0))
    OPEN_CALLS.enter_call("receiving from worker 0.1", [Worker(0, 1)])
    try:
        status = activity.build_status(Worker(0, 0), program, threading.get_ident())
    finally:
        OPEN_CALLS.leave_call()
    assert status.waits and status.awaited == (Worker(0, 1),)
    assert status.doing.startswith("iteration 3, 0F0.0: receiving")
    status = activity.build_status(Worker(0, 0), program, threading.get_ident())
    assert not status.waits and status.awaited == ()
