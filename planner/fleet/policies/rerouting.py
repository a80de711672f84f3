"""Policies that re-route micro-batches to peers: every live worker holds a stage, and all of them train."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence

from planner.fleet.availability_trace import Change
from planner.fleet.policy import Cause, Phase, Policy, Scenario
from planner.fleet.throughput import DownByStage


class Rerouting(Policy):
    """What this planner and ReCycle have in common: which machine holds which stage, and what moving one costs.

    A failure discards the iteration in progress (half of one on average), and the survivors go on after a switch. A new
    machine loads a stage and joins between two iterations; so does a live worker that is moved to another stage. Where
    a stage has lost all its workers, or there are fewer workers than stages, the job goes back to a checkpoint (written
    in the background), with stages assigned anew to the machines that are alive. Machines that come while it does so
    wait until that is done.

    Which machine holds which stage depends on the trace alone, and on no policy's throughput. So all policies of this
    kind that move workers lose a stage at the same times, and one whose schedules are never slower is never behind.
    """

    moves_workers: bool = True
    """Whether a live worker may load another stage's parameters."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._stage: dict[int, int] = {}
        """The stage of each live machine."""
        self._held: dict[int, int] = {}
        """The stage that it holds now, until `_loaded_at`. A machine that is about to join holds none."""
        self._loaded_at = 0.0
        """When every machine holds its stage."""

    @abstractmethod
    def rate(self, down: DownByStage) -> float:
        """Samples per second with so many workers down in each stage."""

    @property
    def fault_free_rate(self) -> float:
        """With all workers alive."""
        return self.rate((0,) * self.scenario.stages)

    def steady_rate(self, failures: int) -> float:
        """With failures spread over stages. Without moves, too: they may happen to fall there."""
        spread = self.throughputs.even_spread(failures)
        return self.rate(spread) if spread else 0.0

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Every machine in its place of the grid; where some stage would have no worker, stages are assigned anew."""
        self._stage = {machine: machine % self.scenario.stages for machine in live}
        if self._stage_lost(self._stage):
            self._reassign_all()
        self._held = dict(self._stage)
        return self.resume_training(self._rate_of(self._stage))

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> list[Phase]:
        """Re-route, let newcomers join, move workers."""
        if change.seconds >= self._loaded_at:
            self._held = dict(self._stage)
        for machine in change.removed:
            del self._stage[machine]
            self._held.pop(machine, None)
        restarting = remaining[0].cause is Cause.RESTART
        if remaining[0].cause is Cause.WAIT or (restarting and change.removed) or self._stage_lost(self._held):
            # Only the checkpoint holds the parameters of some stage.
            self._stage |= dict.fromkeys(change.added, 0)
            self._reassign_all()
            self._held = dict(self._stage)
            return self.restart(self._rate_of(self._stage), remaining)
        lost = self.lost_samples(remaining, worker_died=bool(change.removed))
        self._assign_newcomers(change.added)
        if self.moves_workers:
            self._move_workers()
        stalls: list[Phase] = []
        if change.removed:
            stalls = [self._switch()]
        elif remaining[0].cause in (Cause.RESTART, Cause.SWITCH):
            stalls = [remaining[0]]
        return self._reconfigure(change.seconds, stalls, lost)

    def _switch(self) -> Phase:
        return Phase(Cause.SWITCH, self.costs.switch_seconds)

    @abstractmethod
    def _reconfigure(self, now: float, stalls: list[Phase], lost_samples: float) -> list[Phase]:
        """The phases from `now` on: these stalls first, and sooner or later each machine in its stage."""

    def _rate_of(self, stages: dict[int, int]) -> float:
        """Samples per second of machines that hold these stages."""
        return self.rate(self._down(stages))

    # --- Which machine holds which stage ------------------------------------------------------------------------------

    def _down(self, stages: dict[int, int]) -> DownByStage:
        live = Counter(stages.values())
        return tuple(self.scenario.pipelines - live[stage] for stage in range(self.scenario.stages))

    def _stage_lost(self, stages: dict[int, int]) -> bool:
        return max(self._down(stages)) >= self.scenario.pipelines

    def _reassign_all(self) -> None:
        """Assign stages to all live machines anew."""
        spread = self.throughputs.even_spread(self.scenario.workers - len(self._stage))
        if spread is None:
            return
        stages = [stage for stage, down in enumerate(spread) for _ in range(self.scenario.pipelines - down)]
        self._stage = dict(zip(sorted(self._stage), stages, strict=True))

    def _assign_newcomers(self, machines: Sequence[int]) -> None:
        """Give newcomers the stages furthest from the even spread of the failures left."""
        spread = self.throughputs.even_spread(self.scenario.workers - len(self._stage) - len(machines))
        down = list(self._down(self._stage))
        for machine in machines:
            stage = max(range(len(down)),
                        key=lambda stage: (down[stage] - spread[stage] if spread else 0, down[stage]))
            self._stage[machine] = stage
            down[stage] -= 1

    def _move_workers(self) -> None:
        """Move workers to other stages where that leaves the most loaded worker less work."""
        spread, down = self.throughputs.even_spread(self.scenario.workers - len(self._stage)), self._down(self._stage)
        if spread is None or self.throughputs.longest_load(spread) >= self.throughputs.longest_load(down):
            return
        vacant = [stage for stage, count in enumerate(down) for _ in range(count - spread[stage])]
        counts = list(down)
        for machine, stage in sorted(self._stage.items()):
            if vacant and counts[stage] < spread[stage]:
                self._stage[machine] = vacant.pop()
                counts[stage] += 1
