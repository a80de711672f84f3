"""This project: schedules that fill bubbles with re-routed work, computed by the planner, switched by the runtime."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from planner.fleet.availability_trace import Change
from planner.fleet.policies.rerouting import Rerouting
from planner.fleet.policy import Cause, Phase, Scenario
from planner.fleet.throughput import DownByStage


class Choice(NamedTuple):
    """Which of the live machines to do without, because they are too slow, and the throughput then."""

    rate: float
    left_out: frozenset[int]


class Slipstream(Rerouting):
    """Those who join or move load their stage while the others train on."""

    name = "slipstream"
    title = "this planner, failures spread over stages by moving workers"
    assumptions = ("the schedules of `slipstream plan` (list schedulers, or the table given), never slower than those "
                   "of ReCycle, which it may choose; a failure costs half an iteration and a switch; who joins or "
                   "moves loads one stage from peers while the others train on, and a switch follows; a slow worker "
                   "is waited for, or left out as if it were down, whichever is faster; a worker that lost some of its "
                   "GPUs goes on with the others, so many times slower")
    balances_speeds = True

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._left_out: frozenset[int] = frozenset()
        """Slow machines that the present schedule does without."""

    @staticmethod
    def alive_gpus(alive: int, whole: int) -> int:  # noqa: ARG004
        """It goes on with those that it has."""
        return alive

    def rate(self, down: DownByStage) -> float:
        """By the planner's schedule, or on the pipelines that are whole, where that is faster."""
        return max(self.throughputs.planned(down),
                   self.throughputs.one_f_one_b(self.scenario.pipelines - max(down)))

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> list[Phase]:
        """Where only speeds change, a switch follows if other workers are left out then."""
        phases = super().on_change(change, remaining)
        before, self._left_out = self._left_out, self._choice(self._held).left_out
        switches = change.removed or remaining[0].cause is not Cause.RUN or before == self._left_out & self._held.keys()
        return phases if switches else [self._switch(), *phases]

    def _rate_of(self, stages: dict[int, int]) -> float:
        """Samples per second of machines that hold these stages, the slowest left out where that pays."""
        return self._choice(stages).rate

    def _choice(self, stages: dict[int, int]) -> Choice:
        """Leave out the slowest machines, as many as pays. All others wait for the slowest of those that are left.

        A schedule in which every op takes at most f times as long has at most f times the period.
        """
        down = list(self._down(stages))
        slow = sorted(((factor, machine) for machine, factor in self.slow.items() if machine in stages), reverse=True)
        best, left_out = Choice(0.0, frozenset()), list[int]()
        for factor, machines in groupby([*slow, (1.0, -1)], key=lambda pair: pair[0]):
            if max(down) >= self.scenario.pipelines:
                break
            best = max(best, Choice(self.rate(tuple(down)) / factor, frozenset(left_out)), key=lambda one: one.rate)
            for _, machine in machines:
                if machine >= 0:
                    left_out.append(machine)
                    down[stages[machine]] += 1
        return best

    def _reconfigure(self, now: float, stalls: list[Phase], lost_samples: float) -> list[Phase]:
        """At once with those who hold a stage; with all when they have loaded theirs."""
        at_once, then = self._rate_of(self._held), self._rate_of(self._stage)
        loads, load, switch = self._held != self._stage, self.costs.load_seconds, self._switch()
        self._loaded_at = now + sum(stall.seconds for stall in stalls) + loads * load
        if stalls and loads and load * at_once < switch.seconds * then:
            # Another switch would cost more than what is trained until then.
            return self.resume_training(then, *stalls, Phase(Cause.LOAD, load), lost_samples=lost_samples)
        phases = self.resume_training(at_once, *stalls, lost_samples=lost_samples)
        return self.change_rate(phases, self._loaded_at - now, switch, then) if loads else phases


class SlipstreamFixed(Slipstream):
    """No live worker loads other parameters; a newcomer may be given any stage."""

    name = "slipstream-fixed"
    title = "this planner, no live worker changes its stage"
    assumptions = (Slipstream.assumptions + "; newcomers, who have to load a stage anyway, get the one that lacks "
                   "workers most")
    moves_workers = False
