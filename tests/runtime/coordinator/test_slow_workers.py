"""What becomes of slow workers, by reports that are made up: of workers that take so many times as long as others."""

from slipstream.planner.failures import FailurePlanner
from slipstream.runtime.coordinator.commit_log import Committed
from slipstream.runtime.coordinator.effects import Effects
from slipstream.runtime.coordinator.slow_workers import SpeedEvent, watched
from slipstream.runtime.coordinator.speed_planning import SpeedQuestion, SpeedsPlanned, answer_to
from slipstream.runtime.protocol.to_coordinator import Ran, SpeedMeasured
from slipstream.runtime.replay.recorder import OpTime
from slipstream.schedules.schedule import COMPUTE_KINDS, Worker
from tests.jobs import grid
from tests.runtime.running import schedule_for

JOB = grid(4, 2, 8)
FIRST = schedule_for(JOB)
LEFT_OUT, OTHER = Worker(1, 1), Worker(2, 0)


class Run:
    """Workers that train by whatever is decided; the coordinator's part is to carry decisions out at once."""

    def __init__(self):
        self.to, self.iteration, self.order = Effects(0.0), 0, 0
        self.slow = watched(FIRST, plans=True)
        self.plan = FailurePlanner(JOB, FIRST).at_speeds
        self.begin(FIRST)

    @property
    def told(self):
        return [effect for effect in self.to.effects if isinstance(effect, SpeedEvent)]

    def begin(self, schedule):
        self.order, self.schedule = self.order + 1, schedule
        self.slow = self.slow.order_begins(self.order, schedule, self.iteration, self.to)

    def train(self, iterations, factors):
        for _ in range(iterations):
            reports = [Ran(worker, self.order, self.iteration, 1.0, 1.0, times(worker, factors))
                       for worker in self.schedule.seat_of]
            self.slow = self.slow.committed(Committed(
                iteration=self.iteration, loss=1.0, window_seconds=1.0, gradient_norm=None, evaluation=None,
                cost_error=None, reports=reports))
            self.iteration += 1

    def look(self):
        """Who may come in again, once what is planned for the speeds of now is known."""
        before = self.slow.left_out.keys()
        self.slow = self.slow.look(self.schedule, self.iteration, self.to)
        question = self.to.effects.pop()
        assert isinstance(question, SpeedQuestion)
        self.slow = self.slow.planned(SpeedsPlanned(question, answer_to(question, self.plan)), self.iteration, self.to)
        self.slow = self.slow.look(self.schedule, self.iteration, self.to)
        return before - self.slow.left_out.keys()


def times(worker, factors):
    return tuple(OpTime(kind, worker.column, 8, 0.1 * factors.get(worker, 1.0)) for kind in COMPUTE_KINDS)


def test_a_change_that_a_return_comes_before_is_told_once_it_is_decided_with_who_is_back():
    run = Run()
    run.train(12, {LEFT_OUT: 100.0})
    assert not run.look() and run.slow.decision.left_out == (LEFT_OUT,)
    run.begin(run.slow.decision.schedule)
    assert [event.left_out for event in run.told] == [(LEFT_OUT,)] and run.slow.left_out.keys() == {LEFT_OUT}
    run.train(12, {OTHER: 2.5})
    run.slow = run.slow.measured(SpeedMeasured(LEFT_OUT, times(LEFT_OUT, {})), 0.0)
    assert run.look() == {LEFT_OUT} and run.slow.decision is None
    assert len(run.told) == 1, "nothing has changed yet: who comes back does so by an order of its own"
    run.begin(FIRST)
    assert not run.look()
    run.begin(run.slow.decision.schedule)
    assert {change.worker for change in run.told[1].changes} == {OTHER}
    assert run.told[1].changed and set(run.schedule.seat_of) == set(FIRST.seat_of)
