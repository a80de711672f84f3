"""ElasWave (arXiv 2510.00606): one division of the layers for all pipelines.

If a stage has lost replicas, the others take larger micro-batches, so that the global batch stays.
Layers then migrate between stages, by a minimax partition, so that a stage with fewer replicas has
fewer layers. Optimizer states are sharded over the replicas of a stage (ZeRO) in interleaved parts,
which are sent from rank to rank. Measured there: 1.35 times ReCycle's throughput on 96 NPUs, and a
second to edit the communication groups in place.

In formulas: a stage with `live` of D replicas takes D / live times as long, for each of the M
micro-batches of a pipeline, under 1F1B; the division of the layers makes the longest stage as short
as possible. Assumed, in its favour: larger micro-batches are slower in exact proportion; memory is
no limit; migration takes as long as loading a stage, while training continues with the old
division; its change of clock frequencies, which hides the remaining imbalance, is not simulated.
"""

from slipstream.planner.simulation.loads import DownByStage
from slipstream.planner.simulation.policies.rerouting import Rerouting
from slipstream.planner.simulation.policies.uneven_pipelines import divide_by_speed
from slipstream.planner.simulation.policy import Phase, Scenario


class ElasWave(Rerouting):
    """Policy in which a stage's replicas share its work, and layers move between stages."""

    name = "elaswave"
    title = "ElasWave: one cut of the layers for all pipelines, by the replicas left of each stage"
    source = "ElasWave (arXiv 2510.00606), sections 4 and 5; our reading: no public code"
    assumptions = (
        "1F1B; a stage's live replicas share its micro-batches evenly; one minimax cut of the "
        "layers over stages; a failure costs half an iteration and a switch; layers migrate, and "
        "newcomers load, while the job trains on; memory is no limit; a stage without workers "
        "comes from a checkpoint"
    )
    moves_workers = False

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._layers = self.throughputs.loads.layer_seconds
        self._fault_free_template = divide_by_speed(self._layers, (1.0,) * scenario.stages)
        self._microbatches = max(self.throughputs.job.microbatches)

    def rate(self, down: DownByStage) -> float:
        """Return the samples per second with layers moved and `down` dead workers of each stage.

        0 if a stage has no live worker.
        """
        return self._cached_rate(down, migrated=True)

    def _cached_rate(self, down: DownByStage, *, migrated: bool) -> float:
        return self.throughputs.compute_once(
            (self.name, down, migrated), lambda: self._compute_rate(down, migrated=migrated)
        )

    def _compute_rate(self, down: DownByStage, *, migrated: bool) -> float:
        pipelines = self.scenario.pipelines
        whole = self._fault_free_template.seconds_for(self._microbatches)
        if max(down) >= pipelines:
            return 0.0
        # A stage with fewer replicas is slower by that factor, and so gets fewer layers.
        if migrated:
            factors = tuple([pipelines / (pipelines - count) for count in down])
            seconds = divide_by_speed(self._layers, factors).seconds_for(self._microbatches)
        else:  # every micro-batch waits for the stage with the fewest replicas
            seconds = whole * pipelines / (pipelines - max(down))
        return self.throughputs.scale_by_formula(whole, seconds)

    def _plan_phases(self, now: float, stalls: list[Phase], lost_samples: float) -> list[Phase]:
        """Return phases with the old division of layers, then with the new one."""
        first_rate = self._cached_rate(self._held_stages.down_by_stage, migrated=False)
        final_rate = self._rate_for_stages(self._stages)
        self._loaded_at = now + sum(stall.seconds for stall in stalls) + self.costs.load_seconds
        phases = self.resume_training(first_rate, *stalls, lost_samples=lost_samples)
        return self.change_rate(phases, self._loaded_at - now, self.switch, final_rate)
