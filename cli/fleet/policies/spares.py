"""Hot spares: a share of the machines idles, ready to replace the next that dies."""

import math
from collections import Counter
from collections.abc import Sequence

from slipstream.cli.fleet.availability_trace import Change
from slipstream.cli.fleet.policy import Cause, Phase, Policy, Scenario


class Spares(Policy):
    """Trains on fewer pipelines than there are machines for; the other machines are spares."""

    name = "hot-spares"
    title = "hot spares: a share of the machines idles until needed"
    source = "common practice; our reading: no figures are public"
    assumptions = ("5 % of the machines, in whole pipelines, at least one; a spare takes the place of a dead worker "
                   "within three minutes, in which the job stands still, and loads its stage from a peer; half an "
                   "iteration is lost; without enough spares, pipelines that cannot be filled are dropped, and come "
                   "back when they can; a stage that no live machine holds comes from a checkpoint; the global "
                   "batch is kept")

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        reserve = max(1, math.ceil(self.spare_share * scenario.workers / scenario.stages))
        self._max_pipelines = max(1, scenario.pipelines - reserve)
        self._used: list[int] = []
        """The machine of each pipeline and stage, pipeline by pipeline."""
        self._place: dict[int, int] = {}
        """The index of each of them there."""
        self._idle: set[int] = set()

    @property
    def spare_share(self) -> float:
        """Share of the machines that are spare, in whole pipelines; at least one."""
        return self.costs.spare_share

    @property
    def _seconds_to_replace(self) -> float:
        return self.costs.spare_seconds

    @property
    def fault_free_rate(self) -> float:
        """1F1B on the pipelines that are not spare."""
        return self.throughputs.one_f_one_b(self._max_pipelines)

    def steady_rate(self, failures: int) -> float:
        """The fault-free rate while spares last, then that of fewer pipelines."""
        whole = (self.scenario.workers - failures) // self.scenario.stages
        return self.throughputs.one_f_one_b(min(self._max_pipelines, whole))

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Fill the pipelines."""
        self._idle = set(live)
        self._fill_pipelines([])
        return self.resume_training(self._current_rate())

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """Replace dead machines by spares."""
        rate_before = self._current_rate()
        self._idle |= set(change.added)
        self._idle -= set(change.removed)
        vacant = sorted(place for machine in change.removed if (place := self._place.pop(machine, None)) is not None)
        pipelines = len(self._used) // self.scenario.stages
        lost = pipelines in Counter(place % self.scenario.stages for place in vacant).values()
        self._fill_pipelines(vacant)
        rate, died = self._current_rate(), bool(vacant)
        if not died and rate == rate_before:
            return remaining
        return self.go_on(rate, remaining, Phase(Cause.SWITCH, self._seconds_to_replace), self.load, worker_died=died,
                          state_lost=lost)

    def _fill_pipelines(self, vacant: Sequence[int]) -> None:
        """As many whole pipelines as there are machines for, up to `_max_pipelines`; those with fewest dead stay.

        `vacant`: the places whose machines have died.
        """
        stages = self.scenario.stages
        count = min(self._max_pipelines, (len(self._idle) + len(self._used) - len(vacant)) // stages)
        if count * stages != len(self._used):
            vacant = self._change_pipelines(count, vacant)
        for place, machine in zip(vacant, sorted(self._idle), strict=False):
            self._used[place] = machine
            self._place[machine] = place
            self._idle.remove(machine)

    def _change_pipelines(self, count: int, vacant: Sequence[int]) -> Sequence[int]:
        """Keep so many pipelines, those with fewest dead, or add some: the places that are vacant then."""
        stages = self.scenario.stages
        dead = Counter(place // stages for place in vacant)
        kept = sorted(range(len(self._used) // stages), key=lambda pipeline: dead[pipeline])[:count]
        places = [pipeline * stages + stage for pipeline in kept for stage in range(stages)]
        places += [-1] * (count * stages - len(places))
        used, gone = self._used, {*vacant, -1}
        self._used = [-1 if place in gone else used[place] for place in places]
        self._idle |= self._place.keys() - set(self._used)
        self._place = {machine: place for place, machine in enumerate(self._used) if machine >= 0}
        return [place for place, machine in enumerate(self._used) if machine < 0]

    def _current_rate(self) -> float:
        return self.throughputs.one_f_one_b(len(self._used) // self.scenario.stages)


class TrainMover(Spares):
    """The same, with a spare in place within seconds."""

    name = "trainmover"
    title = "TrainMover: a standby machine takes the place of a dead one in 20 seconds"
    source = "TrainMover (OSDI 2026, arXiv 2412.12636), abstract; our reading: no public code"
    assumptions = ("as hot-spares, but 20 s for a replacement, state included, at 1,024 GPUs (TrainMover, OSDI 2026, "
                   "arXiv 2412.12636); DeadPool (arXiv 2607.01646) reports less than 40 s at 512")

    @property
    def _seconds_to_replace(self) -> float:
        return max(0.0, self.costs.standby_seconds - self.costs.load_seconds)


class ByteRobust(Spares):
    """The same with fewer spares, and what its paper loses at a failure in the mean."""

    name = "byterobust"
    title = "ByteRobust: warm standbys, 97 % effective training time on 9,600 GPUs"
    source = "ByteRobust (SOSP 2025, arXiv 2509.16293), abstract: ETTR 97 % on 9,600 GPUs; our reading: no public code"
    assumptions = ("as hot-spares, with one pipeline of standbys; each failure costs 570 s in all, which makes 97 % of "
                   "9,600 GPUs at Llama 3's failure rate: the paper gives no rate of its own")

    @property
    def spare_share(self) -> float:
        """One pipeline."""
        return 0.0

    @property
    def _seconds_to_replace(self) -> float:
        return max(0.0, self.costs.byterobust_seconds - self.costs.load_seconds)
