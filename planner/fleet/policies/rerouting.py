"""Policies that re-route micro-batches to peers: every live worker keeps a stage, and all of them train."""

from abc import abstractmethod
from collections.abc import Sequence

from planner.fleet.availability import Change
from planner.fleet.policy import Cause, Phase, Policy, Setting
from planner.fleet.speeds import Down


class Rerouting(Policy):
    """Common to this planner and ReCycle: which machine holds which stage, and what moving one costs.

    A failure discards the iteration in progress (half of one on average), and the survivors go on after a switch. Who
    comes loads a stage and is taken in between two iterations. Where a stage has lost all its workers, or there are
    fewer workers than stages, the job goes back to a checkpoint (written in the background) on whoever is alive, roles
    dealt anew.
    """

    moves: bool = True
    """Whether a live worker may load another stage's parameters."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._stage: dict[int, int] = {}

    @abstractmethod
    def rate(self, down: Down) -> float:
        """Samples per second with so many workers down by stage."""

    @abstractmethod
    def target(self, failures: int) -> Down | None:
        """The best way to spread failures over stages, None where there is none."""

    @property
    def whole_rate(self) -> float:
        """With all workers alive."""
        return self.rate((0,) * self.setting.stages)

    def steady(self, failures: int) -> float:
        """Failures where they cost least; without moves, too: that is where luck may put them."""
        target = self.target(failures)
        return self.rate(target) if target else 0.0

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Every machine in its place of the grid, or where some stage would have none, dealt anew."""
        self._stage = {machine: machine % self.setting.stages for machine in live}
        if not self.rate(self._down()):
            self._deal_anew()
        return self.train(0.0, self.rate(self._down()))

    def change(self, change: Change, left: Sequence[Phase]) -> list[Phase]:
        """Re-route, take in, move."""
        lost = self.lost_samples(left, hit=bool(change.removed))
        for machine in change.removed:
            del self._stage[machine]
        if self.stopped(left) or max(self._down()) >= self.setting.pipelines:
            # Some stage's parameters are nowhere but in the checkpoint.
            self._stage |= dict.fromkeys(change.added, 0)
            self._deal_anew()
            return self.restart(change.seconds, self.rate(self._down()))
        loads = self._take_in(change.added) | self._spread() | any(phase.cause is Cause.LOAD for phase in left)
        stalls = [Phase(Cause.SWITCH, self.costs.switch_seconds)]
        if loads:
            stalls.append(Phase(Cause.LOAD, self.costs.load_seconds))
        return self.train(change.seconds, self.rate(self._down()), *stalls, lost_samples=lost)

    # --- Who holds what -----------------------------------------------------------------------------------------------

    def _live(self) -> list[int]:
        live = [0] * self.setting.stages
        for stage in self._stage.values():
            live[stage] += 1
        return live

    def _down(self) -> Down:
        return tuple(self.setting.pipelines - count for count in self._live())

    def _missing(self) -> Down | None:
        """Where the next machines should go: the best spread of the failures that there are."""
        return self.target(self.setting.workers - len(self._stage))

    def _deal_anew(self) -> None:
        target = self._missing()
        if target is None:
            return
        seats = [stage for stage, down in enumerate(target) for _ in range(self.setting.pipelines - down)]
        self._stage = dict(zip(sorted(self._stage), seats, strict=True))

    def _take_in(self, machines: Sequence[int]) -> bool:
        """Give newcomers the stages that lack workers most, by the best spread of the failures that are left."""
        if not machines:
            return False
        target = self.target(self.setting.workers - len(self._stage) - len(machines))
        down = list(self._down())
        for machine in machines:
            stage = max(range(len(down)), key=lambda stage: (down[stage] - target[stage] if target else 0, down[stage]))
            self._stage[machine] = stage
            down[stage] -= 1
        return True

    def _spread(self) -> bool:
        """Move workers to other stages where that makes the schedule faster; whether it did."""
        target, down = self._missing(), self._down()
        if not self.moves or target is None or target == down or self.rate(target) <= self.rate(down):
            return False
        vacant = [stage for stage, count in enumerate(down) for _ in range(count - target[stage])]
        for machine in sorted(self._stage):
            stage = self._stage[machine]
            if vacant and down[stage] < target[stage]:
                self._stage[machine] = vacant.pop()
                down = self._down()
        return True
