"""This project: schedules that fill bubbles with re-routed work, computed by the planner, switched by the runtime."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import ClassVar, NamedTuple

from slipstream.cli.fleet.availability_trace import Change
from slipstream.cli.fleet.loads import DownByStage
from slipstream.cli.fleet.policies.rerouting import Rerouting, Stages
from slipstream.cli.fleet.policy import Cause, Phase, Scenario
from slipstream.cli.fleet.settled import SlowWorker

AT_ONCE = ("the schedules of `slipstream plan` (list schedulers, or the table given), never slower than those of "
           "ReCycle, which it may choose; a failure costs half an iteration and a switch; who joins or moves loads one "
           "stage from peers while the others train on, and a switch follows; a slow worker is waited for, or left out "
           "as if it were down, whichever is faster; a worker that lost some of its GPUs is down")
SETTLED = ("; layers move while it trains on, for as long as the busiest worker needs for what it receives, and a "
           "switch follows, where its pause is made up for before the next failure, on average; slow workers have "
           "fewer layers then, where that is fastest; the next failure is answered at once as if they had not moved")


STEP = 0.25
"""To whose multiples speeds of slow workers are rounded, up: plans are made for few."""


class LeaveOutChoice(NamedTuple):
    """Which of the live machines to do without, because they are too slow, and the throughput then."""

    rate: float
    left_out: frozenset[int]


class Slipstream(Rerouting):
    """At once with the layers where they are; then settled, with layers moved, when that pays.

    Layers move, and those who join or change their stage load it, while the others train on. Every machine has a stage,
    which it holds besides or instead of what the settled plan gives it: that decides what the next failure is answered
    with at once, and which failures lose a stage. So nothing is ever slower than with the layers in place.
    """

    name = "slipstream"
    title = "this planner: at once with layers in place, then settled with layers moved"
    source = "this repository: `slipstream plan`, `slipstream table`"
    assumptions = AT_ONCE + SETTLED
    balances_speeds = True
    moves_layers: ClassVar[bool] = True

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._left_out: frozenset[int] = frozenset()
        """Slow machines that the present schedule does without; those that still load count, too."""
        self._settled_at, self._settled = 0.0, 0.0
        """When the settled plan runs, or will, and its samples per second at the speeds it was made for; 0: none."""
        self._settled_for: dict[int, float] = {}
        """Those of the machines that were slow then."""

    def rate(self, down: DownByStage) -> float:
        """By the planner's schedule, or on the pipelines that are whole, where that is faster."""
        return self.throughputs.in_place(down)

    @property
    def fault_free_rate(self) -> float:
        """The best with all workers alive; that of fewer is open to them, too."""
        return self.steady_rate(0)

    def settled_rate(self, down: DownByStage) -> float:
        """Once layers have moved: by the planner's schedule for so many failures."""
        failures = sum(down)
        return self.throughputs.settled(failures)[0] if failures < self.throughputs.workers else 0.0

    def steady_rate(self, failures: int) -> float:
        """Settled, where that is faster."""
        at_once = super().steady_rate(failures)
        return max(at_once, self.throughputs.settled(failures)[0]) if self.moves_layers else at_once

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Settled from the beginning, where some machines are missing."""
        super().start(live)
        self._settled_at, self._settled, self._settled_for = 0.0, self._settled_rate_now(), {}
        return self.resume_training(self._best_rate())

    def restart(self, rate: float, remaining: Sequence[Phase]) -> list[Phase]:  # noqa: ARG002
        """Settled, as all load their layers from the checkpoint anyway."""
        self._settled, self._settled_for = self._settled_rate_now(), {}
        return super().restart(self._best_rate(), remaining)

    def _settled_rate_now(self) -> float:
        return self.settled_rate(self._stages.down) if self.moves_layers else 0.0

    def _best_rate(self) -> float:
        at_once = self._rate_of(self._stages)
        return max(at_once, self._settled_best()) if self.moves_layers else at_once

    def _settled_best(self) -> float:
        """Samples per second of the best plan with layers moved: for slow workers as they are, or without the slowest.
        """
        return max(self._best(self._stages, self.settled_rate), self._settled_for_slow())

    def _settled_for_slow(self) -> float:
        """By a plan for slow workers as they are; 0 where there are none."""
        slow = [factor for machine, factor in self.slow.items() if machine in self._stages.of]
        if not slow or self._stage_lost(self._stages):
            return 0.0
        longest = math.ceil(max(slow) / STEP) * STEP
        return self.throughputs.settled(sum(self._stages.down), SlowWorker(len(slow), longest))[0]

    def _settled_now(self) -> float:
        """By the settled plan at present speeds. An op that takes f times as long makes it f times as long at most."""
        return self._settled / max([1.0, *(factor / self._settled_for.get(machine, 1.0)
                                           for machine, factor in self.slow.items())])

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> list[Phase]:
        """Where only speeds change, a switch follows if other workers are left out then."""
        if change.removed or change.seconds < self._settled_at:
            self._settled = 0.0  # some of its layers are gone, or not there yet
        phases = super().on_change(change, remaining)
        if not self.slow and not self._left_out:
            return phases
        before, self._left_out = self._left_out, self._choice(self._stages, self.rate).left_out
        same = before == self._left_out & self._held.of.keys()
        return phases if change.removed or remaining[0].cause is not Cause.RUN or same else [self.switch, *phases]

    def _rate_of(self, stages: Stages) -> float:
        """Samples per second of machines that hold these stages, the slowest left out where that pays."""
        return self._best(stages, self.rate)

    def _best(self, stages: Stages, rate: Callable[[DownByStage], float]) -> float:
        """Samples per second of the best choice."""
        if self.slow:
            return self._choice(stages, rate).rate
        return rate(stages.down) if not self._stage_lost(stages) else 0.0

    def _choice(self, stages: Stages, rate: Callable[[DownByStage], float]) -> LeaveOutChoice:
        """Leave out the slowest machines, as many as pays. All others wait for the slowest of those that are left.

        A schedule in which every op takes at most f times as long has at most f times the period.
        """
        down = list(stages.down)
        slow = sorted(((factor, machine) for machine, factor in self.slow.items() if machine in stages.of),
                      reverse=True)
        best, left_out = LeaveOutChoice(0.0, frozenset()), list[int]()
        for factor, machines in groupby([*slow, (1.0, -1)], key=lambda pair: pair[0]):
            if max(down) >= self._pipelines:
                break
            best = max(best, LeaveOutChoice(rate(tuple(down)) / factor, frozenset(left_out)), key=lambda one: one.rate)
            for _, machine in machines:
                if machine >= 0:
                    left_out.append(machine)
                    down[stages.of[machine]] += 1
        return best

    def _reconfigure(self, now: float, stalls: list[Phase], lost_samples: float) -> list[Phase]:
        """At once with those who hold a stage, or as settled before, if none of those has left; then with all."""
        settled = self._settled_now()
        at_once, then = max(settled, self._rate_of(self._held)), max(settled, self._rate_of(self._stages))
        loads, load, switch = self._loading, self.costs.load_seconds, self.switch
        self._loaded_at = now + sum([stall.seconds for stall in stalls]) + loads * load
        if stalls and loads and load * at_once < switch.seconds * then:
            # Another switch would cost more than what is trained until then.
            phases = self.resume_training(then, *stalls, self.load, lost_samples=lost_samples)
        else:
            phases = self.resume_training(at_once, *stalls, lost_samples=lost_samples)
            loads = loads and then > at_once
            phases = self.change_rate(phases, self._loaded_at - now, switch, then) if loads else phases
        return self._settle(phases, then, now, self._loaded_at - now + loads * switch.seconds)

    def _settle(self, phases: list[Phase], rate: float, now: float, seconds: float) -> list[Phase]:
        """These phases, which train at `rate` after so many seconds, and the settled plan when it is there, if it pays.

        It pays where the pause of the switch is made up for before the next failure, on average.
        """
        if not self.moves_layers or phases[0].cause is Cause.WAIT:
            return phases
        usual = self._settled_rate_now()
        settled = max(rate, self._settled_best() if self.slow else usual)
        move = self.throughputs.settled(self.scenario.workers - len(self._stages.of))[1] * self.costs.load_seconds
        move += self.costs.plan_seconds
        gained = settled - rate
        made_up = self.costs.switch_seconds * settled / gained if gained > 0 else math.inf
        if seconds + move + made_up > self.scenario.seconds_between_failures:
            return phases
        self._settled_at, self._settled, self._settled_for = now + seconds + move, usual, {}
        if self.slow and (for_slow := self._settled_for_slow()) == settled:
            self._settled, self._settled_for = for_slow, dict(self.slow)
        return self.change_rate(phases, seconds + move, self.switch, settled)


class SlipstreamFixed(Slipstream):
    """No live worker loads other parameters; a newcomer may be given any stage."""

    name = "slipstream-fixed"
    title = "this planner, no live worker changes its stage"
    assumptions = AT_ONCE + ("; newcomers, who have to load a stage anyway, get the one that lacks workers most")
    moves_workers = False
    moves_layers = False
