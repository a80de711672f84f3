"""What the events of a fetch say, and that nothing else is counted."""

from slipstream.runtime.coordinator.decisions.effects import EffectCollector, SendMessage
from slipstream.runtime.coordinator.decisions.rebalancing import FetchState, LayerFetch
from slipstream.runtime.events import FetchBegun, FetchProgressed
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.coordinator.driving import prepared
from tests.runtime.coordinator.holding import move
from tests.runtime.running import schedule_for

ONE = Worker(0, 0)
OTHER = Worker(0, 1)
SOURCE = Worker(1, 0)
"""Gives layers away."""
ALL = (ONE, OTHER, SOURCE)


def join(**options):
    return LayerFetch(
        prepared=prepared(schedule_for(grid(2, 2, 2))),
        began=5,
        **{"order": 1, "moves": (move(ONE, SOURCE, 0),), **options},
    )


def begun(joins, worker, to):
    return joins.begin_fetch(worker, ((SOURCE, (("", 1),)),), ALL, to)


def numbers(to):
    return [effect.message.number for effect in to.effects if isinstance(effect, SendMessage)]


def test_the_share_that_has_come_is_one_of_layers_and_counts_each_worker_once():
    to = EffectCollector(0.0)
    moves = (*(move(ONE, SOURCE, layer) for layer in range(3)), move(OTHER, SOURCE, 3))
    joins = begun(FetchState(), join(moves=moves), to)
    (number,) = numbers(to)
    for worker in (OTHER, OTHER, SOURCE):
        joins = joins.with_target_ready(worker, number, to)
    assert not joins.is_complete
    joins = joins.with_target_ready(ONE, number, to)
    assert joins.is_complete and joins.with_target_ready(ONE, number, to) is joins
    assert [effect.share for effect in to.effects if isinstance(effect, FetchProgressed)] == [
        0.25,
        1.0,
    ]


def test_layers_that_only_settle_give_way_and_a_join_to_nobody():
    to = EffectCollector(0.0)
    joins = begun(FetchState(), join(rebalances=True), to)
    assert (
        not joins.can_begin(0.0)
        and joins.is_preemptible
        and any(isinstance(effect, FetchBegun) for effect in to.effects)
    )
    joins = joins.cancel_fetch("a worker wants to join", ALL, to)
    assert joins.can_begin(0.0) and any(
        getattr(effect, "reason", "") == "a worker wants to join" for effect in to.effects
    )
    joins = begun(joins, join(), to)
    assert not joins.can_begin(0.0) and not joins.is_preemptible


def test_a_coordinator_that_takes_over_gives_no_fetch_a_number_that_was_used():
    # Answers to the other coordinator's fetches may be on their way, and ranks of a worker count
    # theirs by number.
    to = EffectCollector(0.0)
    for orders in ((1, 2, 3), (4, 5)):
        joins = FetchState()
        for order in orders:
            joins = begun(joins, join(order=order), to).without_workers({ONE}, ALL, to)
    assert len(numbers(to)) == 10 and numbers(to) == sorted(set(numbers(to)))
