"""When the run itself chooses when to save.

It is not before the last checkpoint has paid for itself.
"""

from slipstream.runtime.coordinator.decisions.commit_log import (
    MAX_TIME_SHARE,
    MIN_INTERVAL_SECONDS,
    CheckpointTimer,
)

DUE = 1000.0 + MIN_INTERVAL_SECONDS + 1


def test_each_is_followed_by_a_pause_a_hundred_times_as_long():
    timer = CheckpointTimer(automatic=True)
    assert not timer.is_due(DUE), "training has not begun"
    timer = timer.with_order(1000.0)
    assert timer.is_due(DUE)
    timer = timer.with_request(7, DUE)
    assert not timer.is_due(DUE), "one at a time"
    timer = timer.with_saved(7, 1.5).with_saved(7, 2.0).with_saved(7, 1.0)  # the slowest counts
    assert not timer.is_due(DUE + 2.0 / MAX_TIME_SHARE - 1.0)
    assert timer.is_due(DUE + 2.0 / MAX_TIME_SHARE + 1.0)
    assert [cost.seconds for cost in timer.checkpoint_costs] == [2.0]


def test_one_that_a_failure_ended_is_soon_tried_again():
    timer = CheckpointTimer(automatic=True).with_order(1000.0).with_request(7, DUE)
    assert not timer.is_due(DUE) and timer.with_order(DUE).is_due(DUE)


def test_where_the_workers_know_by_themselves_none_is_asked_for():
    timer = CheckpointTimer(automatic=False).with_order(1000.0)
    assert not timer.is_due(1e6)
    assert len(timer.with_saved(7, 1.0).checkpoint_costs) == 1


def test_another_coordinator_waits_no_longer_than_the_one_before_it_would_have():
    """Else a run whose node 0 dies often would never have a checkpoint written."""
    timer = (
        CheckpointTimer(automatic=True)
        .with_checkpoint(7, 2.0, 1000.0)
        .with_order(1000.0 + 2.0 / MAX_TIME_SHARE - 1.0)
    )
    assert not timer.is_due(1000.0 + 2.0 / MAX_TIME_SHARE - 1.0) and timer.is_due(
        1000.0 + 2.0 / MAX_TIME_SHARE + 1.0
    )
