"""Hot spares: a share of the machines idles, ready to replace the next that dies."""

import math
from collections.abc import Collection, Sequence

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
        self._used: list[int | None] = []
        """The machine of each pipeline and stage, pipeline by pipeline. None: it is dead."""
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
        self._fill_pipelines()
        return self.resume_training(self._current_rate())

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """Replace dead machines by spares."""
        gone, rate_before = set(change.removed), self._current_rate()
        died = not gone.isdisjoint(self._used)
        self._idle.update(change.added)
        self._idle -= gone
        lost = died and self._remove_dead(gone)
        self._fill_pipelines()
        rate = self._current_rate()
        if not died and rate == rate_before:
            return remaining
        return self.go_on(rate, remaining, Phase(Cause.SWITCH, self._seconds_to_replace), self.load, worker_died=died,
                          state_lost=lost)

    def _remove_dead(self, gone: Collection[int]) -> bool:
        """Take dead machines out of the pipelines: whether some stage has no machine any more."""
        self._used = [None if machine in gone else machine for machine in self._used]
        stages, pipelines = self.scenario.stages, len(self._used) // self.scenario.stages
        return any(self._used[stage::stages].count(None) == pipelines for stage in range(stages))

    def _fill_pipelines(self) -> None:
        """As many whole pipelines as there are machines for, up to `_max_pipelines`; those with fewest dead stay."""
        stages, dead = self.scenario.stages, self._used.count(None)
        count = min(self._max_pipelines, (len(self._idle) + len(self._used) - dead) // stages)
        if not dead and count * stages == len(self._used):
            return
        idle = sorted(self._idle)
        pipelines = [self._used[first:first + stages] for first in range(0, len(self._used), stages)]
        pipelines.sort(key=lambda pipeline: pipeline.count(None))
        idle += [machine for pipeline in pipelines[count:] for machine in pipeline if machine is not None]
        pipelines = pipelines[:count] + [[None] * stages for _ in range(count - len(pipelines))]
        self._used = [idle.pop(0) if machine is None else machine for pipeline in pipelines for machine in pipeline]
        self._idle = set(idle)

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
