"""ReCycle as published (SOSP 2024, arXiv 2405.14009)."""

from slipstream.cli.fleet.loads import DownByStage
from slipstream.cli.fleet.policies.rerouting import Rerouting
from slipstream.cli.fleet.policy import Cause, Phase


class ReCycle(Rerouting):
    """1F1B while all workers are alive; else re-routed round-robin, with split backward and staggered optimizer."""

    name = "recycle"
    title = "ReCycle as published"
    source = "ReCycle (SOSP 2024, arXiv 2405.14009), sections 3 to 5; its solver is replaced by list schedules"
    assumptions = ("1F1B on healthy workers, micro-batches of dead workers assigned round-robin, split backward and "
                   "staggered optimizer; one failure a stage, then two; its solver replaced by list schedules; who "
                   "joins or moves loads one stage from a peer, all at the same time, while the others wait; "
                   "switches and lost work as for slipstream")

    def rate(self, down: DownByStage) -> float:
        """By ReCycle's schedule."""
        return self.throughputs.recycle(down)

    def _reconfigure(self, now: float, stalls: list[Phase], lost_samples: float) -> list[Phase]:
        """Those who load a stage do so while the others wait."""
        stalls = [*(stall for stall in stalls if stall.cause is Cause.RESTART), self.switch]
        if self._loading:
            stalls.append(self.load)
        self._loaded_at = now + sum(stall.seconds for stall in stalls)
        return self.resume_training(self._rate_of(self._stages), *stalls, lost_samples=lost_samples)
