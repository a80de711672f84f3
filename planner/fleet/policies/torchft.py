"""torchft (0.2.0) with pipeline parallelism inside a replica group: a group lives or dies as a whole."""

from collections.abc import Sequence

from planner.fleet.availability import Change
from planner.fleet.policy import Cause, Phase, Policy, Setting


class TorchFT(Policy):
    """A group that lost a worker is dropped; what is left of dropped groups is restarted as whole ones."""

    name = "torchft"
    title = "torchft: a replica group that lost a worker is dropped"
    assumes = ("throughput in proportion to whole groups (each goes on with its own micro-batches, so that the "
               "global batch shrinks); a failure discards the step; whoever is left of dropped groups, and "
               "newcomers, are restarted as whole groups after the time of a restart, in which the others go on, and "
               "take the state from a peer")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._groups: list[list[int]] = []
        self._loose: list[int] = []
        self._ready = 0.0
        """When groups that are being restarted will be in."""
        self._starting: list[list[int]] = []

    @property
    def whole_rate(self) -> float:
        """1F1B on all groups."""
        return self._of(self.setting.pipelines)

    def _of(self, groups: int) -> float:
        return self.speeds.usual(self.setting.pipelines) * groups / self.setting.pipelines

    def steady(self, failures: int) -> float:
        """After the rest of dropped groups has been put together."""
        return self._of((self.setting.workers - failures) // self.setting.stages)

    def start(self, live: Sequence[int]) -> list[Phase]:
        """As many whole groups as there are machines for."""
        self._loose = sorted(live)
        self._groups = self._whole_groups()
        return self.train(0.0, self._of(len(self._groups)))

    def change(self, change: Change, left: Sequence[Phase]) -> list[Phase]:
        """Drop broken groups, restart whole ones in the background."""
        now, gone = change.seconds, set(change.removed)
        if now >= self._ready:
            self._groups, self._starting = [*self._groups, *self._starting], []
        running = len(self._groups)
        self._loose += change.added
        for groups in (self._groups, self._starting):
            for group in [group for group in groups if not gone.isdisjoint(group)]:
                groups.remove(group)
                self._loose += group
        self._loose = [machine for machine in self._loose if machine not in gone]
        broken = len(self._groups) < running
        if new := self._whole_groups():
            self._starting += new
            self._ready = now + self.costs.restart_seconds
        if not self._groups:
            # Nobody holds the state any more: all begin from the checkpoint.
            rate = self._of(len(self._starting))
            self._groups, self._starting = self._starting, []
            return self.restart(now, rate)
        return self._phases(now, broken, left)

    def _phases(self, now: float, broken: bool, left: Sequence[Phase]) -> list[Phase]:
        """With the groups that run now, and from `_ready` on with those that are being restarted."""
        rate = self._of(len(self._groups))
        lost = self.lost_samples(left, hit=broken)
        stalls = [phase for phase in left[:_training(left)] if phase.cause is not Cause.LOST]
        if broken and not self.stopped(left):
            stalls = [Phase(Cause.SWITCH, self.costs.switch_seconds)]
        phases = self.train(now, rate, *stalls, lost_samples=lost)
        if self._starting:
            spent = sum(phase.seconds for phase in phases[:-1])
            phases[-1] = phases[-1]._replace(seconds=max(0.0, self._ready - now - spent))
            phases += [Phase(Cause.SWITCH, self.costs.switch_seconds), Phase(Cause.LOAD, self.costs.load_seconds),
                       self.running(self._of(len(self._groups) + len(self._starting)))]
        return phases

    def _whole_groups(self) -> list[list[int]]:
        """Whole groups out of loose machines, at most as many as the job has."""
        groups: list[list[int]] = []
        stages = self.setting.stages
        room = self.setting.pipelines - len(self._groups) - len(self._starting)
        while len(self._loose) >= stages and len(groups) < room:
            groups.append(self._loose[:stages])
            del self._loose[:stages]
        return groups


def _training(phases: Sequence[Phase]) -> int:
    """The index of the first phase in which it trains."""
    return next((index for index, phase in enumerate(phases) if phase.cause is Cause.RUN), 0)
