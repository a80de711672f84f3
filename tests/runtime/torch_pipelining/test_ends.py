"""The end of a run: all leave together, and whoever still owes the last step learns it from those that wait."""

import pytest

from slipstream.schedules.schedule import Worker
from tests.generate import planned
from tests.jobs import grid
from tests.runtime.torch_pipelining.threads import with_workers

JOB = grid(2, 2, [2, 2])
ROUNDS = 20
pytestmark = pytest.mark.usefixtures("one_process")


def plan(down):
    return planned(JOB, down, optimizer="synchronous")


def test_the_first_to_leave_does_not_end_the_wait_of_the_others():
    for _ in range(ROUNDS):
        assert len(with_workers(plan([]), lambda place: place.commit(1.0))) == 4


def test_a_worker_that_dies_after_the_last_commit_is_not_waited_for():
    def run(place):
        place.commit()
        if place.worker == Worker(0, 1):
            die(place)
        place.close()
        return place.routes.failed

    found = with_workers(plan, run)
    assert {found[worker] for worker in found if worker != Worker(0, 1)} == {(Worker(0, 1),)}


def test_a_worker_that_owes_the_last_step_learns_it_from_those_that_wait_at_the_end():
    """Worker 1.1 has not heard of the commit when worker 0.1 dies."""
    def run(place):
        place.commit(1.0)
        if place.worker == Worker(0, 1):
            die(place)
        elif place.worker == Worker(1, 1):
            place.committed, place.last_sum = 0, 0.0
            return place.recover(), place.committed, place.last_sum
        return None

    assert with_workers(plan, run)[Worker(1, 1)] == (True, 1, 4.0)


def die(place):
    """Leave the process's connections as its death does; nobody else closes them."""
    place.session.abort()
    place.session.close()
    place._session = None
    place._watch.close()
