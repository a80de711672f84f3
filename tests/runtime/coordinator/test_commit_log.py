import gc
import tracemalloc
from itertools import permutations

import pytest

from slipstream.runtime.coordinator.decisions import commit_log
from slipstream.runtime.coordinator.decisions.commit_log import CommitLog, CommitLogError
from slipstream.runtime.protocol.to_coordinator import Finished, IterationReport
from slipstream.runtime.protocol.to_worker import StepFactor
from tests.jobs import grid
from tests.runtime.running import schedule_for

SCHEDULE = schedule_for(grid(3, 1, 1))
WORKERS = [seat.worker for seat in SCHEDULE.seats]


class Log:
    """One that changes, and what is committed with each report."""

    def __init__(self, **options) -> None:
        self.log = CommitLog(**options).with_order(1, WORKERS)

    def ran(self, report):
        self.log, committed = self.log.with_reports(report)
        return [(commit.iteration, commit.loss) for commit in committed]

    def validated(self, order, factor):
        self.log, committed = self.log.with_factor(order, factor)
        return [(validation.iteration, validation.loss) for validation in committed]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_loss_does_not_depend_on_who_reports_first(order):
    log = Log()
    parts = [
        IterationReport(worker, 1, 0, loss, 0.1)
        for worker, loss in zip(WORKERS, (0.1, 0.2, 1e16), strict=True)
    ]
    assert [committed for index in order for committed in log.ran(parts[index])] == [
        (0, 0.1 + 0.2 + 1e16)
    ]


def test_an_iteration_is_committed_by_all_and_in_order():
    log = Log()
    fast = [
        committed
        for iteration in range(2)
        for worker in WORKERS[:2]
        for committed in log.ran(IterationReport(worker, 1, iteration, 1.0, 0.1))
    ]
    assert fast == [] and log.log.losses == []
    assert log.ran(IterationReport(WORKERS[2], 1, 0, 1.0, 0.3)) == [(0, 3.0)]
    assert log.ran(IterationReport(WORKERS[2], 1, 1, 1.0, 0.2)) == [(1, 3.0)]
    assert log.log.measured_period_seconds() == 0.2


def test_a_long_run_keeps_the_last_windows_alone(monkeypatch):
    monkeypatch.setattr(commit_log, "MIN_KEPT_WINDOWS", 4)
    log, kept = Log(), []
    for iteration in range(40):
        for worker in WORKERS:
            log.ran(IterationReport(worker, 1, iteration, 1.0, float(iteration)))
        kept.append(len(log.log.windows))
    assert max(kept) <= 9 and min(kept[8:]) >= 4 and log.log.measured_period_seconds(36) == 38.0


def test_a_long_run_grows_by_few_bytes_an_iteration(monkeypatch):
    monkeypatch.setattr(commit_log, "MIN_KEPT_WINDOWS", 4)
    log = Log()

    def run(first: int, count: int) -> int:
        for iteration in range(first, first + count):
            for worker in WORKERS:
                log.ran(IterationReport(worker, 1, iteration, 1.0, 0.1))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = run(0, 3000)
        grown = run(3000, 6000) - before
    finally:
        tracemalloc.stop()
    assert len(log.log.losses) == 9000 and log.log.last_committed == (8999, 3.0)
    assert grown < 24 * 6000, "a loss, and room for the next ones"


def test_losses_before_a_return_are_kept_and_later_ones_replaced():
    log = Log(first_iteration=5)
    for iteration in range(5, 9):
        for worker in WORKERS:
            log.ran(IterationReport(worker, 1, iteration, float(iteration), 0.1))
    log.log, ahead = log.log.without_iterations_from(7).with_order(1, WORKERS), log.log
    assert log.log.losses == [15.0, 18.0] and log.log.next_iteration == 7
    for worker in WORKERS:
        log.ran(IterationReport(worker, 1, 7, 1.0, 0.1))
    assert log.log.losses == [15.0, 18.0, 3.0] and ahead.losses == [15.0, 18.0, 21.0, 24.0]


def test_peers_must_end_with_the_same_parameters():
    log = Log().log.with_finished(Finished(WORKERS[0], 1, {"0.weight": "a"}))
    with pytest.raises(
        CommitLogError, match=r"final parameter 0\.weight of worker 1\.0 differs from its peers'"
    ):
        log.with_finished(Finished(WORKERS[1], 1, {"0.weight": "b"}))


def test_what_was_begun_before_a_failure_never_happened():
    log = Log()
    for worker in WORKERS:
        log.ran(IterationReport(worker, 1, 0, 1.0, 0.1))
    for worker in WORKERS[:2]:
        log.ran(IterationReport(worker, 1, 1, 1.0, 0.1))
    log.log = log.log.with_order(2, WORKERS[:2])
    assert log.ran(IterationReport(WORKERS[2], 1, 1, 1.0, 0.1)) == [], "too late"
    assert log.log.next_iteration == 1
    assert [
        committed
        for worker in WORKERS[:2]
        for committed in log.ran(IterationReport(worker, 2, 1, 2.0, 0.1))
    ] == [(1, 4.0)]


def test_what_was_committed_before_stays_as_it_was():
    log = Log()
    for worker in WORKERS[:2]:
        log.ran(IterationReport(worker, 1, 0, 1.0, 0.1))
    before = log.log
    assert log.ran(IterationReport(WORKERS[2], 1, 0, 1.0, 0.1)) == [
        (0, 3.0)
    ] and log.log.losses == [3.0]
    assert before.losses == [] and before.next_iteration == 0
    assert [
        commit.loss
        for commit in before.with_reports(IterationReport(WORKERS[2], 1, 0, 5.0, 0.1))[1]
    ] == [7.0]
    assert log.log.losses == [3.0]


def test_with_validation_an_iteration_is_committed_when_its_factor_is_known():
    log = Log(first_iteration=7, validates=True)
    for worker in WORKERS:
        assert log.ran(IterationReport(worker, 1, 7, 1.0, 0.1)) == []
    assert log.validated(0, StepFactor(7, 0.5)) == [] and log.log.last_factor is None
    assert log.validated(1, StepFactor(7, 0.5)) == [(7, 3.0)]
    assert log.log.last_factor == StepFactor(7, 0.5) and log.log.next_iteration == 8
