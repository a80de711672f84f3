"""The interface of a policy: how a job reacts when machines are lost or added.

A policy answers each change with *phases*, one after the other: so many seconds, at such a rate, for such a cause. The
last phase has no end. The next change interrupts them, and the policy is told what remained of them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, NamedTuple

from planner.fleet.availability_trace import Change
from planner.fleet.costs import Costs
from planner.fleet.throughput import Throughputs


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
    WHOLE = "slower even when whole"
    """Its schedule with all workers alive is slower than the best one."""


class Phase(NamedTuple):
    """A span of time in which a job makes progress at one rate, for one cause."""

    cause: Cause
    seconds: float = math.inf
    rate: float = 0.0
    """Useful samples per second."""
    checkpoints: float = 0.0
    """Samples per second lost to writing checkpoints."""


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

    is_reference: ClassVar[bool] = False
    """Whether this is only a line to compare with, and not a system that exists."""
    pauses: ClassVar[bool] = False
    """Whether training stops while a checkpoint is written. Otherwise it is written in the background."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.throughputs = scenario.throughputs
        self.costs = scenario.costs
        self._rate = 0.0
        pause = scenario.costs.checkpoint_seconds if self.pauses else 0.0
        self._checkpoints = Checkpoints(scenario.checkpoint_interval, pause)

    @property
    @abstractmethod
    def fault_free_rate(self) -> float:
        """Samples per second with all workers alive, without the cost of checkpoints."""

    @abstractmethod
    def start(self, live: Sequence[int]) -> list[Phase]:
        """The phases from the beginning of a trace on; `live` are the machines alive then."""

    @abstractmethod
    def on_change(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """The phases from a change on. `remaining`: what was left of the phases before it, the current one first."""

    @abstractmethod
    def steady_rate(self, failures: int) -> float:
        """Samples per second in steady state with so many workers down, where they cost least; without checkpoints."""

    # --- Shared by several policies -----------------------------------------------------------------------------------

    def resume_training(self, seconds: float, rate: float, *stalls: Phase, lost_samples: float = 0.0) -> list[Phase]:
        """The phases from now (`seconds`) on: stalls, redoing lost samples, training at `rate`; waiting if it is 0."""
        self._rate = rate
        beyond = self._checkpoints.lost(seconds)
        if not rate:
            self._checkpoints.halt(seconds)
            return [Phase(Cause.WAIT)]
        begin = seconds + sum(stall.seconds for stall in stalls) + lost_samples / rate
        self._checkpoints.resume(begin, rate, beyond)
        redo = [Phase(Cause.LOST, lost_samples / rate)] if lost_samples else []
        return [*stalls, *redo, self.training(rate)]

    def restart(self, seconds: float, rate: float) -> list[Phase]:
        """The phases of going back to the last checkpoint and redoing what was trained since."""
        return self.resume_training(seconds, rate, Phase(Cause.RESTART, self.costs.restart_seconds),
                          lost_samples=self._checkpoints.lost(seconds))

    def training(self, rate: float) -> Phase:
        """Training without end. Where the policy pauses for checkpoints, the rate is the mean over the pauses."""
        if not self.pauses:
            return Phase(Cause.RUN, rate=rate)
        interval = self.scenario.checkpoint_interval
        useful = rate * interval / (interval + self.costs.checkpoint_seconds)
        return Phase(Cause.RUN, rate=useful, checkpoints=rate - useful)

    def lost_samples(self, remaining: Sequence[Phase], *, worker_died: bool) -> float:
        """Samples to redo: those not redone yet and, if a worker died while training, half an iteration on average."""
        not_redone = sum(phase.seconds for phase in remaining if phase.cause is Cause.LOST) * self._rate
        training = remaining[0].cause in (Cause.RUN, Cause.LOST)
        return not_redone + (self.throughputs.samples / 2 if worker_died and training else 0.0)

    @staticmethod
    def needs_checkpoint(remaining: Sequence[Phase]) -> bool:
        """Whether only the checkpoint holds the parameters: the job was waiting for workers, or still restarting."""
        return remaining[0].cause in (Cause.WAIT, Cause.RESTART)


class Checkpoints:
    """Tracks how many samples would be lost by going back to the last checkpoint."""

    def __init__(self, interval_seconds: float, pause_seconds: float) -> None:
        """Checkpoints come after `interval_seconds` of training, and stop it for `pause_seconds` (0: for no time)."""
        self.interval = interval_seconds
        self.cycle = interval_seconds + pause_seconds
        self._begin = math.inf
        self._rate = 0.0
        self._before = 0.0

    def resume(self, seconds: float, rate: float, lost_samples: float = 0.0) -> None:
        """From `seconds` on the job trains at `rate`; `lost_samples` trained before are in no checkpoint yet."""
        self._begin, self._rate, self._before = seconds, rate, lost_samples

    def halt(self, seconds: float) -> None:
        """From `seconds` on the job does not train."""
        self._before, self._begin = self.lost(seconds), math.inf

    def lost(self, seconds: float) -> float:
        """Samples trained since the last checkpoint, at this time."""
        trained = max(0.0, seconds - self._begin)
        kept = 0.0 if trained >= self.cycle else self._before
        return kept + min(trained % self.cycle, self.interval) * self._rate

    def next(self, seconds: float) -> float:
        """When the first checkpoint after this time is complete."""
        return self._begin + max(1, math.floor((seconds - self._begin) / self.cycle) + 1) * self.cycle
