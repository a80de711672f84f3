import pytest

from slipstream.runtime.coordinator import heartbeat_monitor
from slipstream.runtime.coordinator.heartbeat_monitor import HeartbeatMonitor
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator.clock import Clock

LEFT, RIGHT = Worker(0, 0), Worker(1, 0)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(heartbeat_monitor, "time", clock)
    return clock


def look(monitor, clock, seconds, heard=()):
    """Look as often as one should, hearing some meanwhile; those that were missed."""
    missed = []
    for _ in range(round(seconds / monitor.interval_seconds)):
        clock.now += monitor.interval_seconds
        for worker in heard:
            monitor.heard(worker)
        missed += monitor.missed()
    return missed


def test_who_is_silent_for_longer_than_the_timeout_is_told_with_the_time_when_it_was_heard(clock):
    monitor = HeartbeatMonitor(1.0)
    monitor.add(LEFT)
    monitor.add(RIGHT)
    assert look(monitor, clock, 0.9, [LEFT]) == []
    assert look(monitor, clock, 0.3, [LEFT])[0] == (RIGHT, 100.0)
    monitor.remove(RIGHT)
    assert look(monitor, clock, 3.0, [LEFT]) == [] and LEFT in monitor and RIGHT not in monitor


def test_who_is_silent_is_told_also_where_this_process_never_gets_to_look_in_time(clock):
    monitor = HeartbeatMonitor(1.0)
    monitor.add(LEFT)
    monitor.add(RIGHT)
    missed = set()
    for _ in range(15):
        clock.now += 4 * monitor.interval_seconds
        monitor.heard(LEFT)
        missed |= {worker for worker, _ in monitor.missed()}
    assert missed == {RIGHT}


def test_time_in_which_this_process_did_not_listen_is_nobodys_fault(clock):
    monitor = HeartbeatMonitor(1.0)
    monitor.add(LEFT)
    clock.now += 60
    assert monitor.missed() == [] and look(monitor, clock, 0.8) == []
    assert look(monitor, clock, 0.4)
