"""Bamboo (NSDI 2023): each worker also holds the next stage, and computes its forward redundantly."""

from collections.abc import Sequence

from cli.fleet.availability_trace import Change
from cli.fleet.policy import Cause, Phase, Policy, Scenario


class Bamboo(Policy):
    """After a failure the predecessor *covers* the dead worker's stage: it runs both until new pipelines form."""

    name = "bamboo"
    title = "Bamboo: redundant computation on the predecessor"
    assumptions = ("fault-free throughput as published relative to 1F1B (redundant forwards, memory for two stages); a "
                   "step takes 1.5 times as long while any worker carries two stages; new pipelines when spares "
                   "suffice or more than 5 % carry two; whole pipelines only, left-over machines idle as spares; the "
                   "global batch is kept")

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._pipelines: list[list[int | None]] = []
        """The machine of each pipeline and stage. None: it is dead, and its predecessor covers the stage."""
        self._spares: list[int] = []

    @property
    def fault_free_rate(self) -> float:
        """1F1B with redundant forwards."""
        return self._rate_of(self.scenario.pipelines)

    def _rate_of(self, pipelines: int) -> float:
        return self.costs.bamboo_fault_free_share * self.throughputs.one_f_one_b(pipelines)

    def steady_rate(self, failures: int) -> float:
        """After new pipelines have been formed."""
        return self._rate_of((self.scenario.workers - failures) // self.scenario.stages)

    def start(self, live: Sequence[int]) -> list[Phase]:
        """As many whole pipelines as there are machines for."""
        self._spares = sorted(live)
        self._form_pipelines()
        return self.resume_training(self._current_rate())

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """Cover dead workers, or form new pipelines; where a stage is lost, that needs a rendezvous too."""
        gone = set(change.removed)
        self._spares = [machine for machine in (*self._spares, *change.added) if machine not in gone]
        died, stage_lost = self._remove_dead(gone)
        lost = self.lost_samples(remaining, worker_died=died)
        if self.needs_checkpoint(remaining):
            if not died and remaining[0].cause is Cause.RESTART:
                return remaining
            self._form_pipelines()
            return self.restart(self._current_rate(), remaining)
        if stage_lost or self._should_form_pipelines():
            self._form_pipelines()
            seconds = self.costs.bamboo_seconds + (self.costs.bamboo_fatal_seconds if stage_lost else 0.0)
        elif died:
            unfinished = sum(phase.seconds for phase in remaining if phase.cause is Cause.SWITCH)
            seconds = max(self.costs.switch_seconds, unfinished)
        else:
            return remaining
        return self.resume_training(self._current_rate(), Phase(Cause.SWITCH, seconds),
                                    lost_samples=lost)

    def _remove_dead(self, gone: set[int]) -> tuple[bool, bool]:
        """Take dead machines out of the pipelines: (whether any was in one, whether a stage cannot be covered)."""
        died = stage_lost = False
        for machines in self._pipelines:
            if gone.isdisjoint(machines):
                continue
            died = True
            machines[:] = [None if machine in gone else machine for machine in machines]
            # Of two dead neighbours, the first cannot cover the second, or covered it when it died.
            stage_lost |= any(machines[index] is None and machines[index - 1] is None
                              for index in range(len(machines)))
        return died, stage_lost

    def _covered(self) -> int:
        """Stages that a predecessor covers."""
        return sum([machines.count(None) for machines in self._pipelines])

    def _should_form_pipelines(self) -> bool:
        """Whether spares suffice for the dead or for one more pipeline, or too many stages are covered."""
        covered, workers = self._covered(), len(self._pipelines) * self.scenario.stages
        more = len(self._pipelines) < self.scenario.pipelines and len(self._spares) >= self.scenario.stages
        return more or 0 < covered <= len(self._spares) or covered > self.costs.bamboo_max_covered_share * workers

    def _form_pipelines(self) -> None:
        """Form whole pipelines of all live machines; the others are spares."""
        stages = self.scenario.stages
        live = [machine for machines in self._pipelines for machine in machines if machine is not None] + self._spares
        count = min(self.scenario.pipelines, len(live) // stages)
        self._pipelines = [list(live[index * stages:(index + 1) * stages]) for index in range(count)]
        self._spares = live[count * stages:]

    def _current_rate(self) -> float:
        """Samples per second now. Pipelines meet at the all-reduce, so one with a covered stage slows all."""
        return self._rate_of(len(self._pipelines)) / (self.costs.bamboo_covering_slowdown if self._covered() else 1.0)
