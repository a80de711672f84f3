"""The interface of a policy: how a job reacts when machines are lost or added.

A policy answers each change with consecutive *phases*, each with a duration, a rate and a cause.
The last phase has no end. The next change interrupts the phases, and the policy is given those that
remain.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, NamedTuple

import msgspec

from slipstream.planner.simulation.availability_trace import Change
from slipstream.planner.simulation.costs import Costs
from slipstream.planner.simulation.loads import DownByStage
from slipstream.planner.simulation.throughput import Throughputs


class Cause(StrEnum):
    """Reason why a job makes less progress than the fastest policy without failures."""

    RUN = "fewer workers"
    """Training: what is lost against the policy's own rate with all workers alive."""
    SWITCH = "reconfiguring"
    LOAD = "loading parameters"
    LOST = "redoing lost work"
    RESTART = "restarting from a checkpoint"
    CHECKPOINT = "writing checkpoints"
    WAIT = "waiting for workers"
    SLOW = "waiting for slow workers"
    """Loss while all wait for slow workers; none for policies that plan for different speeds."""
    LINKS = "slow links"
    WHOLE = "slower even when whole"
    """Loss of a policy whose schedule with all workers alive is slower than the best."""


TRAINING_CAUSES = (Cause.RUN, Cause.LOST)
"""Causes of phases in which the job trains, whether its samples are new or redone."""
STATELESS_CAUSES = (Cause.WAIT, Cause.RESTART)
"""Causes of phases in which no worker holds parameters."""


class Phase(msgspec.Struct, frozen=True, gc=False):
    """Span of simulated time at one training rate, 0 while nothing trains, for one cause."""

    cause: Cause
    seconds: float = math.inf
    rate: float = 0.0
    """Useful samples per second: those that are trained for the first time."""
    checkpoints: float = 0.0
    """Samples per second that could also be trained if no checkpoints were written."""
    redone: float = 0.0
    """Samples per second trained a second time."""

    @property
    def trained_rate(self) -> float:
        """Samples per second, useful or redone, if no checkpoints were written."""
        return self.rate + self.checkpoints + self.redone

    def with_seconds(self, seconds: float) -> "Phase":
        """Return this phase with another duration."""
        if seconds == self.seconds:
            return self
        return Phase(self.cause, seconds, self.rate, self.checkpoints, self.redone)

    def with_slowdown(self, factor: float) -> "Phase":
        """Return this phase with rates divided by `factor` and, if it redoes samples, longer."""
        if factor == 1.0 or not (self.rate or self.redone):
            return self
        seconds = self.seconds * factor if self.redone else self.seconds
        return Phase(
            self.cause, seconds, self.rate / factor, self.checkpoints / factor, self.redone / factor
        )


class Scenario(NamedTuple):
    """Inputs that all policies share: throughputs, costs, and mean seconds between failures."""

    throughputs: Throughputs
    costs: Costs
    seconds_between_failures: float

    @property
    def stages(self) -> int:
        """Number of workers in a pipeline."""
        return self.throughputs.job.stages

    @property
    def pipelines(self) -> int:
        """Number of pipelines of the job, as with all workers alive."""
        return self.throughputs.job.pipelines

    @property
    def workers(self) -> int:
        """Number of workers of the job, whose machines are numbered from 0."""
        return self.throughputs.workers

    @property
    def checkpoint_interval(self) -> float:
        """Seconds of training between checkpoints: sqrt(2 C M), and at least C (Young 1974).

        C is the time to write a checkpoint, and M the mean time between failures.
        """
        return max(
            self.costs.checkpoint_seconds,
            math.sqrt(2 * self.costs.checkpoint_seconds * self.seconds_between_failures),
        )


class Policy(ABC):
    """Base class of policies, which define `start`, `on_change` and `steady_rate`."""

    name: ClassVar[str]
    title: ClassVar[str]
    """Description of the policy in one line."""
    assumptions: ClassVar[str]
    """Assumptions of the policy's simulation."""
    source: ClassVar[str]
    """Paper, section or figure, artifact; "our reading" if no code is public."""

    is_reference: ClassVar[bool] = False
    """True if this is a line to compare with, and no system that exists."""
    plans_schedules: ClassVar[bool] = False
    """True if the policy always runs this planner's schedules.

    Other policies run the schedules that they publish, and are also simulated with this planner's.
    """
    pauses: ClassVar[bool] = False
    """True if training stops for checkpoints; otherwise they are written in the background."""
    balances_speeds: ClassVar[bool] = False
    """True if the plan changes with speeds; otherwise all wait for the slowest worker."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.throughputs = scenario.throughputs
        self.costs = scenario.costs
        self.spans = PhaseHistory()
        self.checkpoints = CheckpointTimes(
            self.spans,
            scenario.checkpoint_interval,
            scenario.costs.checkpoint_seconds if self.pauses else 0.0,
        )
        self.slow: dict[int, float] = {}
        """Slowdown factor of each live machine that is slow, by machine."""
        self.switch = Phase(Cause.SWITCH, scenario.costs.switch_seconds)
        self.load = Phase(Cause.LOAD, scenario.costs.load_seconds)
        self._samples_owed = 0.0
        """Samples that a waiting job must train again, besides those since the checkpoint."""

    @property
    def fault_free_rate(self) -> float:
        """Samples per second with all workers alive, without checkpoints.

        The default is `Throughputs.whole_pipelines_rate` of all pipelines.
        """
        return self.throughputs.whole_pipelines_rate(self.scenario.pipelines)

    @abstractmethod
    def start(self, live: Sequence[int]) -> list[Phase]:
        """Return the phases from the beginning on the machines `live`, the last without end."""

    @abstractmethod
    def on_change(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """Return the phases after machines were lost, added, or changed in speed.

        The last phase has no end. The argument `remaining` has what is left of the phases before,
        the current one first.
        """

    @abstractmethod
    def steady_rate(self, failures: int) -> float:
        """Return the long-run samples per second with `failures` workers dead.

        The policy chooses these workers, mostly so that their loss costs least.
        """

    @staticmethod
    def alive_gpus(alive: int, whole: int) -> int:
        """Return the number of GPUs that a worker uses if `alive` of `whole` are alive.

        0 if the worker is down. By default, it is down if any of its GPUs is lost.
        """
        return alive if alive == whole else 0

    @property
    def slowdown(self) -> float:
        """Factor by which slow machines lengthen training; 1 if the policy's rates include it."""
        return 1.0 if self.balances_speeds or not self.slow else max(self.slow.values())

    def handle_change(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """Record changes of speed, and return the phases after a change.

        The phases are `remaining`, unchanged, if only links changed, or only speeds and the policy
        does not balance these; otherwise those of `on_change`.
        """
        if self.slow:
            for machine in (*change.removed, *change.added):
                self.slow.pop(machine, None)
        for machine, factor in change.slowed:
            self.slow[machine] = factor
            if factor == 1.0:
                del self.slow[machine]
        if change.removed or change.added or (change.slowed and self.balances_speeds):
            return self.on_change(change, remaining)
        return remaining

    # --- Shared by several policies ---------------------------------------------------------------

    def resume_training(
        self, rate: float, *stalls: Phase, lost_samples: float = 0.0
    ) -> list[Phase]:
        """Return the pauses `stalls`, then redoing the lost samples, then training at `rate`.

        The rate is in samples per second. At a rate of 0, the job waits instead, and the lost
        samples are redone at the next `restart`.
        """
        if not rate:
            self._samples_owed += lost_samples
            return [Phase(Cause.WAIT)]
        if not lost_samples:
            return [*stalls, self.training_phase(rate)]
        return [
            *stalls,
            Phase(Cause.LOST, lost_samples / rate, 0.0, 0.0, rate),
            self.training_phase(rate),
        ]

    def change_rate(
        self, phases: Sequence[Phase], seconds: float, stall: Phase, rate: float
    ) -> list[Phase]:
        """Return `phases` up to `seconds`, then the pause `stall`, then training at another rate.

        The rate is in samples per second. Lost samples still to be redone after `seconds` are
        redone at the new rate. At a rate of 0, the job waits, without `stall` (`resume_training`).
        The last of `phases` must have no end.
        """
        unchanged: list[Phase] = []
        for index, phase in enumerate(phases):
            if phase.seconds > seconds:
                rest = [phase.with_seconds(phase.seconds - seconds), *phases[index + 1 :]]
                unchanged += [phase.with_seconds(seconds)] if seconds else []
                return [
                    *unchanged,
                    *self.resume_training(rate, stall, lost_samples=count_samples_to_redo(rest)),
                ]
            unchanged.append(phase)
            seconds -= phase.seconds
        raise AssertionError("the last phase of a policy has an end")

    def resume_after_change(
        self,
        rate: float,
        remaining: Sequence[Phase],
        *stalls: Phase,
        worker_died: bool,
        state_lost: bool = False,
    ) -> list[Phase]:
        """Return the pauses `stalls`, then redoing lost samples, then training at `rate`.

        `remaining` has the phases that were still to come. With `worker_died`, up to half an
        iteration is lost (`discard_lost_samples`). If only the checkpoint holds the parameters of
        some stage (`state_lost`, or `remaining` begins with waiting or restarting), the job
        restarts from it instead. At a rate of 0, it waits.
        """
        if state_lost or self.needs_checkpoint(remaining):
            return self.restart(rate, remaining)
        return self.resume_training(
            rate,
            *stalls,
            lost_samples=self.discard_lost_samples(remaining, worker_died=worker_died),
        )

    def restart(self, rate: float, remaining: Sequence[Phase]) -> list[Phase]:
        """Return the phases of a restart from the last checkpoint, and record it.

        After a pause, samples since the checkpoint, those still to be redone in `remaining`, and
        those lost while the job waited are redone; training at `rate` samples per second follows.
        At a rate of 0, the job waits instead.
        """
        lost_samples = (
            self.checkpoints.return_to_last()
            + count_samples_to_redo(remaining)
            + self._samples_owed
        )
        self._samples_owed = 0.0
        return self.resume_training(
            rate, Phase(Cause.RESTART, self.costs.restart_seconds), lost_samples=lost_samples
        )

    def training_phase(self, rate: float) -> Phase:
        """Return endless training at `rate` samples per second, less the time for checkpoints."""
        if not self.pauses:
            return Phase(Cause.RUN, math.inf, rate)
        interval = self.scenario.checkpoint_interval
        useful = rate * interval / (interval + self.costs.checkpoint_seconds)
        return Phase(Cause.RUN, rate=useful, checkpoints=rate - useful)

    def discard_lost_samples(self, remaining: Sequence[Phase], *, worker_died: bool) -> float:
        """Return the number of samples to redo after a change.

        To those that `remaining` was still to redo, half an iteration is added if a worker died
        while the job trained. That half is recorded as discarded, and limited to the samples
        trained since the job last paused.
        """
        if not worker_died or remaining[0].cause not in TRAINING_CAUSES:
            return count_samples_to_redo(remaining)
        # A death comes in mid-iteration on average, but soon after a pause little is lost.
        discarded = min(self.throughputs.samples / 2, self.checkpoints.samples_since_stall)
        self.checkpoints.record_discarded(discarded)
        return count_samples_to_redo(remaining) + discarded

    @staticmethod
    def needs_checkpoint(remaining: Sequence[Phase]) -> bool:
        """Return whether only the checkpoint has the parameters in the phase `remaining[0]`."""
        return remaining[0].cause in STATELESS_CAUSES


class RatedByStage(Policy):
    """Base class of policies whose `rate` depends on the dead workers of each stage."""

    @abstractmethod
    def rate(self, down: DownByStage) -> float:
        """Return the samples per second with `down` dead workers of each stage."""

    @property
    def fault_free_rate(self) -> float:
        """Samples per second with all workers alive."""
        return self.rate((0,) * self.scenario.stages)

    def steady_rate(self, failures: int) -> float:
        """Return samples per second with failures spread evenly; 0 if a stage has no workers."""
        spread = self.throughputs.loads.spread_evenly(failures)
        return self.rate(spread) if spread else 0.0


def count_samples_to_redo(remaining: Sequence[Phase]) -> float:
    """Return how many samples the phases still to come (`remaining`) redo."""
    samples = 0.0
    for phase in remaining:
        if phase.redone:
            samples += phase.seconds * phase.redone
    return samples


class PhaseHistory:
    """History of a simulated run: consecutive spans of time, each in one phase."""

    def __init__(self) -> None:
        self.seconds = [0.0]
        """Time in seconds at which each span starts, and at which the last one ends."""
        self.phases: list[Phase] = []
        """Phase that is in progress during each span."""
        self.slowdowns: list[tuple[float, float]] = []
        """Pairs of factors by which slow workers and slow links lengthen training, by span."""

    def record_until(
        self, phases: Sequence[Phase], until: float, workers: float = 1.0, links: float = 1.0
    ) -> Sequence[Phase]:
        """Record phases up to the time `until`, in seconds, and return the rest of them.

        Slow workers and slow links lengthen the recorded training by the factors `workers` and
        `links`; what is returned is not lengthened. The last phase must have no end.
        """
        clock, slowdown = self.seconds[-1], workers * links
        if slowdown != 1.0:
            phases = [phase.with_slowdown(slowdown) for phase in phases]
        for index, phase in enumerate(phases):
            end = clock + phase.seconds
            if (recorded := end if end < until else until) > clock:
                self.seconds.append(recorded)
                self.phases.append(phase)
                self.slowdowns.append((workers, links))
            # The rest is returned at the usual speed: by the next change, another factor may hold.
            if end > until:
                if not index and end == math.inf and slowdown == 1.0:
                    return phases
                rest = phase.with_seconds(end - until)
                following = [rest, *phases[index + 1 :]]
                if slowdown == 1.0:
                    return following
                return [later_phase.with_slowdown(1 / slowdown) for later_phase in following]
            clock = end
        raise AssertionError("the last phase of a policy has an end")


class CheckpointTimes:
    """Times of checkpoints, and the samples that a return to the last one would lose.

    A checkpoint is complete at every multiple of `cycle` seconds of the trace (the interval plus
    the pause to write one) at which the job trains. So policies that train at the same times have
    checkpoints at the same times, whatever their throughput.
    """

    def __init__(self, spans: PhaseHistory, interval_seconds: float, pause_seconds: float) -> None:
        """Follow a run of history `spans`, with a checkpoint every `interval_seconds` of training.

        Training stops for `pause_seconds`, possibly 0, to write it.
        """
        self.interval = interval_seconds
        self.cycle = interval_seconds + pause_seconds
        self._spans = spans
        self._first = 0
        """Index of the first span since the job last returned to a checkpoint."""
        self._discarded: list[tuple[int, float]] = []
        """Samples discarded since the last return: pairs (number of spans by then, samples)."""

    @property
    def samples_since_stall(self) -> float:
        """Number of samples trained since the job last paused, useful or redone.

        Time in which checkpoints are written counts as training.
        """
        seconds, phases = self._spans.seconds, self._spans.phases
        first = len(phases)
        while first and phases[first - 1].trained_rate:
            first -= 1
        samples = 0.0
        for index in range(first, len(phases)):
            samples += phases[index].trained_rate * (seconds[index + 1] - seconds[index])
        return samples

    def record_discarded(self, samples: float) -> None:
        """Record samples as lost, to be trained again."""
        self._discarded.append((len(self._spans.phases), samples))

    def return_to_last(self) -> float:
        """Record a return to the last checkpoint; return how many samples it loses in addition.

        Samples recorded as discarded since that checkpoint are lost already.
        """
        seconds = self._spans.seconds
        phases = self._spans.phases
        cycle = self.cycle
        interval = self.interval
        beyond, at = 0.0, 0
        for index in range(self._first, len(phases) + 1):
            # What was discarded before this span is subtracted once.
            while at < len(self._discarded) and self._discarded[at][0] == index:
                beyond, at = max(0.0, beyond - self._discarded[at][1]), at + 1
            if index == len(phases) or not phases[index].trained_rate:
                continue
            begin, end = seconds[index], seconds[index + 1]
            # A checkpoint within the span makes all before it safe.
            last = math.floor(end / cycle) * cycle
            if last > begin:
                begin, beyond = last, 0.0
            beyond += phases[index].trained_rate * (
                min(end - last, interval) - min(begin - last, interval)
            )
        self._first, self._discarded = len(phases), []
        return beyond

    def next_after(self, seconds: float) -> float:
        """Return the time at which the first checkpoint after `seconds` is complete."""
        return (math.floor(seconds / self.cycle) + 1) * self.cycle
