"""This project: schedules that fill bubbles with re-routed work, computed by the planner, switched by the runtime."""

from planner.fleet.policies.rerouting import Rerouting
from planner.fleet.throughput import DownByStage

_ASSUMPTIONS = ("the schedules of `slipstream plan` (list schedulers, or the table given); a failure costs half an "
                "iteration and a switch; who joins or moves loads one stage from a peer, all at the same time, while "
                "the others wait")


class Slipstream(Rerouting):
    """With failure normalisation: a live worker moves to another stage where that makes the schedule faster."""

    name = "slipstream"
    title = "this planner, failures spread over stages by moving workers"
    assumptions = _ASSUMPTIONS

    def rate(self, down: DownByStage) -> float:
        """By the planner's schedule."""
        return self.throughputs.planned(down)

    def preferred_spread(self, failures: int) -> DownByStage | None:
        """The planner's normal form."""
        return self.throughputs.normal_form(failures)


class SlipstreamStatic(Slipstream):
    """Without failure normalisation: a live worker keeps its stage; a newcomer may be given any stage."""

    name = "slipstream-static"
    title = "this planner, no live worker changes its stage"
    assumptions = _ASSUMPTIONS + "; newcomers, who have to load a stage anyway, get the one that lacks workers most"
    moves_workers = False
