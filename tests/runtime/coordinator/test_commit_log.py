from itertools import permutations

import pytest

from runtime.coordinator.commit_log import CommitLog, CommitLogError
from runtime.protocol.to_coordinator import Finished, Ran
from runtime.protocol.to_worker import Factor
from tests.jobs import grid
from tests.runtime.running import schedule_for

SCHEDULE = schedule_for(grid(3, 1, 1))
WORKERS = [seat.worker for seat in SCHEDULE.seats]


def begun(**options) -> CommitLog:
    ledger = CommitLog("job", **options)
    ledger.begin(1, WORKERS)
    return ledger


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_loss_does_not_depend_on_who_reports_first(order):
    ledger = begun()
    parts = [Ran(worker, 1, 0, loss, 0.1) for worker, loss in zip(WORKERS, (0.1, 0.2, 1e16), strict=True)]
    assert [committed for index in order for committed in ledger.ran(parts[index])] == [(0, 0.1 + 0.2 + 1e16)]


def test_an_iteration_is_committed_by_all_and_in_order():
    ledger = begun()
    fast = [committed for iteration in range(2) for worker in WORKERS[:2]
            for committed in ledger.ran(Ran(worker, 1, iteration, 1.0, 0.1))]
    assert fast == [] and ledger.losses == []
    assert list(ledger.ran(Ran(WORKERS[2], 1, 0, 1.0, 0.3))) == [(0, 3.0)]
    assert list(ledger.ran(Ran(WORKERS[2], 1, 1, 1.0, 0.2))) == [(1, 3.0)]
    assert ledger.measured_period_seconds() == 0.2


def test_peers_must_end_with_the_same_parameters():
    ledger = begun()
    ledger.finished(Finished(WORKERS[0], 1, {"0.weight": "a"}))
    with pytest.raises(CommitLogError, match=r"worker 1\.0 ends with another parameter 0\.weight than its peers"):
        ledger.finished(Finished(WORKERS[1], 1, {"0.weight": "b"}))


def test_what_was_begun_before_a_failure_never_happened():
    ledger = begun()
    for worker in WORKERS:
        list(ledger.ran(Ran(worker, 1, 0, 1.0, 0.1)))
    for worker in WORKERS[:2]:
        list(ledger.ran(Ran(worker, 1, 1, 1.0, 0.1)))
    ledger.begin(2, WORKERS[:2])
    assert list(ledger.ran(Ran(WORKERS[2], 1, 1, 1.0, 0.1))) == [], "too late"
    assert ledger.next_iteration == 1
    assert [committed for worker in WORKERS[:2] for committed in ledger.ran(Ran(worker, 2, 1, 2.0, 0.1))] == [(1, 4.0)]


def test_with_validation_an_iteration_is_committed_when_its_factor_is_known():
    ledger = begun(first_iteration=7, validates=True)
    for worker in WORKERS:
        assert list(ledger.ran(Ran(worker, 1, 7, 1.0, 0.1))) == []
    assert list(ledger.settled(0, Factor(7, 0.5))) == [] and ledger.factor is None
    assert list(ledger.settled(1, Factor(7, 0.5))) == [(7, 3.0)]
    assert ledger.factor == Factor(7, 0.5) and ledger.next_iteration == 8
