from slipstream.runtime.coordinator.decisions.recoveries import RecoveryClock
from slipstream.schedules.schedule import Worker

ONE = Worker(0, 0)
OTHER = Worker(1, 0)


def test_the_pause_and_the_time_from_commit_to_commit():
    watch = RecoveryClock().with_order((), 0, 100.0).with_commit(101.0).with_commit(102.0)
    watch = (
        watch.with_loss(ONE, "killed", 102.5).with_order((), 0, 102.7).with_end(3, live=3, at=102.7)
    )
    (first,) = watch.recoveries
    assert first.seconds == 102.7 - 102.5 and first.commit_gap_seconds is None
    watch = watch.with_loss(OTHER, "killed, too", 102.8)  # before anything was committed
    watch = (
        watch.with_order((), 0, 103.0)
        .with_end(3, live=2, at=103.0)
        .with_commit(104.0)
        .with_commit(105.0)
    )
    assert [recovery.commit_gap_seconds for recovery in watch.recoveries] == [2.0, 2.0]


def test_a_connection_that_broke_is_named_once_and_only_where_nobody_died():
    watch = RecoveryClock().with_cause(
        "worker 0.0 lost a connection, receiving from worker 1.0 failed: reset", 1.0
    )
    watch = watch.with_cause(
        "worker 1.0 lost a connection, receiving from worker 0.0 failed: reset", 1.1
    ).with_end(3, 2, 1.2)
    (first,) = watch.recoveries
    assert str(first).startswith(
        "worker 0.0 lost a connection, receiving from worker 1.0 failed: reset: iteration 3"
    )
    assert watch.with_end(4, live=2, at=1.3) is watch
    watch = watch.with_cause(
        "worker 0.0 lost a connection, receiving from worker 1.0 failed: reset", 2.0
    )
    watch = watch.with_loss(OTHER, "worker 1.0 was killed", 1.0).with_end(5, live=1, at=2.2)
    assert str(watch.recoveries[-1]).startswith("worker 1.0 was killed: iteration 5 runs")
