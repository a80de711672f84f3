"""Bamboo (NSDI 2023): each worker also holds the next stage, and computes its forward redundantly.

In steady state its published throughput follows the share of workers alive: within 2 % up to 7 of
24 down, 9 and 13 % below it at 8 and 9 (points digitised from ReCycle's talk). So a pipeline with
dead workers continues, with predecessors *covering* their stages, and its share of the batch falls
in proportion to its live workers.
"""

from collections.abc import Sequence

from slipstream.planner.simulation.availability_trace import Change
from slipstream.planner.simulation.policy import Cause, Phase, Policy, Scenario


class Bamboo(Policy):
    """Policy in which predecessors run ("cover") dead workers' stages, or pipelines form anew."""

    name = "bamboo"
    title = "Bamboo: redundant computation on the predecessor"
    source = (
        "Bamboo (NSDI 2023), section 5; artifact project_pactum/simulation; throughput: ReCycle's "
        "talk (SOSP 2024), figure of throughput by failures, 350M"
    )
    assumptions = (
        "fault-free throughput as published relative to 1F1B (redundant forwards, memory for two "
        "stages); throughput in proportion to the workers alive, as published; new pipelines when "
        "more than 5 % of the stages are covered or spares suffice, and then every second stage "
        "may be covered; the global batch is kept"
    )

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._pipelines: list[list[int | None]] = []
        """Machines of each pipeline, by stage; None where the predecessor covers the stage."""
        self._pipeline_of: dict[int, list[int | None]] = {}
        """Pipeline of each machine that is in one."""
        self._spares: list[int] = []
        self._covered = self._formed_covered = 0
        """Number of stages that a predecessor covers, now and when pipelines were last formed."""

    @property
    def fault_free_rate(self) -> float:
        """Samples per second with all workers alive, a published share of 1F1B's."""
        return self._rate_for_machines(self.scenario.workers)

    def _rate_for_machines(self, machines: int) -> float:
        whole = self.costs.bamboo_fault_free_share * self.throughputs.whole_pipelines_rate(
            self.scenario.pipelines
        )
        return whole * machines / self.scenario.workers

    def steady_rate(self, failures: int) -> float:
        """Return the samples per second, in proportion to the live workers."""
        return self._rate_for_machines(self.scenario.workers - failures)

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Form pipelines of the machines in `live`; return the phases from the beginning."""
        self._spares = sorted(live)
        self._form_pipelines()
        return self.resume_training(self._current_rate())

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """Let predecessors run dead workers' stages, or form new pipelines; return the phases.

        Forming pipelines takes longer if some stage has no live predecessor. If the job waits, or a
        restart loses a machine, it restarts from the checkpoint. If nothing is to be done, the
        phases are `remaining`.
        """
        dead = set(change.removed)
        self._spares = [
            machine for machine in (*self._spares, *change.added) if machine not in dead
        ]
        died, stage_lost = self._remove_dead(dead)
        lost_samples = self.discard_lost_samples(remaining, worker_died=died)
        # A restart in progress continues if none of its machines died.
        if self.needs_checkpoint(remaining):
            if not died and remaining[0].cause is Cause.RESTART:
                return remaining
            self._form_pipelines()
            return self.restart(self._current_rate(), remaining)
        if stage_lost or self._should_form_pipelines():
            self._form_pipelines()
            seconds = self.costs.bamboo_seconds + (
                self.costs.bamboo_fatal_seconds if stage_lost else 0.0
            )
        # Covering takes a switch, and no less than a reconfiguration that is still in progress.
        elif died:
            unfinished = sum(phase.seconds for phase in remaining if phase.cause is Cause.SWITCH)
            seconds = max(self.costs.switch_seconds, unfinished)
        else:
            return remaining
        return self.resume_training(
            self._current_rate(), Phase(Cause.SWITCH, seconds), lost_samples=lost_samples
        )

    def _remove_dead(self, gone: set[int]) -> tuple[bool, bool]:
        """Remove dead machines; return whether pipelines lost any, and whether a stage is lost."""
        died = gone & self._pipeline_of.keys()
        touched = [(self._pipeline_of.pop(machine), machine) for machine in died]
        for machines, machine in touched:
            machines[machines.index(machine)] = None
        self._covered += len(died)
        # Of two dead neighbours, the first cannot cover the second, or died while it covered it.
        stage_lost = any(
            machines[index] is None and machines[index - 1] is None
            for machines, _ in touched
            for index in range(len(machines))
        )
        return bool(died), stage_lost

    def _should_form_pipelines(self) -> bool:
        """Return whether one more pipeline fits, too many stages are covered, or new ones pay."""
        covered, workers = self._covered, len(self._pipelines) * self.scenario.stages
        more = (
            len(self._pipelines) < self.scenario.pipelines
            and len(self._spares) >= self.scenario.stages
        )
        dead = covered - self._formed_covered
        filled = min(covered, len(self._spares))
        # New pipelines gain the machines that fill gaps until the next failure; all pause for it.
        pays = (
            self.costs.bamboo_seconds * (workers - covered)
            < filled * self.scenario.seconds_between_failures
        )
        return more or pays or dead > self.costs.bamboo_max_covered_share * workers

    def _form_pipelines(self) -> None:
        """Form as many pipelines as the live machines allow, up to the job's number."""
        stages = self.scenario.stages
        live = [
            machine for machines in self._pipelines for machine in machines if machine is not None
        ] + self._spares
        # At most every second stage can be covered, since a predecessor must be alive.
        most_covered = stages // 2
        count = min(self.scenario.pipelines, len(live) // (stages - most_covered))
        if not count:
            (
                self._pipelines,
                self._spares,
                self._pipeline_of,
                self._covered,
                self._formed_covered,
            ) = [], live, {}, 0, 0
            return
        used = min(len(live), count * stages)
        missing = count * stages - used
        self._spares, machines = live[used:], iter(live[:used])
        self._pipelines = []
        for index in range(count):
            covered = missing * (index + 1) // count - missing * index // count
            # The predecessor of the first stage is the last stage, so covered stages are 1, 3, 5,
            # ...
            gaps = range(1, 2 * covered, 2)
            pipeline: list[int | None] = []
            for stage in range(stages):
                pipeline.append(None if stage in gaps else next(machines))
            self._pipelines.append(pipeline)
        self._pipeline_of = {
            machine: machines
            for machines in self._pipelines
            for machine in machines
            if machine is not None
        }
        self._covered = self._formed_covered = missing

    def _current_rate(self) -> float:
        return self._rate_for_machines(len(self._pipelines) * self.scenario.stages - self._covered)
