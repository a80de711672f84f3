"""What the ranks of a worker say, put together."""

import pytest
from msgspec.structs import replace

from slipstream.runtime.coordinator.connections.rank_reports import RankReports
from slipstream.runtime.protocol.to_coordinator import (
    Finished,
    IterationReport,
    Note,
    Paused,
    ReadableCheckpoints,
    Ready,
    RecoveryReport,
    StepValidated,
    WorkerStatus,
)
from slipstream.runtime.protocol.to_worker import StepFactor
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator.holding import holding

WORKER = Worker(0, 1)
OTHER = Worker(1, 1)


@pytest.fixture
def reports():
    return Reports()


class Reports(RankReports):
    def __init__(self):
        self.broken = []
        super().__init__(2, lambda worker, order: self.broken.append((worker, order)))

    def both(self, first, second):
        assert self.add_message(WORKER, 0, first) is None
        return self.add_message(WORKER, 1, second)


def ran(iteration, window, squares, loss=1.0):
    return IterationReport(WORKER, 1, iteration, loss, window, squares=squares)


def test_a_worker_of_one_process_speaks_for_itself():
    said = ran(3, 0.5, 1.0)
    assert RankReports(1, lambda *_: None).add_message(WORKER, 0, said) is said


def test_an_iteration_is_run_when_all_ranks_have_run_it(reports):
    assert reports.both(ran(0, 0.5, 1.0), ran(0, 0.75, 2.0)) == ran(0, 0.75, 3.0)
    # The other order, and another worker between.
    assert reports.add_message(WORKER, 1, ran(1, 0.5, 2.0)) is None
    assert reports.add_message(OTHER, 0, ran(1, 0.25, 8.0)) is None
    assert reports.add_message(WORKER, 0, ran(1, 0.25, 1.0)) == ran(1, 0.5, 3.0)
    assert reports.both(ran(2, 0.5, None), ran(2, 0.5, 1.0)).squares is None


def test_one_that_has_lost_somebody_has_the_others_stop_and_its_reason_counts(reports):
    assert (
        reports.add_message(WORKER, 1, Paused(WORKER, 4, holding((0, 3)), None, "peer gone"))
        is None
    )
    assert reports.broken == [(WORKER, 4)]
    whole = reports.add_message(
        WORKER, 0, Paused(WORKER, 4, holding((0, 2)), StepFactor(7, 0.5), "the order is over")
    )
    assert (
        whole == Paused(WORKER, 4, holding((0, 2)), StepFactor(7, 0.5), "peer gone")
        and len(reports.broken) == 1
    )


def test_one_that_has_stopped_as_told_waits_for_the_others(reports):
    stopped = Paused(WORKER, 4, holding((0, 2)), None, None)
    assert reports.both(stopped, stopped) == stopped and not reports.broken


def test_what_was_said_of_an_order_that_is_over_counts_no_more(reports):
    reports.add_message(WORKER, 0, ran(5, 0.5, 1.0))
    stopped = Paused(WORKER, 1, holding(), None, None)
    reports.both(stopped, stopped)
    assert reports.add_message(WORKER, 1, ran(5, 0.5, 2.0)) is None
    reports.drop_worker(WORKER)
    assert reports.add_message(WORKER, 0, ran(5, 0.5, 1.0)) is None


def test_digests_of_parameters_that_some_rank_does_not_hold_are_left_out(reports):
    both = reports.both(
        Finished(WORKER, 2, {"3.weight": "a", "4.weight": "b"}),
        Finished(WORKER, 2, {"3.weight": "c"}),
    )
    assert both.digests.keys() == {"3.weight"}
    assert (
        reports.both(Finished(WORKER, 3, {"3.weight": "a"}), Finished(WORKER, 3, {})).digests == {}
    )
    assert (
        reports.both(Finished(WORKER, 4, {}), Finished(WORKER, 4, {"3.weight": "a"})).digests == {}
    )


def test_each_rank_says_where_it_gives_layers(reports):
    ready = (
        reports.add_message(WORKER, 1, Ready(WORKER, (("b", 2),))),
        reports.add_message(WORKER, 0, Ready(WORKER, (("a", 1),))),
    )
    assert ready == (None, Ready(WORKER, (("a", 1), ("b", 2))))


def test_what_all_ranks_know_of_a_run_whose_node_0_has_died(reports):
    def known(order, iteration, layers, **more):
        return Ready(
            WORKER,
            (("a", 1),),
            known=RecoveryReport(order, (WORKER,), iteration, holding(layers), None, **more),
        )

    ahead, behind = (
        known(3, 8, (0, 3), pending=True),
        known(3, 7, (0, 3), pending=False, losses={7: 1.5}),
    )
    assert reports.both(ahead, behind).known == RecoveryReport(
        3, (WORKER,), 8, holding((0, 3)), None, pending=True, losses={7: 1.5}, behind=True
    )
    # One has not got the order.
    assert reports.both(known(4, 7, (0, 3), pending=False), behind).known.kept == holding()
    assert reports.add_message(WORKER, 0, ahead) is None and reports.incomplete_workers == [WORKER]
    assert (
        reports.add_message(WORKER, 1, Ready(WORKER, (("a", 1),))).known is None
        and not reports.incomplete_workers
    )


def test_notes_pass_at_once_and_factors_from_the_first(reports):
    note, factor = Note(WORKER, "a line"), StepValidated(1, StepFactor(3, 1.0))
    assert reports.add_message(WORKER, 1, note) is note
    assert (
        reports.add_message(WORKER, 1, factor) is None
        and reports.add_message(WORKER, 0, factor) is factor
    )


def test_the_rest(reports):
    assert reports.both(
        ReadableCheckpoints(WORKER, (2, 4, 6)), ReadableCheckpoints(WORKER, (4, 6, 8))
    ).iterations == (4, 6)
    busy = WorkerStatus(WORKER, "iteration 3, F 0", 9.0, waits=False)
    waits = WorkerStatus(WORKER, "waits", 8.0, waits=True)
    assert reports.both(waits, busy) == replace(busy, rank=1) and reports.both(
        busy, waits
    ) == replace(busy, rank=0)
    assert reports.both(busy, busy) == busy and reports.both(waits, waits) == waits
    digests, same, other = (
        reports.both(Finished(WORKER, 2, {"0.a": "x"}), Finished(WORKER, 2, {"0.a": name})).digests
        for name in "yyz"
    )
    assert digests == same != other and digests.keys() == {"0.a"}
