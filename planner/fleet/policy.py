"""What a policy is: given who is alive, what the job does next, until something changes again.

A policy answers each change with *phases*: so many seconds at such a rate, for this cause, one after the other. The
last one has no end. The next change cuts them short, and the policy is told what was left of them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, NamedTuple

from planner.fleet.availability import Change
from planner.fleet.costs import Costs
from planner.fleet.speeds import Speeds


class Cause(StrEnum):
    """Why a job makes less progress than it could."""

    RUN = "fewer workers"
    """It trains, at the rate of a phase."""
    SWITCH = "reconfiguring"
    LOAD = "loading parameters"
    LOST = "redoing lost work"
    RESTART = "restarting from a checkpoint"
    CHECKPOINT = "writing checkpoints"
    WAIT = "waiting for workers"
    WHOLE = "slower even when whole"
    """Its schedule with all workers alive is slower than the best one."""


class Phase(NamedTuple):
    """So many seconds of this."""

    cause: Cause
    seconds: float = math.inf
    rate: float = 0.0
    """Useful samples per second."""
    checkpoints: float = 0.0
    """Samples per second that are lost to writing checkpoints."""


class Setting(NamedTuple):
    """What all policies have in common: the job's speeds, the costs, and how often failures come."""

    speeds: Speeds
    costs: Costs
    seconds_between_failures: float

    @property
    def stages(self) -> int:
        """Workers a pipeline."""
        return self.speeds.job.stages

    @property
    def pipelines(self) -> int:
        """Of the job when whole."""
        return self.speeds.job.pipelines

    @property
    def workers(self) -> int:
        """Of the job when whole; machine numbers are below."""
        return self.speeds.workers

    @property
    def checkpoint_interval(self) -> float:
        """Seconds of training between checkpoints: sqrt(2 C M) (Young 1974), C seconds each, M between failures."""
        return max(self.costs.checkpoint_seconds,
                   math.sqrt(2 * self.costs.checkpoint_seconds * self.seconds_between_failures))


class Policy(ABC):
    """How a job lives with failures. One object simulates one run."""

    name: ClassVar[str]
    title: ClassVar[str]
    """One line for a person."""
    assumes: ClassVar[str]
    """What was taken for granted, and the source of it."""

    yardstick: ClassVar[bool] = False
    """Not a system that exists, but a line to compare with."""
    pauses: ClassVar[bool] = False
    """Whether training stands still while a checkpoint is written; else that happens in the background."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.speeds = setting.speeds
        self.costs = setting.costs
        self._rate = 0.0
        pause = setting.costs.checkpoint_seconds if self.pauses else 0.0
        self._checkpoints = Checkpoints(setting.checkpoint_interval, pause)

    @property
    @abstractmethod
    def whole_rate(self) -> float:
        """Samples per second with all workers alive, checkpoints not counted."""

    @abstractmethod
    def start(self, live: Sequence[int]) -> list[Phase]:
        """Begin with these machines."""

    @abstractmethod
    def change(self, change: Change, left: Sequence[Phase]) -> Sequence[Phase]:
        """Go on after a change; `left`: what the answer before had planned from now on, if nothing had changed."""

    @abstractmethod
    def steady(self, failures: int) -> float:
        """Samples per second in the long run, so many workers down where the policy likes them best; no checkpoints."""

    # --- What several policies use ------------------------------------------------------------------------------------

    def train(self, seconds: float, rate: float, *stalls: Phase, lost_samples: float = 0.0) -> list[Phase]:
        """From now (`seconds`) on: stalls, then redo what was lost, then train at this rate; wait where it is 0."""
        self._rate = rate
        beyond = self._checkpoints.lost(seconds)
        if not rate:
            self._checkpoints.halt(seconds)
            return [Phase(Cause.WAIT)]
        begin = seconds + sum(stall.seconds for stall in stalls) + lost_samples / rate
        self._checkpoints.resume(begin, rate, beyond)
        redo = [Phase(Cause.LOST, lost_samples / rate)] if lost_samples else []
        return [*stalls, *redo, self.running(rate)]

    def restart(self, seconds: float, rate: float) -> list[Phase]:
        """Go back to the last checkpoint, and redo what has been done since."""
        return self.train(seconds, rate, Phase(Cause.RESTART, self.costs.restart_seconds),
                          lost_samples=self._checkpoints.lost(seconds))

    def running(self, rate: float) -> Phase:
        """Training without end, with pauses for checkpoints where the policy makes them."""
        if not self.pauses:
            return Phase(Cause.RUN, rate=rate)
        interval = self.setting.checkpoint_interval
        useful = rate * interval / (interval + self.costs.checkpoint_seconds)
        return Phase(Cause.RUN, rate=useful, checkpoints=rate - useful)

    def lost_samples(self, left: Sequence[Phase], *, hit: bool) -> float:
        """What has to be redone: what was owed already, and when a worker dies at work half an iteration on average."""
        owed = sum(phase.seconds for phase in left if phase.cause is Cause.LOST) * self._rate
        return owed + (self.speeds.samples / 2 if hit and left[0].cause in (Cause.RUN, Cause.LOST) else 0.0)

    @staticmethod
    def stopped(left: Sequence[Phase]) -> bool:
        """Whether it has no parameters but in the checkpoint: it was waiting, or not back from there yet."""
        return left[0].cause in (Cause.WAIT, Cause.RESTART)


class Checkpoints:
    """What would be lost by going back to the last checkpoint, while a job trains, fails and redoes lost work."""

    def __init__(self, interval_seconds: float, pause_seconds: float) -> None:
        """`interval_seconds` of training, then `pause_seconds` (0 where it is written in the background)."""
        self.interval = interval_seconds
        self.cycle = interval_seconds + pause_seconds
        self._begin = math.inf
        self._rate = 0.0
        self._before = 0.0

    def resume(self, seconds: float, rate: float, lost_samples: float = 0.0) -> None:
        """From `seconds` on there is new progress, beyond `lost_samples` that no checkpoint has yet."""
        self._begin, self._rate, self._before = seconds, rate, lost_samples

    def halt(self, seconds: float) -> None:
        """No progress from now on."""
        self._before, self._begin = self.lost(seconds), math.inf

    def lost(self, seconds: float) -> float:
        """Samples beyond the last checkpoint at this time."""
        trained = max(0.0, seconds - self._begin)
        kept = 0.0 if trained >= self.cycle else self._before
        return kept + min(trained % self.cycle, self.interval) * self._rate

    def next(self, seconds: float) -> float:
        """When the first checkpoint after this time is done."""
        return self._begin + max(1, math.floor((seconds - self._begin) / self.cycle) + 1) * self.cycle
