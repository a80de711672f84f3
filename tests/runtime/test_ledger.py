from itertools import permutations

import pytest

from runtime.ledger import Ledger, LedgerError
from runtime.report import Finished, Ran
from tests.jobs import grid
from tests.runtime.running import schedule_for

SCHEDULE = schedule_for(grid(3, 1, 1))
WORKERS = [seat.worker for seat in SCHEDULE.seats]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_loss_does_not_depend_on_who_reports_first(order):
    ledger = Ledger(SCHEDULE)
    parts = [Ran(worker, 0, loss, 0.1) for worker, loss in zip(WORKERS, (0.1, 0.2, 1e16), strict=True)]
    assert [committed for index in order for committed in ledger.ran(parts[index])] == [(0, 0.1 + 0.2 + 1e16)]


def test_an_iteration_is_committed_by_all_and_in_order():
    ledger = Ledger(SCHEDULE)
    fast = [committed for iteration in range(2) for worker in WORKERS[:2]
            for committed in ledger.ran(Ran(worker, iteration, 1.0, 0.1))]
    assert fast == [] and ledger.losses == []
    assert list(ledger.ran(Ran(WORKERS[2], 0, 1.0, 0.3))) == [(0, 3.0)]
    assert list(ledger.ran(Ran(WORKERS[2], 1, 1.0, 0.2))) == [(1, 3.0)]
    assert ledger.measured_period_seconds() == 0.2


def test_peers_must_end_with_the_same_parameters():
    ledger = Ledger(SCHEDULE)
    ledger.finished(Finished(WORKERS[0], {"0.weight": "a"}))
    with pytest.raises(LedgerError, match=r"worker 1\.0 ends with another parameter 0\.weight than its peers"):
        ledger.finished(Finished(WORKERS[1], {"0.weight": "b"}))
