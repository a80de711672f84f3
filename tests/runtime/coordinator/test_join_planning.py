"""What the events of a fetch say, and that nothing else is counted."""

from slipstream.runtime.coordinator.event_log import EventLog
from slipstream.runtime.coordinator.join_planning import JoinPlanner
from slipstream.runtime.events import FetchBegun, FetchProgressed
from slipstream.runtime.protocol.to_worker import LayerMove
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.running import schedule_for

ONE, OTHER, SOURCE = Worker(0, 0), Worker(0, 1), Worker(1, 0)


def test_the_share_that_has_come_is_one_of_layers_and_counts_each_worker_once():
    told, sent = [], []
    joins = JoinPlanner(sent.append, EventLog(None, observer=told.append))
    moves = (*(LayerMove(ONE, SOURCE, layer) for layer in range(3)), LayerMove(OTHER, SOURCE, 3))
    assert joins.begin(1, schedule_for(grid(2, 2, 2)), moves, {SOURCE: ("", 1)}, 5, None)
    number, = (fetch.number for fetch in sent)
    for worker in (OTHER, OTHER, SOURCE):
        joins.fetch_up_to_date(worker, number)
    assert not joins.complete
    joins.fetch_up_to_date(ONE, number)
    assert joins.complete
    joins.fetch_up_to_date(ONE, number)
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


def test_a_coordinator_that_takes_over_gives_no_fetch_a_number_that_was_used():
    """Answers to the other coordinator's fetches may be on their way, and ranks of a worker count theirs by number."""
    sent = []
    for orders in ((1, 2, 3), (4, 5)):
        joins = JoinPlanner(sent.append, EventLog(None))
        for order in orders:
            assert joins.begin(order, schedule_for(grid(2, 2, 2)), (LayerMove(ONE, SOURCE, 0),), {SOURCE: ("", 1)}, 5,
                               None)
            joins.lost(ONE)
    numbers = [fetch.number for fetch in sent]
    assert len(numbers) == 10 and numbers == sorted(set(numbers))
