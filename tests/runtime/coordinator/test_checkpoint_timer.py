"""When the run chooses when to save: not before the last checkpoint has paid for itself."""

import pytest

from slipstream.runtime.coordinator import checkpoint_timer
from slipstream.runtime.coordinator.checkpoint_timer import LEAST_SECONDS, SHARE, CheckpointTimer
from tests.runtime.coordinator.clock import Clock


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(1000.0)
    monkeypatch.setattr(checkpoint_timer, "time", clock)
    return clock


def test_each_is_followed_by_a_pause_a_hundred_times_as_long(clock):
    timer = CheckpointTimer(automatic=True)
    assert not timer.due(), "training has not begun"
    timer.order_begins()
    clock.now += LEAST_SECONDS + 1
    assert timer.due()
    timer.asked(7)
    assert not timer.due(), "one at a time"
    clock.now += 2.0
    timer.saved(7, 1.5)
    timer.saved(7, 2.0)  # the slowest counts
    clock.now += 2.0 / SHARE - 3.0
    assert not timer.due()
    clock.now += 2.0
    assert timer.due()
    assert [one.seconds for one in timer.costs] == [2.0]


def test_one_that_a_failure_ended_is_soon_tried_again(clock):
    timer = CheckpointTimer(automatic=True)
    timer.order_begins()
    clock.now += LEAST_SECONDS + 1
    timer.asked(7)
    timer.order_begins()
    assert timer.due()


def test_where_the_workers_know_by_themselves_none_is_asked_for(clock):
    timer = CheckpointTimer(automatic=False)
    timer.order_begins()
    clock.now += 1e6
    assert not timer.due()
    timer.saved(7, 1.0)
    assert len(timer.costs) == 1
