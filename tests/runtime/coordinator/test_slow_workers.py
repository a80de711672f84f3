"""What becomes of slow workers, by made-up reports.

They are of workers that take so many times as long as others.
"""

from slipstream.planner.failures import FailurePlanner
from slipstream.runtime.coordinator.decisions.commit_log import CommittedIteration
from slipstream.runtime.coordinator.decisions.effects import EffectCollector
from slipstream.runtime.coordinator.decisions.slow_workers import (
    SpeedAnswer,
    SpeedEvent,
    SpeedRequest,
    answer_request,
    build_slow_workers,
)
from slipstream.runtime.protocol.to_coordinator import IterationReport
from slipstream.schedules.measured_trace import OpTime
from slipstream.schedules.schedule import COMPUTE_KINDS, Worker
from tests.jobs import grid
from tests.runtime.running import schedule_for

JOB = grid(4, 2, 8)
FIRST = schedule_for(JOB)
LEFT_OUT = Worker(1, 1)
OTHER = Worker(2, 0)


class Run:
    """Workers that train by whatever is decided.

    The coordinator's part is to carry decisions out at once.
    """

    def __init__(self):
        self.to, self.iteration, self.order = EffectCollector(0.0), 0, 0
        self.slow = build_slow_workers(FIRST, plans=True)
        self.plan = FailurePlanner(JOB, FIRST).at_speeds
        self.begin(FIRST)

    @property
    def told(self):
        return [effect for effect in self.to.effects if isinstance(effect, SpeedEvent)]

    def begin(self, schedule):
        self.order, self.schedule = self.order + 1, schedule
        self.slow = self.slow.with_order(self.order, schedule, self.iteration, self.to)

    def train(self, iterations, factors):
        for _ in range(iterations):
            reports = [
                IterationReport(
                    worker, self.order, self.iteration, 1.0, 1.0, times(worker, factors)
                )
                for worker in self.schedule.seat_of
            ]
            self.slow = self.slow.with_iteration(
                CommittedIteration(
                    iteration=self.iteration,
                    loss=1.0,
                    window_seconds=1.0,
                    gradient_norm=None,
                    evaluation=None,
                    cost_error=None,
                    reports=reports,
                )
            )
            self.iteration += 1

    def look(self, at=0.0):
        """Look who may come in again, once plans for the present speeds are known."""
        before = self.slow.left_out.keys()
        self.to.at = at
        self.slow = self.slow.request_decision(self.schedule, self.iteration, self.to)
        if self.to.effects and isinstance(self.to.effects[-1], SpeedRequest):
            answer = answer_request(question := self.to.effects.pop(), self.plan)
            self.slow = self.slow.with_answer(
                SpeedAnswer(question, answer), self.iteration, self.to
            )
        return before - self.slow.left_out.keys()


def times(worker, factors):
    return tuple(
        OpTime(kind, worker.column, 8, 0.1 * factors.get(worker, 1.0)) for kind in COMPUTE_KINDS
    )


def leave_out(run):
    run.train(12, {LEFT_OUT: 100.0})
    assert not run.look(run.to.at) and run.slow.decision.left_out == (LEFT_OUT,)
    run.begin(run.slow.decision.schedule)


def test_one_that_is_left_out_takes_part_again_after_a_pause_that_is_longer_each_time():
    run, pauses = Run(), []
    for _ in range(3):
        leave_out(run)
        began = run.to.at
        assert run.slow.left_out.keys() == {LEFT_OUT} and run.slow.factors[LEFT_OUT] == 100.0
        while not run.look(run.to.at + 1.0):
            pass
        pauses.append(run.to.at - began)
        assert not run.slow.left_out and LEFT_OUT not in run.slow.factors, (
            "it is believed to be as quick as others"
        )
        run.begin(FIRST)
    assert (
        pauses == [10.0, 20.0, 40.0] and [event.left_out for event in run.told] == [(LEFT_OUT,)] * 3
    )


def test_others_that_become_slow_meanwhile_are_relieved():
    run = Run()
    leave_out(run)
    run.train(12, {OTHER: 1.8})
    assert not run.look() and run.slow.decision.left_out == ()
    run.begin(run.slow.decision.schedule)
    assert {change.worker for change in run.told[1].changes} == {OTHER} and run.told[1].changed
    assert run.slow.left_out.keys() == {LEFT_OUT}
