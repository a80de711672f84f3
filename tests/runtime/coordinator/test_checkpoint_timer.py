"""When the run itself chooses when to save: not before the last checkpoint has paid for itself."""

from slipstream.runtime.coordinator.decisions.checkpoint_timer import LEAST_SECONDS, SHARE, CheckpointTimer

DUE = 1000.0 + LEAST_SECONDS + 1


def test_each_is_followed_by_a_pause_a_hundred_times_as_long():
    timer = CheckpointTimer(automatic=True)
    assert not timer.due(DUE), "training has not begun"
    timer = timer.order_begins(1000.0)
    assert timer.due(DUE)
    timer = timer.asked(7, DUE)
    assert not timer.due(DUE), "one at a time"
    timer = timer.saved(7, 1.5).saved(7, 2.0).saved(7, 1.0)  # the slowest counts
    assert not timer.due(DUE + 2.0 / SHARE - 1.0)
    assert timer.due(DUE + 2.0 / SHARE + 1.0)
    assert [one.seconds for one in timer.costs] == [2.0]


def test_one_that_a_failure_ended_is_soon_tried_again():
    timer = CheckpointTimer(automatic=True).order_begins(1000.0).asked(7, DUE)
    assert not timer.due(DUE) and timer.order_begins(DUE).due(DUE)


def test_where_the_workers_know_by_themselves_none_is_asked_for():
    timer = CheckpointTimer(automatic=False).order_begins(1000.0)
    assert not timer.due(1e6)
    assert len(timer.saved(7, 1.0).costs) == 1


def test_another_coordinator_waits_no_longer_than_the_one_before_it_would_have():
    """Else a run whose node 0 dies often would never have a checkpoint written."""
    timer = CheckpointTimer(automatic=True).after(7, 2.0, 1000.0).order_begins(1000.0 + 2.0 / SHARE - 1.0)
    assert not timer.due(1000.0 + 2.0 / SHARE - 1.0) and timer.due(1000.0 + 2.0 / SHARE + 1.0)
