"""Hot spares: a share of the machines idles, to take the place of the next that dies."""

import math
from collections.abc import Sequence

from planner.fleet.availability import Change
from planner.fleet.policy import Cause, Phase, Policy, Setting


class Spares(Policy):
    """Fewer pipelines than there are machines for, which are kept whole out of the rest."""

    name = "hot-spares"
    title = "hot spares: a share of the machines idles until needed"
    assumes = ("5 % of the machines, in whole pipelines, at least one; a spare takes the place of a dead worker "
               "within three minutes, in which the job stands still, and loads its stage from a peer; half an "
               "iteration is lost; without enough spares, pipelines that cannot be filled are dropped, and come back "
               "when they can; the global batch is kept")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        reserve = max(1, math.ceil(setting.costs.spare_share * setting.workers / setting.stages))
        self._most = max(1, setting.pipelines - reserve)
        self._used: set[int] = set()
        self._idle: set[int] = set()

    @property
    def whole_rate(self) -> float:
        """1F1B on the pipelines that are not spare."""
        return self.speeds.usual(self._most)

    def steady(self, failures: int) -> float:
        """Whole while spares last, then fewer pipelines."""
        return self.speeds.usual(min(self._most, (self.setting.workers - failures) // self.setting.stages))

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Fill pipelines."""
        self._idle = set(live)
        self._fill()
        return self.train(0.0, self._current())

    def change(self, change: Change, left: Sequence[Phase]) -> Sequence[Phase]:
        """Put spares in the places of the dead."""
        gone, before, was = set(change.removed), len(self._used), self._rate
        self._used -= gone
        hit = len(self._used) < before
        self._idle = (self._idle | set(change.added)) - gone
        emptied = not self._used
        self._fill()
        rate = self._current()
        if not hit and rate == was:
            return left
        if self.stopped(left) or emptied:
            return self.restart(change.seconds, rate)
        return self.train(change.seconds, rate, Phase(Cause.SWITCH, self.costs.spare_seconds),
                          Phase(Cause.LOAD, self.costs.load_seconds), lost_samples=self.lost_samples(left, hit=hit))

    def _fill(self) -> None:
        """As many whole pipelines as there are machines for, but never more than planned."""
        stages = self.setting.stages
        count = min(self._most, (len(self._used) + len(self._idle)) // stages) * stages
        order = [*sorted(self._used), *sorted(self._idle)]
        self._used, self._idle = set(order[:count]), set(order[count:])

    def _current(self) -> float:
        return self.speeds.usual(len(self._used) // self.setting.stages)
