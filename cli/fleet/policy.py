"""The interface of a policy: how a job reacts when machines are lost or added.

A policy answers each change with *phases*, one after the other: so many seconds, at such a rate, for such a cause. The
last phase has no end. The next change interrupts them, and the policy is told what remained of them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, NamedTuple

import msgspec

from slipstream.cli.fleet.availability_trace import Change
from slipstream.cli.fleet.costs import Costs
from slipstream.cli.fleet.loads import DownByStage
from slipstream.cli.fleet.throughput import Throughputs


class Cause(StrEnum):
    """Why a job makes less progress than the best one would."""

    RUN = "fewer workers"
    """It trains, at the rate of the phase."""
    SWITCH = "reconfiguring"
    LOAD = "loading parameters"
    LOST = "redoing lost work"
    RESTART = "restarting from a checkpoint"
    CHECKPOINT = "writing checkpoints"
    WAIT = "waiting for workers"
    SLOW = "waiting for slow workers"
    """By policies that do not balance speeds; those that do train at the rate of a plan for them."""
    LINKS = "slow links"
    WHOLE = "slower even when whole"
    """Its schedule with all workers alive is slower than the best one."""


TRAINING = (Cause.RUN, Cause.LOST)
"""It trains."""
UNTRAINED = (Cause.WAIT, Cause.RESTART)
"""No worker holds parameters."""


class Phase(msgspec.Struct, frozen=True, gc=False):
    """A span of time in which a job makes progress at one rate, for one cause."""

    cause: Cause
    seconds: float = math.inf
    rate: float = 0.0
    """Useful samples per second."""
    checkpoints: float = 0.0
    """Samples per second lost to writing checkpoints."""
    redone: float = 0.0
    """Samples per second trained a second time."""

    @property
    def trained(self) -> float:
        """Samples per second that are trained, useful or not."""
        return self.rate + self.checkpoints + self.redone

    def lasting(self, seconds: float) -> "Phase":
        """The same for so many seconds."""
        if seconds == self.seconds:
            return self
        return Phase(self.cause, seconds, self.rate, self.checkpoints, self.redone)

    def slower(self, factor: float) -> "Phase":
        """The same where all training takes so many times as long."""
        if factor == 1.0 or not (self.rate or self.redone):
            return self
        seconds = self.seconds * factor if self.redone else self.seconds
        return Phase(self.cause, seconds, self.rate / factor, self.checkpoints / factor, self.redone / factor)


class Scenario(NamedTuple):
    """What is the same for all policies: the job's throughputs, the costs, and how often failures come."""

    throughputs: Throughputs
    costs: Costs
    seconds_between_failures: float

    @property
    def stages(self) -> int:
        """Workers in a pipeline."""
        return self.throughputs.job.stages

    @property
    def pipelines(self) -> int:
        """Pipelines with all workers alive."""
        return self.throughputs.job.pipelines

    @property
    def workers(self) -> int:
        """Workers of the job. Machines are numbered from 0 to this - 1."""
        return self.throughputs.workers

    @property
    def checkpoint_interval(self) -> float:
        """Seconds of training between checkpoints: sqrt(2 C M), and at least C.

        C: seconds to write a checkpoint; M: seconds between failures. The formula is Young's (1974).
        """
        return max(self.costs.checkpoint_seconds,
                   math.sqrt(2 * self.costs.checkpoint_seconds * self.seconds_between_failures))


class Policy(ABC):
    """How a job reacts to failures. One object simulates one run."""

    name: ClassVar[str]
    title: ClassVar[str]
    """One line that describes it."""
    assumptions: ClassVar[str]
    """What the simulation assumes, with sources."""
    source: ClassVar[str]
    """What it is taken from: paper, section or figure, artifact; "our reading" where no code of it is public."""

    is_reference: ClassVar[bool] = False
    """Whether this is only a line to compare with, and not a system that exists."""
    pauses: ClassVar[bool] = False
    """Whether training stops while a checkpoint is written. Otherwise it is written in the background."""
    balances_speeds: ClassVar[bool] = False
    """Whether it changes its plan when workers become slow. Otherwise all wait for the slowest, whatever its rate."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.throughputs = scenario.throughputs
        self.costs = scenario.costs
        self.spans = Spans()
        self.checkpoints = CheckpointPauses(self.spans, scenario.checkpoint_interval,
                                       scenario.costs.checkpoint_seconds if self.pauses else 0.0)
        self.slow: dict[int, float] = {}
        """How many times as long each live machine that is slow takes."""
        self.switch = Phase(Cause.SWITCH, scenario.costs.switch_seconds)
        self.load = Phase(Cause.LOAD, scenario.costs.load_seconds)
        self._owed = 0.0
        """Samples that a job which waits for workers has to train a second time, besides those of no checkpoint."""

    @property
    def fault_free_rate(self) -> float:
        """Samples per second with all workers alive, without the cost of checkpoints: by default of 1F1B."""
        return self.throughputs.one_f_one_b(self.scenario.pipelines)

    @abstractmethod
    def start(self, live: Sequence[int]) -> list[Phase]:
        """The phases from the beginning of a trace on; `live` are the machines alive then."""

    @abstractmethod
    def on_change(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """The phases from a change on. `remaining`: what was left of the phases before it, the current one first."""

    @abstractmethod
    def steady_rate(self, failures: int) -> float:
        """Samples per second in steady state with so many workers down, where they cost least; without checkpoints."""

    @staticmethod
    def alive_gpus(alive: int, whole: int) -> int:
        """With how many GPUs a worker goes on of which so many are alive; 0: it is down, as by default."""
        return alive if alive == whole else 0

    @property
    def slowdown(self) -> float:
        """How many times as long training takes as its phases say, because it waits for slow machines."""
        return 1.0 if self.balances_speeds or not self.slow else max(self.slow.values())

    def answer(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """The phases from a change on; one of speeds alone is for policies that balance them."""
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

    # --- Shared by several policies -----------------------------------------------------------------------------------

    def resume_training(self, rate: float, *stalls: Phase, lost_samples: float = 0.0) -> list[Phase]:
        """The phases from now on: stalls, redoing lost samples, training at `rate`; waiting if it is 0."""
        if not rate:
            self._owed += lost_samples
            return [Phase(Cause.WAIT)]
        if not lost_samples:
            return [*stalls, self.training(rate)]
        return [*stalls, Phase(Cause.LOST, lost_samples / rate, 0.0, 0.0, rate), self.training(rate)]

    def change_rate(self, phases: Sequence[Phase], seconds: float, stall: Phase, rate: float) -> list[Phase]:
        """These phases for so many seconds; then a stall, and the rest of them at another rate."""
        before: list[Phase] = []
        for index, phase in enumerate(phases):
            if phase.seconds > seconds:
                rest = [phase.lasting(phase.seconds - seconds), *phases[index + 1:]]
                before += [phase.lasting(seconds)] if seconds else []
                return [*before, *self.resume_training(rate, stall, lost_samples=samples_to_redo(rest))]
            before.append(phase)
            seconds -= phase.seconds
        raise AssertionError("the last phase of a policy has an end")

    def go_on(self, rate: float, remaining: Sequence[Phase], *stalls: Phase, worker_died: bool,
              state_lost: bool = False) -> list[Phase]:
        """The phases after a change: stalls, redoing what a death lost; or a restart where only the checkpoint holds
        the parameters of some stage.
        """
        if state_lost or self.needs_checkpoint(remaining):
            return self.restart(rate, remaining)
        return self.resume_training(rate, *stalls, lost_samples=self.lost_samples(remaining, worker_died=worker_died))

    def restart(self, rate: float, remaining: Sequence[Phase]) -> list[Phase]:
        """The phases of going back to the last checkpoint and redoing what was trained since."""
        lost, self._owed = self.checkpoints.go_back() + samples_to_redo(remaining) + self._owed, 0.0
        return self.resume_training(rate, Phase(Cause.RESTART, self.costs.restart_seconds), lost_samples=lost)

    def training(self, rate: float) -> Phase:
        """Training without end. Where the policy pauses for checkpoints, the rate is the mean over the pauses."""
        if not self.pauses:
            return Phase(Cause.RUN, math.inf, rate)
        interval = self.scenario.checkpoint_interval
        useful = rate * interval / (interval + self.costs.checkpoint_seconds)
        return Phase(Cause.RUN, rate=useful, checkpoints=rate - useful)

    def lost_samples(self, remaining: Sequence[Phase], *, worker_died: bool) -> float:
        """Samples to redo: those not redone yet and, if a worker died while training, half an iteration on average.

        No more is discarded than was trained since the job last stood still.
        """
        if not worker_died or remaining[0].cause not in TRAINING:
            return samples_to_redo(remaining)
        discarded = min(self.throughputs.samples / 2, self.checkpoints.since_stall)
        self.checkpoints.discard(discarded)
        return samples_to_redo(remaining) + discarded

    @staticmethod
    def needs_checkpoint(remaining: Sequence[Phase]) -> bool:
        """Whether only the checkpoint holds the parameters: the job was waiting for workers, or still restarting."""
        return remaining[0].cause in UNTRAINED


class RatedByStage(Policy):
    """A policy whose throughput depends on how many workers of each stage are down."""

    @abstractmethod
    def rate(self, down: DownByStage) -> float:
        """Samples per second with so many workers down in each stage."""

    @property
    def fault_free_rate(self) -> float:
        """With all workers alive."""
        return self.rate((0,) * self.scenario.stages)

    def steady_rate(self, failures: int) -> float:
        """With failures spread over stages, where they may happen to fall; 0 where that leaves a stage without workers.
        """
        spread = self.throughputs.loads.even_spread(failures)
        return self.rate(spread) if spread else 0.0


def samples_to_redo(remaining: Sequence[Phase]) -> float:
    """Samples that were to be trained a second time in these phases."""
    samples = 0.0
    for phase in remaining:
        if phase.redone:
            samples += phase.seconds * phase.redone
    return samples


class Spans:
    """What a run has done so far: consecutive spans of time, each of one phase."""

    def __init__(self) -> None:
        self.seconds = [0.0]
        """Where each span begins, and the end."""
        self.phases: list[Phase] = []
        """The phase that each span is a part of."""
        self.slowdowns: list[tuple[float, float]] = []
        """How many times as long training takes in each span, because of slow workers and of slow links."""

    def spend(self, phases: Sequence[Phase], until: float, workers: float = 1.0, links: float = 1.0) -> Sequence[Phase]:
        """Record phases until a time, training so many times slower. Returns what remains, the current one first."""
        clock, slowdown = self.seconds[-1], workers * links
        if slowdown != 1.0:
            phases = [phase.slower(slowdown) for phase in phases]
        for index, phase in enumerate(phases):
            end = clock + phase.seconds
            if (recorded := end if end < until else until) > clock:
                self.seconds.append(recorded)
                self.phases.append(phase)
                self.slowdowns.append((workers, links))
            if end > until:
                if not index and end == math.inf and slowdown == 1.0:
                    return phases
                rest = phase.lasting(end - until)
                following = [rest, *phases[index + 1:]]
                return [one.slower(1 / slowdown) for one in following] if slowdown != 1.0 else following
            clock = end
        raise AssertionError("the last phase of a policy has an end")


class CheckpointPauses:
    """Tells how many samples would be lost by going back to the last checkpoint.

    One is complete at every multiple of `cycle` seconds at which the job trains. So two policies that train at the same
    times have checkpoints of the same times, whatever their throughput.
    """

    def __init__(self, spans: Spans, interval_seconds: float, pause_seconds: float) -> None:
        """Checkpoints come after `interval_seconds` of training, and stop it for `pause_seconds` (0: for no time)."""
        self.interval = interval_seconds
        self.cycle = interval_seconds + pause_seconds
        self._spans = spans
        self._first = 0
        """The first span since the job last went back."""
        self._discarded: list[tuple[int, float]] = []
        """Pairs (number of spans before it, samples) of what was discarded since then."""

    @property
    def since_stall(self) -> float:
        """Samples trained since the job last stood still."""
        seconds, phases = self._spans.seconds, self._spans.phases
        first = len(phases)
        while first and phases[first - 1].trained:
            first -= 1
        samples = 0.0
        for index in range(first, len(phases)):
            samples += phases[index].trained * (seconds[index + 1] - seconds[index])
        return samples

    def discard(self, samples: float) -> None:
        """So many samples are lost, to be trained again."""
        self._discarded.append((len(self._spans.phases), samples))

    def go_back(self) -> float:
        """Go back to the last checkpoint: how many samples that loses."""
        seconds, phases, cycle, interval = self._spans.seconds, self._spans.phases, self.cycle, self.interval
        beyond, at = 0.0, 0
        for index in range(self._first, len(phases) + 1):
            while at < len(self._discarded) and self._discarded[at][0] == index:
                beyond, at = max(0.0, beyond - self._discarded[at][1]), at + 1
            if index == len(phases) or not phases[index].trained:
                continue
            begin, end = seconds[index], seconds[index + 1]
            last = math.floor(end / cycle) * cycle
            if last > begin:
                begin, beyond = last, 0.0
            beyond += phases[index].trained * (min(end - last, interval) - min(begin - last, interval))
        self._first, self._discarded = len(phases), []
        return beyond

    def next(self, seconds: float) -> float:
        """When the first checkpoint after this time is complete."""
        return (math.floor(seconds / self.cycle) + 1) * self.cycle
