"""ReCycle as published (SOSP 2024, arXiv 2405.14009)."""

from planner.fleet.policies.rerouting import Rerouting
from planner.fleet.throughput import DownByStage, spread_over_stages


class ReCycle(Rerouting):
    """1F1B while all workers are alive; else re-routed round-robin, with split backward and staggered optimizer."""

    name = "recycle"
    title = "ReCycle as published"
    assumptions = ("1F1B on healthy workers, micro-batches of dead workers assigned round-robin, split backward and "
                   "staggered optimizer; one failure a stage, then two; its solver replaced by list schedules; "
                   "switches, loads and lost work as for slipstream")

    def rate(self, down: DownByStage) -> float:
        """By ReCycle's schedule."""
        return self.throughputs.recycle(down)

    def preferred_spread(self, failures: int) -> DownByStage | None:
        """One failure a stage, then two."""
        counts = spread_over_stages(failures, self.scenario.stages)
        return counts if max(counts) < self.scenario.pipelines else None
