"""Bamboo (NSDI 2023): each worker also holds the next stage, and computes its forward redundantly."""

from collections.abc import Sequence

from planner.fleet.availability import Change
from planner.fleet.policy import Cause, Phase, Policy, Setting


class Bamboo(Policy):
    """After a failure the predecessor runs both stages, until new whole pipelines are formed."""

    name = "bamboo"
    title = "Bamboo: redundant computation on the predecessor"
    assumes = ("fault-free throughput as published relative to 1F1B (redundant forwards, memory for two stages); a "
               "step takes 1.5 times as long while any worker carries two stages; new pipelines when spares suffice "
               "or more than 5 % carry two; whole pipelines only, left-over machines idle as spares; the global "
               "batch is kept")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._seats: list[list[int | None]] = []
        """Machines by pipeline and stage; None: dead, carried by its predecessor."""
        self._spares: list[int] = []

    @property
    def whole_rate(self) -> float:
        """With redundant forwards."""
        return self._of(self.setting.pipelines)

    def _of(self, pipelines: int) -> float:
        return self.costs.bamboo_whole * self.speeds.usual(pipelines)

    def steady(self, failures: int) -> float:
        """After new pipelines have been formed."""
        return self._of((self.setting.workers - failures) // self.setting.stages)

    def start(self, live: Sequence[int]) -> list[Phase]:
        """As many whole pipelines as there are machines for."""
        self._spares = sorted(live)
        self._form()
        return self.train(0.0, self._current())

    def change(self, change: Change, left: Sequence[Phase]) -> Sequence[Phase]:
        """Carry, or form new pipelines; a rendezvous more where redundancy does not cover a failure."""
        gone = set(change.removed)
        self._spares = [machine for machine in (*self._spares, *change.added) if machine not in gone]
        hit, fatal = self._bury(gone)
        lost = self.lost_samples(left, hit=hit)
        if self.stopped(left):
            if not hit and left[0].cause is Cause.RESTART:
                return left
            self._form()
            return self.restart(change.seconds, self._current())
        if fatal or self._should_form():
            self._form()
            seconds = self.costs.bamboo_seconds + (self.costs.bamboo_fatal_seconds if fatal else 0.0)
        elif hit:
            unfinished = sum(phase.seconds for phase in left if phase.cause is Cause.SWITCH)
            seconds = max(self.costs.switch_seconds, unfinished)
        else:
            return left
        return self.train(change.seconds, self._current(), Phase(Cause.SWITCH, seconds), lost_samples=lost)

    def _bury(self, gone: set[int]) -> tuple[bool, bool]:
        """Take the dead out of pipelines: (whether any was in one, whether some stage has nobody left to carry it)."""
        hit = fatal = False
        for seats in self._seats:
            if gone.isdisjoint(seats):
                continue
            hit = True
            seats[:] = [None if machine in gone else machine for machine in seats]
            # A dead worker next to a dead one: the first cannot carry the second, or carried it and died.
            fatal |= any(seats[index] is None and seats[index - 1] is None for index in range(len(seats)))
        return hit, fatal

    def _carried(self) -> int:
        return sum(machine is None for seats in self._seats for machine in seats)

    def _should_form(self) -> bool:
        """Spares suffice for the dead, or for one more pipeline; or too many workers carry two stages."""
        carried, workers = self._carried(), len(self._seats) * self.setting.stages
        more = len(self._seats) < self.setting.pipelines and len(self._spares) >= self.setting.stages
        return more or 0 < carried <= len(self._spares) or carried > self.costs.bamboo_carried * workers

    def _form(self) -> None:
        """Whole pipelines of all live machines; what is left over idles."""
        stages = self.setting.stages
        live = [machine for seats in self._seats for machine in seats if machine is not None] + self._spares
        count = min(self.setting.pipelines, len(live) // stages)
        self._seats = [list(live[index * stages:(index + 1) * stages]) for index in range(count)]
        self._spares = live[count * stages:]

    def _current(self) -> float:
        """Samples per second now: pipelines meet at the all-reduce, so one that carries slows all."""
        return self._of(len(self._seats)) / (self.costs.bamboo_doubled if self._carried() else 1.0)
