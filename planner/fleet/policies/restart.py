"""Checkpoint and restart (torchrun elastic, Varuna): every failure stops the whole job."""

from collections.abc import Sequence

from planner.fleet.availability import Change
from planner.fleet.policy import Cause, Phase, Policy, Setting


class Restart(Policy):
    """Restarts from the last checkpoint on as many whole pipelines as there are machines for."""

    name = "checkpoint-restart"
    title = "checkpoint and restart on whole pipelines"
    pauses = True
    assumes = ("published times of a restart and of a checkpoint; training pauses for a checkpoint; the best "
               "interval (Young 1974) for the failures of this very trace; newcomers that make a pipeline more are "
               "taken in at the next checkpoint, by a restart; the global batch is kept")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._used: list[int] = []
        self._idle: list[int] = []
        self._growth: float | None = None
        """When newcomers are to be taken in."""

    @property
    def whole_rate(self) -> float:
        """1F1B on all pipelines."""
        return self.speeds.usual(self.setting.pipelines)

    def steady(self, failures: int) -> float:
        """On whole pipelines."""
        return self.speeds.usual((self.setting.workers - failures) // self.setting.stages)

    def start(self, live: Sequence[int]) -> list[Phase]:
        """As many whole pipelines as there are machines for."""
        self._idle = sorted(live)
        self._seat()
        return self.train(0.0, self._current())

    def change(self, change: Change, left: Sequence[Phase]) -> Sequence[Phase]:
        """Restart where a worker in use died; plan to take newcomers in."""
        self._grow_by(change.seconds)
        gone = set(change.removed)
        hit = not gone.isdisjoint(self._used)
        self._idle = [machine for machine in (*self._idle, *change.added) if machine not in gone]
        if hit or left[0].cause is Cause.WAIT:
            self._growth = None
            self._used = [machine for machine in self._used if machine not in gone]
            self._seat()
            return self.restart(change.seconds, self._current())
        return self._growing(change.seconds, left)

    def _growing(self, now: float, left: Sequence[Phase]) -> Sequence[Phase]:
        """On as before, until newcomers who make a pipeline more are taken in, at the end of a checkpoint."""
        before = [phase for phase in left if phase.cause is not Cause.RUN]
        if self._growth is not None:  # what was planned beyond that is planned anew
            before = before[:-1]
        grown = self._with_idle()
        if grown == len(self._used):
            self._growth = None
            return [*before, self.running(self._rate)]
        self._growth = self._growth or self._checkpoints.next(now)
        until = self._growth - now - sum(phase.seconds for phase in before)
        later = self.speeds.usual(grown // self.setting.stages)
        return [*before, self.running(self._rate)._replace(seconds=until),
                Phase(Cause.RESTART, self.costs.restart_seconds), self.running(later)]

    def _grow_by(self, now: float) -> None:
        """Newcomers that were to be taken in before now have been."""
        if self._growth is None or now < self._growth:
            return
        self._seat()
        self._rate = self._current()
        self._checkpoints.resume(self._growth + self.costs.restart_seconds, self._rate)
        self._growth = None

    def _with_idle(self) -> int:
        stages = self.setting.stages
        return min(self.setting.workers, (len(self._used) + len(self._idle)) // stages * stages)

    def _seat(self) -> None:
        """Use as many machines as make whole pipelines."""
        machines, count = [*self._used, *self._idle], self._with_idle()
        self._used, self._idle = machines[:count], machines[count:]

    def _current(self) -> float:
        return self.speeds.usual(len(self._used) // self.setting.stages)
