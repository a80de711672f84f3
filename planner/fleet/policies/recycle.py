"""ReCycle as published (SOSP 2024, arXiv 2405.14009)."""

from planner.fleet.policies.rerouting import Rerouting
from planner.fleet.speeds import Down, spread


class ReCycle(Rerouting):
    """1F1B while whole; else split backward, staggered optimizer and orphans dealt round-robin."""

    name = "recycle"
    title = "ReCycle as published"
    assumes = ("1F1B on healthy workers, orphans dealt round-robin, split backward and staggered optimizer; one "
               "failure a stage, then two; its solver replaced by list schedules; switches, loads and lost work as "
               "for slipstream")

    def rate(self, down: Down) -> float:
        """ReCycle's schedule."""
        return self.speeds.recycle(down)

    def target(self, failures: int) -> Down | None:
        """One failure a stage, then two."""
        counts = spread(failures, self.setting.stages)
        return counts if max(counts) < self.setting.pipelines else None
