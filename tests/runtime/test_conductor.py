"""What node 0 decides, told by hand what workers report."""

import pytest

from runtime.cluster.conductor import Conductor
from runtime.cluster.ledger import Ledger
from runtime.cluster.orders import over_key, turn_key
from runtime.cluster.rendezvous import host_store
from runtime.cluster.report import Ran
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
        conductor.ready(worker)
    assert conductor.number == 1
    yield conductor, ledger, store
    del rendezvous


def members():
    return [Worker(0, 0), Worker(0, 1), Worker(1, 0)]


def all_ran(ledger, iteration, workers=None):
    for worker in workers or members():
        list(ledger.ran(Ran(worker, 1, iteration, 0.0, 1.0)))


def test_one_that_comes_back_is_taken_in_at_a_turn(run):
    conductor, ledger, store = run
    all_ran(ledger, 0)
    assert not conductor.ask_for_turn()
    conductor.ready(BACK)
    assert conductor.ask_for_turn() and not conductor.ask_for_turn()
    conductor.check_turn()
    assert store.add(turn_key(1), 0) == 3 and not store.check([over_key(1)])


def test_a_turn_that_came_too_late_for_one_ends_the_order(run):
    """Reports lie unheard while node 0 is busy: a member may have looked for a turn, found none, and gone on into it.

    The others stop there and wait for it, and it for them.
    """
    conductor, ledger, store = run
    all_ran(ledger, 0)
    conductor.ready(BACK)
    assert conductor.ask_for_turn()
    all_ran(ledger, 1)
    all_ran(ledger, 2, [Worker(0, 0)])  # told before the turn, heard after it
    conductor.check_turn()
    assert store.check([over_key(1)])
