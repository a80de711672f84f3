"""This project: schedules that fill bubbles with re-routed work, computed by the planner, switched by the runtime."""

from planner.fleet.policies.rerouting import Rerouting
from planner.fleet.policy import Cause, Phase
from planner.fleet.throughput import DownByStage


class Slipstream(Rerouting):
    """Those who join or move load their stage while the others train on."""

    name = "slipstream"
    title = "this planner, failures spread over stages by moving workers"
    assumptions = ("the schedules of `slipstream plan` (list schedulers, or the table given), never slower than those "
                   "of ReCycle, which it may choose; a failure costs half an iteration and a switch; who joins or "
                   "moves loads one stage from peers while the others train on, and a switch follows")

    def rate(self, down: DownByStage) -> float:
        """By the planner's schedule, or on the pipelines that are whole, where that is faster."""
        return max(self.throughputs.planned(down),
                   self.throughputs.one_f_one_b(self.scenario.pipelines - max(down)))

    def _reconfigure(self, now: float, stalls: list[Phase], lost_samples: float) -> list[Phase]:
        """At once with those who hold a stage; with all when they have loaded theirs."""
        at_once, then = self.rate(self._down(self._held)), self.rate(self._down(self._stage))
        loads, load, switch = self._held != self._stage, self.costs.load_seconds, self._switch()
        self._loaded_at = now + sum(stall.seconds for stall in stalls) + loads * load
        if stalls and loads and load * at_once < switch.seconds * then:
            # Another switch would cost more than what is trained until then.
            return self.resume_training(then, *stalls, Phase(Cause.LOAD, load), lost_samples=lost_samples)
        phases = self.resume_training(at_once, *stalls, lost_samples=lost_samples)
        return self.change_rate(phases, self._loaded_at - now, switch, then) if loads else phases


class SlipstreamFixed(Slipstream):
    """No live worker loads other parameters; a newcomer may be given any stage."""

    name = "slipstream-fixed"
    title = "this planner, no live worker changes its stage"
    assumptions = (Slipstream.assumptions + "; newcomers, who have to load a stage anyway, get the one that lacks "
                   "workers most")
    moves_workers = False
