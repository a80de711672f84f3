"""The end of a run.

All leave together, and whoever still owes the last step learns it from those that wait.
"""

import math
import threading

import pytest

from slipstream.runtime.replay.gloo import GlooBackend
from slipstream.runtime.torch_pipelining import Place, watch
from slipstream.runtime.torch_pipelining import place as places
from slipstream.runtime.torch_pipelining.agreement import LeftOutError
from slipstream.schedules.schedule import Worker
from tests.generate import planned
from tests.jobs import grid
from tests.runtime.torch_pipelining.threads import TIMEOUT_SECONDS, with_workers

JOB = grid(2, 2, [2, 2])
ROUNDS = 20
pytestmark = pytest.mark.usefixtures("one_process")


def plan(down):
    return planned(JOB, down, optimizer="synchronous")


def test_the_first_to_leave_does_not_end_the_wait_of_the_others():
    for _ in range(ROUNDS):
        assert len(with_workers(plan([]), lambda place: place.commit(1.0))) == 4


def test_a_worker_that_dies_after_the_last_commit_is_not_waited_for():
    met = threading.Barrier(4)

    def run(place):
        place.commit()
        met.wait(TIMEOUT_SECONDS)
        if place.worker == Worker(0, 1):
            die(place)
        place.close()
        return place.routes.failed

    found = with_workers(plan, run)
    assert {found[worker] for worker in found if worker != Worker(0, 1)} == {(Worker(0, 1),)}


@pytest.mark.parametrize(
    ("value", "total"), [(1.0, 4.0), (math.nan, math.nan), (math.inf, math.inf)]
)
def test_a_worker_that_owes_the_last_step_learns_it_from_those_that_wait_at_the_end(value, total):
    """Worker 1.1 has not heard of the commit when worker 0.1 dies."""
    met = threading.Barrier(4)

    def run(place):
        place.commit(value)
        met.wait(TIMEOUT_SECONDS)
        if place.worker == Worker(0, 1):
            die(place)
        elif place.worker == Worker(1, 1):
            place.committed, place.last_sum = 0, 0.0
            return place.recover(), place.committed, place.last_sum
        return None

    assert with_workers(plan, run)[Worker(1, 1)] == (True, 1, pytest.approx(total, nan_ok=True))


def test_a_worker_that_returns_at_the_end_is_told_that_it_has_no_state():
    met = threading.Barrier(4)

    def run(place):
        begun_with = place.routes
        place.commit()
        met.wait(TIMEOUT_SECONDS)
        if place.worker == Worker(0, 1):
            die(place)
            returned = Place.take(
                begun_with,
                place.worker,
                store=place.store.underlying_store,
                patience=TIMEOUT_SECONDS,
            )
            assert returned.committed == 1
            with pytest.raises(
                LeftOutError, match=r"^the run has ended before this worker had its state; "
            ):
                returned.close()
            returned.close()
            return
        place.recover()
        while Worker(0, 1) not in place.routes.workers:
            place.recover()

    with_workers(plan, run)


def test_an_abort_of_one_worker_spares_connections_by_which_others_look_at_each_other():
    """Of workers that are threads of this process, as in all tests of this folder."""
    aborting, looked_at = (places.Watch("127.0.0.1", lambda: None) for _ in range(2))
    groups = GlooBackend()
    with groups.creating_groups(aborting.sockets):
        connection = watch.connect(looked_at.address)
        groups.cut_connections()
    assert connection is not None and not watch.has_ended(connection)
    connection.close()
    aborting.close()
    looked_at.close()


def die(place):
    """Leave the process's connections as its death does; nobody else closes them."""
    place.session.abort()
    place.session.close()
    place._session = None
    place._watch.close()
