"""What node 0 decides, told by hand what workers report."""

import time

import pytest

from runtime.coordinator.commit_log import Ledger
from runtime.coordinator.coordinator import Conductor
from runtime.coordinator.join_planning import FAILURES, PAUSE_SECONDS
from runtime.protocol.orders import Move, Train, await_fetch, await_order, over_key, turn_key
from runtime.protocol.rendezvous import host_store
from runtime.protocol.reports import Followed, Paused, Ran, Ready, Unfollowed
from schedules.codec import decode
from schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.running import schedule_for

JOB = grid(2, 2, 2)
BACK = Worker(1, 1)


@pytest.fixture
def run():
    """The conductor of a run in which 1.1 is down and the others train, its ledger and its store."""
    store, rendezvous = host_store()
    ledger = Ledger("job")
    conductor = Conductor(schedule_for(JOB, [str(BACK)]), lambda down: schedule_for(JOB, list(map(str, down))), store,
                          ledger, iterations=range(100), ranges=[(0, 2), (2, 4)])
    for worker in members():
        conductor.ready(ready(worker))
    assert conductor.number == 1
    yield conductor, ledger, store
    del rendezvous


def ready(worker):
    return Ready(worker, "corpus", ("127.0.0.1", 1 + 10 * worker.pipeline + worker.column))


def fetch(conductor, store, number=1):
    """Have the one who comes back fetch its layers."""
    conductor.invite()
    return await_fetch(store, number)


def members():
    return [Worker(0, 0), Worker(0, 1), Worker(1, 0)]


def all_ran(ledger, iteration, workers=None):
    for worker in workers or members():
        list(ledger.ran(Ran(worker, 1, iteration, 0.0, 1.0)))


def test_one_that_comes_back_fetches_its_layers_and_is_taken_in_at_a_turn(run):
    conductor, ledger, store = run
    all_ran(ledger, 0)
    conductor.ready(ready(BACK))
    told = fetch(conductor, store)
    assert told.order == 1 and told.needs == ((BACK, (1,)),)
    assert told.moves == (Move(BACK, Worker(0, 1), 2), Move(BACK, Worker(0, 1), 3))
    assert told.addresses == ((Worker(0, 1), ("127.0.0.1", 2)),)
    assert not conductor.ask_for_turn()
    all_ran(ledger, 1)
    conductor.followed(Followed(BACK, 1))
    assert conductor.ask_for_turn() and not conductor.ask_for_turn()
    conductor.check_turn()
    assert store.add(turn_key(1), 0) == 4 and not store.check([over_key(1)])
    for iteration in (2, 3):
        all_ran(ledger, iteration)
    for worker in members():
        conductor.paused(Paused(worker, 1, (worker.column,), None, None))
    order = await_order(store, 2)
    assert isinstance(order, Train) and order.first_iteration == 4 and order.fetch == 1 and order.moves == ()


def test_one_that_could_not_fetch_its_layers_tries_again_later(run):
    conductor, ledger, store = run
    all_ran(ledger, 0)
    conductor.ready(ready(BACK))
    fetch(conductor, store)
    conductor.unfollowed(Unfollowed(BACK, 1))
    assert await_fetch(store, 2).moves == ()  # who has begun it, ends it
    conductor.followed(Followed(BACK, 1))  # told before it heard of that
    assert not conductor.ask_for_turn()
    conductor.invite()
    assert store.add("fetches", 0) == 2, "too soon"
    time.sleep(PAUSE_SECONDS)
    assert fetch(conductor, store, 3).moves


def test_one_that_never_can_fetch_its_layers_gets_them_while_all_wait(run):
    conductor, ledger, store = run
    all_ran(ledger, 0)
    conductor.ready(ready(BACK))
    for failure in range(FAILURES):
        conductor.unfollowed(Unfollowed(BACK, fetch(conductor, store, 1 + 2 * failure).number))
        assert not conductor.ask_for_turn()
        time.sleep(PAUSE_SECONDS)
    conductor.invite()
    assert conductor.ask_for_turn()
    for worker in members():
        conductor.paused(Paused(worker, 1, (worker.column,), None, None))
    order = await_order(store, 2)
    assert isinstance(order, Train) and order.fetch == 0 and [move.target for move in order.moves] == [BACK, BACK]


def test_a_failure_goes_before_who_comes_back(run):
    """Nobody waits for its layers: it stays outside, and fetches anew."""
    conductor, ledger, store = run
    all_ran(ledger, 0)
    conductor.ready(ready(BACK))
    fetch(conductor, store)
    conductor.lost(Worker(1, 0), "killed", 1.0)
    for worker in (Worker(0, 0), Worker(0, 1)):
        conductor.paused(Paused(worker, 1, (worker.column,), None, None))
    order = await_order(store, 2)
    assert isinstance(order, Train) and order.fetch == 0 and order.moves == ()
    assert [seat.worker for seat in decode(bytes(order.schedule)).seats] == [Worker(0, 0), Worker(0, 1)]
    assert await_fetch(store, 2).moves == () and fetch(conductor, store, 3).order == 2


def test_a_turn_that_came_too_late_for_one_ends_the_order(run):
    """Reports lie unheard while node 0 is busy: a member may have looked for a turn, found none, and gone on into it.

    The others stop there and wait for it, and it for them.
    """
    conductor, ledger, store = run
    all_ran(ledger, 0)
    conductor.ready(ready(BACK))
    fetch(conductor, store)
    conductor.followed(Followed(BACK, 1))
    assert conductor.ask_for_turn()
    all_ran(ledger, 1)
    all_ran(ledger, 2, [Worker(0, 0)])  # told before the turn, heard after it
    conductor.check_turn()
    assert store.check([over_key(1)])
