"""Orders that fail because workers cannot reach each other: each is reported, and who is at
fault goes."""

import pytest

from slipstream.runtime.coordinator.decisions.effects import GiveUpWorker
from slipstream.runtime.coordinator.decisions.empty_orders import (
    MAX_ORDERS_OF_JOINING,
    MAX_ORDERS_OF_MEMBERS,
    MAX_STALLED_ORDERS,
)
from slipstream.runtime.coordinator.decisions.layer_fetches import FETCH_RETRY_SECONDS, MAX_FETCH_FAILURES
from slipstream.runtime.coordinator.decisions.run_state import EndedPhase
from slipstream.runtime.coordinator.decisions.transition import (
    MAX_RETRY_SECONDS,
    StallFound,
    StopRequested,
    TimePassed,
    apply_event,
)
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import FetchAbandoned, Noted
from slipstream.runtime.protocol.to_coordinator import (
    FetchFailed,
    Finished,
    IterationReport,
    Paused,
    Published,
)
from slipstream.runtime.protocol.to_worker import Fetch, Finish
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator.holding import holding
from tests.runtime.coordinator.test_transition import BACK, MEMBERS, WIDE, WIDE_MEMBERS, Run

SOURCE = Worker(0, 1)


class Failing(Run):
    """A run whose workers fail to reach each other."""

    def __init__(self, *args) -> None:
        self.given_up = []
        super().__init__(*args)

    def happens(self, *events):
        for event in events:
            *_, effects = apply_event(self.rules, self.state, event, self.now)
            self.given_up += [effect for effect in effects if isinstance(effect, GiveUpWorker)]
            super().happens(event)

    @property
    def notes(self):
        return [event.text for event in self.events if isinstance(event, Noted)]

    def fails(self, named):
        """The order ends: each worker in `named` could not reach another one; the others only
        stop."""
        for worker in sorted(self.state.members, key=lambda worker: (worker not in named, worker)):
            held = holding((2 * worker.column, 2 * worker.column + 2))
            others = named.get(worker)
            self.happens(Paused(worker, self.state.order, held, None, "the order is over" if others is None else
                                f"receiving from worker {others} failed", () if others is None else (worker, others)))
        self.now += MAX_RETRY_SECONDS
        self.happens(TimePassed())


def fail_fetches(run, *, unreachable):
    run.ran(0)
    run.ready(BACK)
    for _ in range(MAX_FETCH_FAILURES):
        run.happens(FetchFailed(BACK, run.last(Fetch).number, "fetching layers from worker 0.1 failed: timed out",
                                unreachable))
        run.now += FETCH_RETRY_SECONDS
        run.happens(TimePassed())


def test_a_joining_worker_that_reaches_no_sender_goes_and_nobody_stops_for_it():
    run = Failing()
    fail_fetches(run, unreachable=True)
    line = "worker 1.1 could not get its layers: fetching layers from worker 0.1 failed: timed out"
    assert run.notes == [line] * MAX_FETCH_FAILURES
    assert [event.reason for event in run.events if isinstance(event, FetchAbandoned)] == run.notes
    (given_up,) = run.given_up
    assert given_up.worker == BACK and given_up.reason.endswith("3 times in a row, fetching layers from worker 0.1 "
                                                                "failed: timed out")
    run.lost(BACK, given_up.reason)
    assert run.ran(1) == [False] * 3, "healthy workers go on"


def test_a_joining_worker_for_which_orders_fail_goes_and_each_is_reported():
    run = Failing()
    fail_fetches(run, unreachable=False)
    assert run.ran(1) == [True] * 3 and not run.given_up
    run.paused()
    assert BACK in run.state.members
    for number in range(MAX_ORDERS_OF_JOINING):
        assert not run.given_up
        run.fails({BACK: SOURCE})
        assert run.notes[-1] == (f"order {2 + number} ended before any iteration was committed: worker 1.1: receiving "
                                 "from worker 0.1 failed")
    (given_up,) = run.given_up
    assert given_up.worker == BACK, "not the healthy one, which is named as often"
    run.lost(BACK, given_up.reason)
    assert run.state.members == {*MEMBERS} and not run.state.empty.number


def test_the_member_that_most_others_cannot_reach_goes_after_many_orders():
    run = Failing(WIDE)
    run.ran(0, WIDE_MEMBERS)
    bad, one, other, *_ = WIDE_MEMBERS
    run.fails({one: bad})
    assert not run.notes, "something was committed in this order"
    for number in range(1, MAX_ORDERS_OF_MEMBERS + 1):
        assert not run.given_up, "a network may be down for a minute"
        run.fails({one: bad, other: bad})
        assert len(run.notes) == number
    assert [effect.worker for effect in run.given_up] == [bad]


@pytest.mark.parametrize("alone", [False, True])
def test_where_nobody_stands_out_the_run_ends_with_the_reason(alone):
    """Each names another one, or all fail by themselves, as with a wrong interface: not all of
    them in each order."""
    run = Failing()
    run.ran(0)
    ring = {worker: MEMBERS[place - 1] for place, worker in enumerate(MEMBERS)}
    run.fails(ring)
    if alone:
        with pytest.raises(RunError, match=r"no single worker is at fault; the last one: worker \d\.\d: no interface$"):
            for number in range(MAX_ORDERS_OF_MEMBERS):
                first = MEMBERS[min(number, 1)]
                for worker in sorted(MEMBERS, key=lambda worker: worker != first):
                    held = holding((2 * worker.column, 2 * worker.column + 2))
                    run.happens(Paused(worker, run.state.order, held, None, "no interface",
                                       (worker,) if worker == first else ()))
                run.now += MAX_RETRY_SECONDS
                run.happens(TimePassed())
        assert not run.given_up
        return
    reason = r"no single worker is at fault; the last one: worker 0\.0: receiving from worker 1\.0 failed$"
    with pytest.raises(RunError, match=rf"^{MAX_ORDERS_OF_MEMBERS} orders in a row .* {reason}"):
        for _ in range(MAX_ORDERS_OF_MEMBERS):
            run.fails(ring)
    assert len(run.notes) == MAX_ORDERS_OF_MEMBERS - 1 and not run.given_up


def test_a_commit_between_them_ends_the_row():
    run = Failing()
    for iteration in range(2 * MAX_ORDERS_OF_MEMBERS):
        for worker in MEMBERS:
            run.happens(IterationReport(worker, run.state.order, iteration, 0.0, 1.0))
        run.fails({MEMBERS[0]: MEMBERS[1]})
    assert not run.given_up and not run.notes


def test_what_a_death_explains_is_counted_against_nobody():
    run = Failing(WIDE)
    run.ran(0, WIDE_MEMBERS)
    dead, other, *others = WIDE_MEMBERS
    run.happens(Paused(other, 1, holding((2, 4)), None, "receiving from worker 0.0 failed", (other, dead)))
    run.lost(dead, "killed")
    run.paused(others)
    assert run.state.order == 2 and not run.notes and not run.state.empty.counts and not run.state.empty.number


def test_members_that_wait_for_each_other_for_long_are_stopped_and_named():
    run = Failing(WIDE)
    run.ran(0, WIDE_MEMBERS)
    bad, other, *_ = WIDE_MEMBERS
    run.fails({bad: other})
    for _ in range(MAX_STALLED_ORDERS):
        assert not run.given_up
        run.happens(StallFound((bad, other), "worker 0.0 waits for worker 0.1"))
        run.fails({})
        assert run.notes[-1].endswith("worker 0.0 waits for worker 0.1")
    assert [effect.worker for effect in run.given_up] == [other]



def test_a_writer_that_never_gets_what_it_is_to_write_is_reported_and_goes():
    """At the end of a run, all others would wait for it for good."""
    run = Failing(WIDE)
    bad, other, *_ = WIDE_MEMBERS
    run.ran(0, WIDE_MEMBERS)
    run.happens(StopRequested())
    for iteration in (1, 2):
        run.ran(iteration, WIDE_MEMBERS)
    run.paused(WIDE_MEMBERS)
    for number in range(1, MAX_ORDERS_OF_MEMBERS + 1):
        assert run.last(Finish).order == 1 + number and not run.given_up
        run.happens(Paused(bad, 1 + number, holding((0, 2)), None, "fetching layers failed", (bad, other)))
        assert len(run.notes) == number
        run.now += MAX_RETRY_SECONDS
        run.happens(TimePassed())
    assert [effect.worker for effect in run.given_up] == [other]
    run.happens(TimePassed())
    run.lost(other, run.given_up[0].reason)
    assert run.last(Finish).order == MAX_ORDERS_OF_MEMBERS + 2
    for worker in sorted(run.state.members):
        run.happens(Finished(worker, run.state.order, {}))
    for worker in sorted(run.state.members):
        run.happens(Published(worker, run.state.order))
    assert isinstance(run.state.phase, EndedPhase)
