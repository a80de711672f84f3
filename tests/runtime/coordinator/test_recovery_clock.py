from slipstream.runtime.coordinator.decisions.recovery_clock import RecoveryClock
from slipstream.schedules.schedule import Worker

ONE, OTHER = Worker(0, 0), Worker(1, 0)


def test_the_pause_and_the_time_from_commit_to_commit():
    watch = RecoveryClock().ordered((), 0, 100.0).committed(101.0).committed(102.0)
    watch = watch.lost(ONE, "killed", 102.5).ordered((), 0, 102.7).end(3, live=3, at=102.7)
    (first,) = watch.recoveries
    assert first.seconds == 102.7 - 102.5 and first.commit_gap_seconds is None
    watch = watch.lost(OTHER, "killed, too", 102.8)  # before anything was committed
    watch = watch.ordered((), 0, 103.0).end(3, live=2, at=103.0).committed(104.0).committed(105.0)
    assert [one.commit_gap_seconds for one in watch.recoveries] == [2.0, 2.0]


def test_a_connection_that_broke_is_named_once_and_only_where_nobody_died():
    watch = RecoveryClock().broke("worker 0.0 lost a connection, receiving from worker 1.0 failed: reset", 1.0)
    watch = watch.broke("worker 1.0 lost a connection, receiving from worker 0.0 failed: reset", 1.1).end(3, 2, 1.2)
    (first,) = watch.recoveries
    assert str(first).startswith("worker 0.0 lost a connection, receiving from worker 1.0 failed: reset: iteration 3")
    assert watch.end(4, live=2, at=1.3) is watch
    watch = watch.broke("worker 0.0 lost a connection, receiving from worker 1.0 failed: reset", 2.0)
    watch = watch.lost(OTHER, "worker 1.0 was killed", 1.0).end(5, live=1, at=2.2)
    assert str(watch.recoveries[-1]).startswith("worker 1.0 was killed: iteration 5 runs")
