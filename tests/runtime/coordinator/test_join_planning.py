"""What the events of a fetch say, and that nothing else is counted."""

from runtime.coordinator.event_log import EventLog
from runtime.coordinator.join_planning import JoinPlanner
from runtime.events import FetchBegun, FetchProgressed
from runtime.protocol.to_worker import LayerMove
from schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.running import schedule_for

ONE, OTHER, SOURCE = Worker(0, 0), Worker(0, 1), Worker(1, 0)


def test_the_share_that_has_come_is_one_of_layers_and_counts_each_worker_once():
    told = []
    joins = JoinPlanner(lambda _: None, EventLog(None, observer=told.append))
    moves = (*(LayerMove(ONE, SOURCE, layer) for layer in range(3)), LayerMove(OTHER, SOURCE, 3))
    assert joins.begin(1, schedule_for(grid(2, 2, 2)), moves, {SOURCE: ("", 1)}, 5, None)
    for worker in (OTHER, OTHER, SOURCE):
        joins.fetch_up_to_date(worker, 1)
    assert not joins.complete
    joins.fetch_up_to_date(ONE, 1)
    assert joins.complete
    joins.fetch_up_to_date(ONE, 1)
    assert [event.share for event in told if isinstance(event, FetchProgressed)] == [0.25, 1.0]


def test_layers_that_only_settle_give_way_once_and_a_join_to_nobody():
    told = []
    joins = JoinPlanner(lambda _: None, EventLog(None, observer=told.append))

    def begin(settles):
        return joins.begin(1, schedule_for(grid(2, 2, 2)), (LayerMove(ONE, SOURCE, 0),), {SOURCE: ("", 1)}, 5, None,
                           settles=settles)

    assert joins.open and begin(settles=True)
    assert not joins.open and joins.open_to_join and isinstance(told[-1], FetchBegun)
    joins.give_way()
    assert joins.open and told[-1].reason == "a worker wants to join"
    assert begin(settles=False) and not joins.open_to_join
    joins.give_way()
    assert not joins.open
