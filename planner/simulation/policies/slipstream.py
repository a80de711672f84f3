"""This project's policies: schedules fill bubbles with re-routed work."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import ClassVar, NamedTuple

from slipstream.planner.simulation.availability_trace import Change
from slipstream.planner.simulation.loads import DownByStage
from slipstream.planner.simulation.policies.rerouting import Rerouting, StageAssignment
from slipstream.planner.simulation.policy import Cause, Phase, Scenario
from slipstream.planner.simulation.settled import SlowWorkerCount

AT_ONCE_ASSUMPTIONS = (
    "the schedules of `slipstream plan` (list schedulers, or the table given), with micro-batches "
    "cut within a stage where dropping replicas would keep more, never slower than those of "
    "ReCycle, which it may choose; a failure costs half an iteration and a switch; who joins or "
    "moves loads one stage from peers while the others train on, and a switch follows; a slow "
    "worker is waited for, or left out as if it were down, whichever is faster; a worker that lost "
    "some of its GPUs is down"
)
SETTLED_ASSUMPTIONS = (
    "; layers move while it trains on, for as long as the busiest worker needs for what it "
    "receives, and a switch follows, where its pause is made up for before the next failure, on "
    "average; slow workers have fewer layers then, where that is fastest; the next failure is "
    "answered at once as if they had not moved"
)


SPEED_STEP = 0.25
"""Step to which planned slowdown factors are rounded up, so that plans are few."""


class LeaveOutChoice(NamedTuple):
    """Choice of slow machines to leave idle, and the resulting samples per second."""

    rate: float
    left_out: frozenset[int]


class Slipstream(Rerouting):
    """Policy that answers a failure in place, then with layers moved if that pays.

    Training continues while layers move and, unless waiting costs less, while machines that join or
    change their stage load it. Every machine keeps a stage beside its layers in the rebalanced
    plan: the stages decide the first answer to the next failure, and which failures lose a stage.
    So training is never slower than with layers in place.
    """

    name = "slipstream"
    title = "this planner: at once with layers in place, then settled with layers moved"
    source = "this repository: `slipstream plan`, `slipstream table`"
    assumptions = AT_ONCE_ASSUMPTIONS + SETTLED_ASSUMPTIONS
    balances_speeds = True
    plans_schedules = True
    moves_layers: ClassVar[bool] = True

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._left_out: frozenset[int] = frozenset()
        """Slow machines that the present schedule leaves idle, loading ones included."""
        self._settled_at = 0.0
        """Time in seconds of the trace at which the plan with layers moved begins."""
        self._planned_rate = 0.0
        """Samples per second of the plan with layers moved, at its own speeds. 0 without a plan."""
        self._planned_slowness: dict[int, float] = {}
        """Slowdown factors of machines when the plan with layers moved was made."""

    def rate(self, down: DownByStage) -> float:
        """Return the samples per second of the best schedule with layers in place.

        It is the planner's schedule, or one of the pipelines without a dead worker if that is
        faster. The argument `down` has the number of dead workers of each stage.
        """
        return self.throughputs.in_place_rate(down)

    @property
    def fault_free_rate(self) -> float:
        """Samples per second of the best schedule with all workers alive."""
        return self.steady_rate(0)

    def rebalanced_rate(self, down: DownByStage) -> float:
        """Return the samples per second of the planner's schedule with layers moved, or 0.

        The rate is 0 without such a schedule. The argument `down` has the number of dead workers of
        each stage; only their sum counts, since layers can move.
        """
        failures = sum(down)
        return (
            self.throughputs.rebalanced_answer(failures)[0]
            if failures < self.throughputs.workers
            else 0.0
        )

    def steady_rate(self, failures: int) -> float:
        """Return the samples per second with layers in place or moved, whichever is faster."""
        at_once = super().steady_rate(failures)
        return (
            max(at_once, self.throughputs.rebalanced_answer(failures)[0])
            if self.moves_layers
            else at_once
        )

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Return the first phases on the machines `live`, with layers moved if that is faster."""
        super().start(live)
        self._plan_rebalanced_from_start()
        return self.resume_training(self._best_rate())

    def restart(self, rate: float, remaining: Sequence[Phase]) -> list[Phase]:  # noqa: ARG002
        """Return the phases of a restart, with layers moved if that is faster; ignore `rate`."""
        # All machines load their layers from the checkpoint anyway: moved ones cost no more.
        self._plan_rebalanced_from_start()
        return super().restart(self._best_rate(), remaining)

    def _plan_rebalanced_from_start(self) -> None:
        """Begin with the plan with layers moved, for which no layer has to move later."""
        self._settled_at, self._planned_rate, self._planned_slowness = (
            0.0,
            self._rebalanced_rate_now(),
            {},
        )

    def _rebalanced_rate_now(self) -> float:
        return self.rebalanced_rate(self._stages.down_by_stage) if self.moves_layers else 0.0

    def _best_rate(self) -> float:
        at_once = self._rate_for_stages(self._stages)
        return max(at_once, self._best_rebalanced_rate()) if self.moves_layers else at_once

    def _best_rebalanced_rate(self) -> float:
        """Return the samples per second with layers moved, slow machines idle or with less work."""
        return max(
            self._rate_of_best_choice(self._stages, self.rebalanced_rate),
            self._rate_for_slow_workers(),
        )

    def _rate_for_slow_workers(self) -> float:
        """Return the samples per second of a plan for the workers that are slow now."""
        slow = [factor for machine, factor in self.slow.items() if machine in self._stages.stage_of]
        if not slow or self._has_lost_stage(self._stages):
            return 0.0
        # All slow workers count as the slowest of them, so that few plans serve many speeds.
        longest = math.ceil(max(slow) / SPEED_STEP) * SPEED_STEP
        return self.throughputs.rebalanced_answer(
            sum(self._stages.down_by_stage), SlowWorkerCount(len(slow), longest)
        )[0]

    def _current_rebalanced_rate(self) -> float:
        """Return the samples per second of the last plan with layers moved, at present speeds."""
        # If each op takes at most f times as long as planned, so does the plan.
        return self._planned_rate / max(
            [
                1.0,
                *(
                    factor / self._planned_slowness.get(machine, 1.0)
                    for machine, factor in self.slow.items()
                ),
            ]
        )

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> list[Phase]:
        """Return the phases after machines were lost, added, or changed in speed.

        If none were lost and training runs, the phases begin with a switch of schedules if other
        slow machines are left idle than before.
        """
        if change.removed or change.seconds < self._settled_at:
            self._planned_rate = 0.0  # some of its layers are lost, or not loaded yet
        phases = super().on_change(change, remaining)
        if not self.slow and not self._left_out:
            return phases
        before, self._left_out = (
            self._left_out,
            self._choose_left_out(self._stages, self.rate).left_out,
        )
        # Without a failure, only another choice of idle machines needs a switch.
        same = before == self._left_out & self._held_stages.stage_of.keys()
        return (
            phases
            if change.removed or remaining[0].cause is not Cause.RUN or same
            else [self.switch, *phases]
        )

    def _rate_for_stages(self, stages: StageAssignment) -> float:
        return self._rate_of_best_choice(stages, self.rate)

    def _rate_of_best_choice(
        self, stages: StageAssignment, rate: Callable[[DownByStage], float]
    ) -> float:
        """Return the samples per second with the best choice of idle slow machines, or 0."""
        if self.slow:
            return self._choose_left_out(stages, rate).rate
        return rate(stages.down_by_stage) if not self._has_lost_stage(stages) else 0.0

    def _choose_left_out(
        self, stages: StageAssignment, rate: Callable[[DownByStage], float]
    ) -> LeaveOutChoice:
        """Return which of the slowest machines to leave idle, and the samples per second then."""
        down = list(stages.down_by_stage)
        slow = sorted(
            (
                (factor, machine)
                for machine, factor in self.slow.items()
                if machine in stages.stage_of
            ),
            reverse=True,
        )
        # Leave out the slowest machines one factor after the other. All others wait for the slowest
        # one among them; the factor 1 stands for leaving out every slow machine.
        best, left_out = LeaveOutChoice(0.0, frozenset()), list[int]()
        for factor, machines in groupby([*slow, (1.0, -1)], key=lambda pair: pair[0]):
            if max(down) >= self._pipelines:
                break
            best = max(
                best,
                LeaveOutChoice(rate(tuple(down)) / factor, frozenset(left_out)),
                key=lambda choice: choice.rate,
            )
            for _, machine in machines:
                if machine >= 0:
                    left_out.append(machine)
                    down[stages.stage_of[machine]] += 1
        return best

    def _plan_phases(self, now: float, stalls: list[Phase], lost_samples: float) -> list[Phase]:
        """Return phases without the loading machines, then with all, then with layers moved."""
        settled = self._current_rebalanced_rate()
        # The last plan with layers moved runs from the beginning if it is faster.
        first_rate = max(settled, self._rate_for_stages(self._held_stages))
        final_rate = max(settled, self._rate_for_stages(self._stages))
        loads, load, switch = self._is_loading, self.costs.load_seconds, self.switch
        self._loaded_at = now + sum([stall.seconds for stall in stalls]) + loads * load
        if stalls and loads and load * first_rate < switch.seconds * final_rate:
            # A second switch would cost more samples than are trained before it.
            phases = self.resume_training(final_rate, *stalls, self.load, lost_samples=lost_samples)
        else:
            phases = self.resume_training(first_rate, *stalls, lost_samples=lost_samples)
            loads = loads and final_rate > first_rate
            phases = (
                self.change_rate(phases, self._loaded_at - now, switch, final_rate)
                if loads
                else phases
            )
        return self._append_rebalanced(
            phases, final_rate, now, self._loaded_at - now + loads * switch.seconds
        )

    def _append_rebalanced(
        self, phases: list[Phase], rate: float, now: float, seconds: float
    ) -> list[Phase]:
        """Return `phases`, followed by training with layers moved if that pays.

        At their end, `phases` train at `rate`, in samples per second. Planning and moving begin
        `seconds` after `now`.
        """
        if not self.moves_layers or phases[0].cause is Cause.WAIT:
            return phases
        # The best rate with layers moved, and the seconds to plan and to move them.
        usual = self._rebalanced_rate_now()
        settled = max(rate, self._best_rebalanced_rate() if self.slow else usual)
        move = (
            self.throughputs.rebalanced_answer(self.scenario.workers - len(self._stages.stage_of))[
                1
            ]
            * self.costs.load_seconds
        )
        move += self.costs.plan_seconds
        # The switch must be made up for before the next failure is due.
        gained = settled - rate
        made_up = self.costs.switch_seconds * settled / gained if gained > 0 else math.inf
        if seconds + move + made_up > self.scenario.seconds_between_failures:
            return phases
        # Remember the plan, so that later slowness and failures can reuse it.
        self._settled_at, self._planned_rate, self._planned_slowness = (
            now + seconds + move,
            usual,
            {},
        )
        if self.slow and (for_slow := self._rate_for_slow_workers()) == settled:
            self._planned_rate, self._planned_slowness = for_slow, dict(self.slow)
        return self.change_rate(phases, seconds + move, self.switch, settled)


class SlipstreamFixed(Slipstream):
    """Slipstream without moved layers; live workers change stages only at a restart."""

    name = "slipstream-fixed"
    title = "this planner, no live worker changes its stage"
    assumptions = AT_ONCE_ASSUMPTIONS + (
        "; newcomers, who have to load a stage anyway, get the one that lacks workers most"
    )
    moves_workers = False
    moves_layers = False
