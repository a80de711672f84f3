"""Policies that re-route micro-batches to peers: every live worker holds a stage, and all of them train."""

from abc import abstractmethod
from collections.abc import Sequence

from planner.fleet.availability_trace import Change
from planner.fleet.policy import Cause, Phase, Policy, Scenario
from planner.fleet.throughput import DownByStage


class Rerouting(Policy):
    """What this planner and ReCycle have in common: which machine holds which stage, and what moving one costs.

    A failure discards the iteration in progress (half of one on average), and the survivors go on after a switch. A new
    machine loads a stage and joins between two iterations. Where a stage has lost all its workers, or there are fewer
    workers than stages, the job goes back to a checkpoint (written in the background), with stages assigned anew to
    the machines that are alive.
    """

    moves_workers: bool = True
    """Whether a live worker may load another stage's parameters."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._stage: dict[int, int] = {}
        """The stage of each live machine."""

    @abstractmethod
    def rate(self, down: DownByStage) -> float:
        """Samples per second with so many workers down in each stage."""

    @abstractmethod
    def preferred_spread(self, failures: int) -> DownByStage | None:
        """How this many failures are best spread over stages; None where some stage would have no worker."""

    @property
    def fault_free_rate(self) -> float:
        """With all workers alive."""
        return self.rate((0,) * self.scenario.stages)

    def steady_rate(self, failures: int) -> float:
        """With failures where they cost least. Without moves, too: they may happen to fall there."""
        preferred = self.preferred_spread(failures)
        return self.rate(preferred) if preferred else 0.0

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Every machine in its place of the grid; where some stage would have no worker, stages are assigned anew."""
        self._stage = {machine: machine % self.scenario.stages for machine in live}
        if not self.rate(self._down()):
            self._reassign_all()
        return self.resume_training(0.0, self.rate(self._down()))

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> list[Phase]:
        """Re-route, let newcomers join, move workers."""
        lost = self.lost_samples(remaining, worker_died=bool(change.removed))
        for machine in change.removed:
            del self._stage[machine]
        if self.needs_checkpoint(remaining) or max(self._down()) >= self.scenario.pipelines:
            # Only the checkpoint holds the parameters of some stage.
            self._stage |= dict.fromkeys(change.added, 0)
            self._reassign_all()
            return self.restart(change.seconds, self.rate(self._down()))
        loading = any(phase.cause is Cause.LOAD for phase in remaining)
        loads = self._assign_newcomers(change.added) | self._move_workers() | loading
        stalls = [Phase(Cause.SWITCH, self.costs.switch_seconds)]
        if loads:
            stalls.append(Phase(Cause.LOAD, self.costs.load_seconds))
        return self.resume_training(change.seconds, self.rate(self._down()), *stalls, lost_samples=lost)

    # --- Which machine holds which stage ------------------------------------------------------------------------------

    def _down(self) -> DownByStage:
        live = [0] * self.scenario.stages
        for stage in self._stage.values():
            live[stage] += 1
        return tuple(self.scenario.pipelines - count for count in live)

    def _current_preferred_spread(self) -> DownByStage | None:
        """How the failures that there are now are best spread."""
        return self.preferred_spread(self.scenario.workers - len(self._stage))

    def _reassign_all(self) -> None:
        """Assign stages to all live machines anew."""
        preferred = self._current_preferred_spread()
        if preferred is None:
            return
        stages = [stage for stage, down in enumerate(preferred) for _ in range(self.scenario.pipelines - down)]
        self._stage = dict(zip(sorted(self._stage), stages, strict=True))

    def _assign_newcomers(self, machines: Sequence[int]) -> bool:
        """Give newcomers the stages furthest from the preferred spread of the failures left; whether there were any."""
        if not machines:
            return False
        preferred = self.preferred_spread(self.scenario.workers - len(self._stage) - len(machines))
        down = list(self._down())
        for machine in machines:
            stage = max(range(len(down)),
                        key=lambda stage: (down[stage] - preferred[stage] if preferred else 0, down[stage]))
            self._stage[machine] = stage
            down[stage] -= 1
        return True

    def _move_workers(self) -> bool:
        """Move workers to other stages where that makes the schedule faster; whether any moved."""
        preferred, down = self._current_preferred_spread(), self._down()
        if not self.moves_workers or preferred is None or preferred == down or self.rate(preferred) <= self.rate(down):
            return False
        vacant = [stage for stage, count in enumerate(down) for _ in range(count - preferred[stage])]
        for machine in sorted(self._stage):
            stage = self._stage[machine]
            if vacant and down[stage] < preferred[stage]:
                self._stage[machine] = vacant.pop()
                down = self._down()
        return True
