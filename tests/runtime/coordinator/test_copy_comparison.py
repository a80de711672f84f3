"""Copies are compared: who is right, and what follows."""

import pytest
from msgspec.structs import replace

from slipstream.runtime.coordinator.connections.rank_reports import RankReports
from slipstream.runtime.coordinator.decisions.commit_log import CommitLogError
from slipstream.runtime.coordinator.decisions.copy_comparison import find_difference
from slipstream.runtime.coordinator.decisions.effects import GiveUpWorker
from slipstream.runtime.coordinator.decisions.transition import MAX_RETRY_SECONDS, TimePassed, apply_event
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import Noted
from slipstream.runtime.protocol.to_coordinator import Checksum, IterationReport
from slipstream.runtime.protocol.to_worker import Acknowledged, EndOrder, Train
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator.test_transition import JOB, WIDE, WIDE_MEMBERS, Run

A, B, C = (Worker(pipeline, 0) for pipeline in range(3))
ROWS = A, B, C
PARAMETERS, STATE = False, True


def ran(worker, sums, iteration=4, order=1):
    """`sums` by layer and whether it is the optimizer's state."""
    return IterationReport(worker, order, iteration, 0.0, 1.0, checksums=tuple(
        Checksum(layer, 0, 8, state, (value,)) for (layer, state), value in sums.items()))


def found(*sums):
    return find_difference(4, [ran(worker, mine) for worker, mine in zip(ROWS, sums, strict=False)])


def test_equal_copies_of_whatever_each_holds():
    assert found({(0, STATE): 1, (1, STATE): 2}, {(1, STATE): 2}, {}) is None
    assert find_difference(4, []) is None


@pytest.mark.parametrize(("mine", "wrong", "spread"), [
    ([{(0, STATE): 1, (0, PARAMETERS): 2}] * 2 + [{(0, STATE): 9, (0, PARAMETERS): 2}], (C,), False),
    ([{(0, STATE): 9, (0, PARAMETERS): 9}] + [{(0, STATE): 1, (0, PARAMETERS): 2}] * 2, (A,), True),
    ([{(0, STATE): 1}, {(0, STATE): 2}], (), True),
    ([{(0, STATE): 1}, {(0, STATE): 2}, {(0, STATE): 3}], (), True),
    ([{(0, STATE): 1, (1, STATE): 1}, {(0, STATE): 1, (1, STATE): 1}, {(0, STATE): 2}], (C,), False),
    ([{(0, STATE): 1, (1, STATE): 1}, {(0, STATE): 1, (1, STATE): 3}, {(0, STATE): 2}], (C,), True)],
    ids=["state-that-was-not-stepped-by", "parameters", "two", "three-ways", "one-of-two-layers", "another-one-of-two"])
def test_who_is_wrong_where_most_have_the_same(mine, wrong, spread):
    difference = found(*mine)
    assert (difference.wrong, difference.spread) == (wrong, spread)


def test_each_rank_counts():
    reports = RankReports(2, lambda *_: None)
    for rank, value in enumerate((5, 6)):
        whole = reports.add_message(A, rank, ran(A, {(0, STATE): value, (1, PARAMETERS): 7}))
    assert [(one.layer, one.sums) for one in whole.checksums] == [(0, (5, 6)), (1, (7, 7))]


class Compared(Run):
    """Workers whose copies are compared in each iteration; 1.1 is down."""

    def __init__(self, job) -> None:
        self.given_up = []
        super().__init__(job)

    def happens(self, *events):
        for event in events:
            *_, effects = apply_event(self.rules, self.state, event, self.now)
            self.given_up += [effect.worker for effect in effects if isinstance(effect, GiveUpWorker)]
            super().happens(event)

    @property
    def notes(self):
        return [event.text for event in self.events if isinstance(event, Noted)]

    def runs(self, iteration, other=None, what=PARAMETERS):
        """All report; `other` holds something else of its column than its peers."""
        for worker in sorted(self.state.members):
            value = 2 if worker == other else 1
            self.happens(ran(worker, {(worker.column, what): value}, iteration, self.state.order))

    def pauses(self):
        self.paused(sorted(self.state.members))
        self.happens(TimePassed())


def goes_back(run, readable):
    run.pauses()
    for worker in sorted(run.state.available_workers):
        run.can_read(worker, *readable)


def test_where_two_differ_nothing_is_committed_and_all_go_back_to_a_checkpoint_that_was_compared():
    run = Compared(JOB)
    for iteration in range(3):
        run.runs(iteration)
    run.runs(3, other=A)
    assert run.log.next_iteration == 3 and not run.given_up
    assert all(run.last(EndOrder, worker) for worker in run.state.members)
    assert max(message.iteration for worker in run.state.members for message in run.sent[worker]
               if isinstance(message, Acknowledged)) == 3  # of those before the last one
    assert run.last(Acknowledged, max(run.state.members)).iteration == 2, "nobody steps the next iteration"
    goes_back(run, (0, 2, 3))  # the last was written by those who differ
    order = run.last(Train)
    assert order.first_iteration == 2 and order.restore is not None and run.log.next_iteration == 2
    assert run.state.doubt is None
    run.runs(2)
    assert run.log.next_iteration == 3


def test_where_they_differ_again_the_run_ends():
    run = Compared(JOB)
    run.runs(0)
    run.runs(1, other=A)
    goes_back(run, (0,))
    run.runs(0)
    with pytest.raises(RunError, match=r"there is no majority among .*0\.0, 1\.0, as before the run went back"):
        run.runs(1, other=A)


def test_they_may_differ_again_once_it_has_come_further():
    run = Compared(JOB)
    run.runs(0)
    run.runs(1, other=A)
    goes_back(run, (0,))
    for iteration in range(2):
        run.runs(iteration)
    run.runs(2, other=A)
    goes_back(run, (0, 1))
    assert run.back == [0, 1]


@pytest.mark.parametrize("what", [STATE, PARAMETERS])
def test_of_three_the_wrong_one_is_given_up(what):
    """Where parameters differ, all have summed what was computed by them, and go back, too."""
    run = Compared(WIDE)
    run.runs(0)
    run.runs(1)
    run.runs(2, other=C, what=what)
    assert not run.given_up, "who is left must know first"
    assert run.last(EndOrder, A).doubted is (what is PARAMETERS)
    run.pauses()
    assert run.given_up == [C] and run.log.next_iteration == 2 and run.last(Train).order == 1
    run.lost(C, "it was wrong")
    if what is STATE:
        assert run.last(Train).order == 2 and run.last(Train).restore is None and run.last(Train).first_iteration == 2
    else:
        goes_back(run, (0, 1, 2))
        assert run.last(Train).restore is not None and run.last(Train).first_iteration == 1
    assert C not in run.state.members and len(WIDE_MEMBERS) == len(run.state.members) + 1


class Overflowing(Compared):
    """Workers of whose losses some are not finite."""

    def overflows(self, iteration, other=None):
        """All report, the first of them a loss that is not finite, and `other` another copy than its peers."""
        for worker in sorted(self.state.members):
            value = 2 if worker == other else 1
            report = ran(worker, {(worker.column, PARAMETERS): value}, iteration, self.state.order)
            self.happens(replace(report, loss=None) if worker == min(self.state.members) else report)


def test_an_infinite_loss_after_a_flip_costs_the_one_that_holds_it_and_not_the_run():
    """The iteration is run again, and its copies are compared: most are right."""
    run = Overflowing(WIDE)
    run.runs(0)
    run.overflows(1)
    assert run.log.next_iteration == 1 and run.last(EndOrder, A) == EndOrder(1, doubted=False)
    assert run.notes == ["the loss of iteration 1 is not finite: the iteration is run again, and copies of the state "
                         "are compared"]
    run.pauses()
    assert run.last(Train).order == 2 and run.last(Train).first_iteration == 1 and run.last(Train).restore is None
    run.overflows(1, other=C)
    run.pauses()
    assert run.given_up == [C]
    run.lost(C, "it was wrong")
    goes_back(run, (0,))
    run.runs(0)
    run.runs(1)
    assert run.log.next_iteration == 2


def test_a_loss_that_is_infinite_once_was_that_of_a_flip_that_nobody_holds():
    run = Overflowing(WIDE)
    run.overflows(0)
    run.pauses()
    run.runs(0)
    run.runs(1)
    assert run.log.next_iteration == 2 and not run.back and not run.given_up


def test_with_equal_copies_the_run_goes_back_once_and_then_ends():
    """All may have summed what one computed wrong; it is the learning rate where that happens again."""
    run = Overflowing(WIDE)
    run.runs(0)
    run.overflows(1)
    run.pauses()
    run.overflows(1)
    assert run.last(EndOrder, A) == EndOrder(2, doubted=True)
    goes_back(run, (0, 1))
    assert run.back == [0] and run.last(Train).restore is not None, "the checkpoint of 1 may hold it"
    run.runs(0)
    run.overflows(1)
    run.now += MAX_RETRY_SECONDS  # no worker of these orders says that it has begun
    run.pauses()
    with pytest.raises(CommitLogError, match=r"^the loss of iteration 1 is not finite: it was not .* all copies are "
                                             r"equal; try a smaller training\.learning_rate$"):
        run.overflows(1)
