"""This project: bubble-filling schedules by the planner, switched by the runtime."""

from planner.fleet.policies.rerouting import Rerouting
from planner.fleet.speeds import Down

_ASSUMES = ("the schedules of `slipstream plan` (list schedulers, or the table given); a failure costs half an "
            "iteration and a switch; who joins or moves loads one stage from a peer, all at the same time, while the "
            "others wait")


class Slipstream(Rerouting):
    """With normalisation: a live worker moves to another stage where that makes the schedule faster."""

    name = "slipstream"
    title = "this planner, failures spread over stages by moving workers"
    assumes = _ASSUMES

    def rate(self, down: Down) -> float:
        """The planner's schedule."""
        return self.speeds.planned(down)

    def target(self, failures: int) -> Down | None:
        """The planner's normal form."""
        return self.speeds.target(failures)


class SlipstreamStatic(Slipstream):
    """Without: who trains keeps its stage; only who comes anew may be given any."""

    name = "slipstream-static"
    title = "this planner, no live worker changes its stage"
    assumes = _ASSUMES + "; newcomers, who have to load a stage anyway, get the one that lacks workers most"
    moves = False
