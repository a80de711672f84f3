"""Policies that re-route micro-batches to peers; all live workers hold a stage."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from slipstream.planner.simulation.availability_trace import Change
from slipstream.planner.simulation.loads import DownByStage
from slipstream.planner.simulation.policy import Cause, Phase, RatedByStage, Scenario


class StageAssignment:
    """Stage that each machine runs, and number of machines that each stage lacks."""

    def __init__(self, lacking: Iterable[int]) -> None:
        """Start without machines; `lacking` has how many each stage needs."""
        self.stage_of: dict[int, int] = {}
        """Stage that each machine runs; machines without one are not in it."""
        self._lacking = list(lacking)
        self._down: DownByStage | None = None
        """Cached value of `down_by_stage`; None after a change."""
        self._most_down: int | None = None

    @property
    def down_by_stage(self) -> DownByStage:
        """Number of machines that each stage lacks."""
        if self._down is None:
            self._down = tuple(self._lacking)
        return self._down

    @property
    def most_down(self) -> int:
        """Largest number of machines that any stage lacks."""
        if self._most_down is None:
            self._most_down = max(self._lacking)
        return self._most_down

    def assign_stage(self, machine: int, stage: int) -> None:
        """Let a machine run this stage, and no longer the one that it ran before."""
        self.remove_machine(machine)
        self.stage_of[machine] = stage
        self._lacking[stage] -= 1
        self._down = self._most_down = None

    def remove_machine(self, machine: int) -> None:
        """Remove a machine from its stage; do nothing if it has none."""
        stage = self.stage_of.pop(machine, None)
        if stage is not None:
            self._lacking[stage] += 1
            self._down = self._most_down = None

    def copy(self) -> "StageAssignment":
        """Return a copy that can change independently."""
        other = StageAssignment(self._lacking)
        other.stage_of, other._down = dict(self.stage_of), self._down
        return other


class Rerouting(RatedByStage):
    """Base class of policies that re-route (this planner, ReCycle, ElasWave).

    Subclasses define `rate` and `_plan_phases`. A failure discards the iteration in progress (half
    of one on average), and the survivors continue after a switch. A new machine loads a stage and
    joins between two iterations; so does a live worker that is moved to another stage. If a stage
    has lost all its workers, or there are fewer workers than stages, the job returns to a
    checkpoint (written in the background), with stages newly assigned to the live machines.
    Machines that arrive meanwhile wait.
    """

    moves_workers: bool = True
    """True if a live worker may load another stage's parameters from a peer."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._pipelines = scenario.pipelines
        # The stage of each machine depends on the trace alone, not on any policy's throughput. So
        # all policies that move workers lose a stage at the same times, and one whose schedules are
        # never slower than another's never falls behind it.
        self._stages = StageAssignment([scenario.pipelines] * scenario.stages)
        """Stage that each live machine is to run."""
        self._held_stages = self._stages
        """Stage that each machine holds until `_loaded_at`; `_stages` itself if none is loading."""
        self._loaded_at = 0.0
        """Seconds of the trace after which every machine holds its stage in `_stages`."""

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Give every machine in `live` a stage, and return the phases from the beginning.

        The stage is that of the machine's position in the grid. If some stage would have no
        machine, all are spread evenly.
        """
        for machine in live:
            self._stages.assign_stage(machine, machine % self.scenario.stages)
        if self._has_lost_stage(self._stages):
            self._reassign_all(live)
        self._held_stages = self._stages
        return self.resume_training(self._rate_for_stages(self._stages))

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> list[Phase]:
        """Give newcomers and moved workers a stage, and return the next phases.

        If a stage has lost all its workers, the job waits, or a restart in progress loses a
        machine, the job restarts from the checkpoint.
        """
        if change.seconds >= self._loaded_at:
            self._held_stages = self._stages
        for machine in change.removed:
            self._stages.remove_machine(machine)
            self._held_stages.remove_machine(machine)
        restarting = remaining[0].cause is Cause.RESTART
        if (
            remaining[0].cause is Cause.WAIT
            or (restarting and change.removed)
            or self._has_lost_stage(self._held_stages)
        ):
            # Only the checkpoint holds the parameters of some stage.
            self._reassign_all([*self._stages.stage_of, *change.added])
            self._held_stages = self._stages
            return self.restart(self._rate_for_stages(self._stages), remaining)
        lost_samples = self.discard_lost_samples(remaining, worker_died=bool(change.removed))
        self._assign_newcomers(change.added)
        if self.moves_workers:
            self._move_workers()
        # A death costs a switch. Without one, the pause in progress is finished.
        stalls: list[Phase] = []
        if change.removed:
            stalls = [self.switch]
        elif remaining[0].cause in (Cause.RESTART, Cause.SWITCH):
            stalls = [remaining[0]]
        return self._plan_phases(change.seconds, stalls, lost_samples)

    @abstractmethod
    def _plan_phases(self, now: float, stalls: list[Phase], lost_samples: float) -> list[Phase]:
        """Return the phases from `now` on: the pauses `stalls`, redoing lost samples, training."""

    def _rate_for_stages(self, stages: StageAssignment) -> float:
        """Return the samples per second of machines with these stages loaded."""
        return self.rate(stages.down_by_stage)

    # --- Which machine holds which stage ----------------------------------------------------------

    @property
    def _is_loading(self) -> bool:
        """True if some machine has not yet loaded its assigned stage."""
        return (
            self._held_stages is not self._stages
            and self._held_stages.stage_of != self._stages.stage_of
        )

    def _has_lost_stage(self, stages: StageAssignment) -> bool:
        return stages.most_down >= self._pipelines

    def _assign_stage(self, machine: int, stage: int) -> None:
        """Assign a stage to a machine, which has yet to load its parameters."""
        if self._held_stages is self._stages:
            self._stages = self._held_stages.copy()
        self._stages.assign_stage(machine, stage)

    def _reassign_all(self, machines: Sequence[int]) -> None:
        """Assign stages to the live machines again, with failures spread evenly over stages."""
        spread = self.throughputs.loads.spread_evenly(self.scenario.workers - len(machines))
        if spread is None:
            for machine in machines:
                self._stages.assign_stage(machine, self._stages.stage_of.get(machine, 0))
            return
        stages = [
            stage
            for stage, down in enumerate(spread)
            for _ in range(self.scenario.pipelines - down)
        ]
        for machine, stage in zip(sorted(machines), stages, strict=True):
            self._stages.assign_stage(machine, stage)

    def _assign_newcomers(self, machines: Sequence[int]) -> None:
        """Assign to each newcomer the stage that lacks most workers beyond an even spread."""
        if not machines:
            return
        # Stages that lack more than in an even spread come first.
        spread = self.throughputs.loads.spread_evenly(
            self.scenario.workers - len(self._stages.stage_of) - len(machines)
        )
        for machine in machines:
            down = self._stages.down_by_stage
            lacking = [
                (count - even, count) for count, even in zip(down, spread or down, strict=True)
            ]
            self._assign_stage(machine, lacking.index(max(lacking)))

    def _move_workers(self) -> None:
        """Move workers to other stages if that leaves the most loaded worker less work."""
        loads, down = self.throughputs.loads, self._stages.down_by_stage
        spread = loads.spread_evenly(self.scenario.workers - len(self._stages.stage_of))
        if spread is None or loads.max_load_seconds(spread) >= loads.max_load_seconds(down):
            return
        # Workers of stages with more than their even share fill the others.
        vacant = [stage for stage, count in enumerate(down) for _ in range(count - spread[stage])]
        counts = list(down)
        for machine, stage in sorted(self._stages.stage_of.items()):
            if vacant and counts[stage] < spread[stage]:
                self._assign_stage(machine, vacant.pop())
                counts[stage] += 1


class ReCycle(Rerouting):
    """ReCycle's policy: 1F1B, and after failures re-routing to peers in turn.

    The backward is then split, and the optimizer staggered.
    """

    name = "recycle"
    title = "ReCycle as published"
    source = (
        "ReCycle (SOSP 2024, arXiv 2405.14009), sections 3 to 5; its solver is replaced by list "
        "schedules"
    )
    assumptions = (
        "1F1B on healthy workers, micro-batches of dead workers assigned round-robin, split "
        "backward and staggered optimizer; one failure a stage, then two; its solver replaced by "
        "list schedules; who joins or moves loads one stage from a peer, all at the same time, "
        "while the others wait; switches and lost work as for slipstream"
    )

    def rate(self, down: DownByStage) -> float:
        """Return the samples per second of ReCycle's schedule with `down` dead workers by stage."""
        return self.throughputs.recycle_rate(down)

    def _plan_phases(self, now: float, stalls: list[Phase], lost_samples: float) -> list[Phase]:
        """Return pauses from `now` on, loading included, then redone samples, then training."""
        stalls = [*(stall for stall in stalls if stall.cause is Cause.RESTART), self.switch]
        if self._is_loading:
            stalls.append(self.load)
        self._loaded_at = now + sum(stall.seconds for stall in stalls)
        return self.resume_training(
            self._rate_for_stages(self._stages), *stalls, lost_samples=lost_samples
        )
