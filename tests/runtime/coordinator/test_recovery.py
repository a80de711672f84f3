from slipstream.runtime.coordinator import recovery
from slipstream.runtime.coordinator.recovery import RecoveryClock
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator.clock import Clock

ONE, OTHER = Worker(0, 0), Worker(1, 0)


def test_the_pause_and_the_time_from_commit_to_commit(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(recovery, "time", clock)
    watch = RecoveryClock()
    watch.ordered((), 0)
    for clock.now in (101.0, 102.0):
        watch.committed()
    watch.lost(ONE, "killed", 102.5)
    clock.now = 102.7
    watch.ordered((), 0)
    first = watch.end(3, live=3)
    assert first.seconds == 102.7 - 102.5 and first.commit_gap_seconds is None
    watch.lost(OTHER, "killed, too", 102.8)  # before anything was committed
    clock.now = 103.0
    watch.ordered((), 0)
    watch.end(3, live=2)
    clock.now = 104.0
    watch.committed()
    clock.now = 105.0
    watch.committed()
    assert [one.commit_gap_seconds for one in watch.recoveries] == [2.0, 2.0]


def test_a_connection_that_broke_is_named_once_and_only_where_nobody_died():
    watch = RecoveryClock()
    watch.broke(ONE, "receiving from worker 1.0 failed: reset")
    watch.broke(OTHER, "receiving from worker 0.0 failed: reset")
    first = watch.end(3, live=2)
    assert str(first).startswith("worker 0.0 lost a connection, receiving from worker 1.0 failed: reset: iteration 3")
    assert watch.end(4, live=2) is None
    watch.broke(ONE, "receiving from worker 1.0 failed: reset")
    watch.lost(OTHER, "worker 1.0 was killed", 1.0)
    assert str(watch.end(5, live=1)).startswith("worker 1.0 was killed: iteration 5 runs")
