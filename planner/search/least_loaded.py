"""Give re-routed units to the least loaded workers, whatever the placement of stages.

With several stages on a worker, what it runs at all of them counts. With two directions, the
workers of two columns hold the same stages and share them.
"""

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from slipstream.planner.model.problem import Problem, Unit
from slipstream.schedules.schedule import Worker


class Turn(NamedTuple):
    """Worker that may take the next micro-batch of a group of stages."""

    finish: float
    """Ticks that it would then have to run."""
    number: int
    """Its turn among those who would finish at the same time."""
    worker: Worker


NOBODY = Turn(math.inf, 0, Worker(-1, -1))
"""Turn where no worker has room at all stages."""


def assign_least_loaded(
    problem: Problem, rerouted: Mapping[int, Sequence[Unit]], lost: Sequence[int],
    own: Mapping[Unit, Worker], hosts_of: Mapping[int, Sequence[Worker]]
) -> dict[Unit, Worker]:
    """Assign each re-routed unit to the host of its stage that would finish first.

    All units of a micro-batch in a column go to one host while it has less than the mean; the last
    ones are divided. The units in `own` have their workers already, `rerouted` has the others and
    `hosts_of` their possible workers, by stage; `lost` has the number of dead workers by pipeline.
    """
    loads, hosts = _Loads(problem, lost, hosts_of), dict[Unit, Worker]()
    for (stage, worker), count in Counter(
            (unit.slice, worker) for unit, worker in own.items()).items():
        loads.add((stage,), worker, count)
    by_column = defaultdict[int, list[Unit]](list)
    for stage, units in rerouted.items():
        by_column[problem.reduction_root[problem.column_of[stage]]] += units
    for units in by_column.values():
        mean = loads.mean_with(units)
        units.sort(key=lambda unit: (unit.microbatch, unit.pipeline, unit.slice))
        for _, group in itertools.groupby(
                units, key=lambda unit: (unit.microbatch, unit.pipeline)):
            together = tuple(group)
            fits = loads.find_first(_stages_of(together)).finish <= mean
            for some in (together,) if fits else [(unit,) for unit in together]:
                worker = loads.find_first(_stages_of(some)).worker
                loads.add(_stages_of(some), worker)
                hosts |= dict.fromkeys(some, worker)
    return hosts


def _stages_of(units: Sequence[Unit]) -> tuple[int, ...]:
    return tuple(unit.slice for unit in units)


class _Loads:
    """Ticks that each worker has to run for the units that it has so far."""

    def __init__(self, problem: Problem, lost: Sequence[int],
                 hosts_of: Mapping[int, Sequence[Worker]]) -> None:
        self._problem, self._lost, self._hosts_of = problem, lost, hosts_of
        self._ticks = Counter[Worker]()
        self._turns: dict[tuple[int, ...], list[Turn]] = {}

    def add(self, stages: tuple[int, ...], worker: Worker, count: int = 1) -> None:
        """Give `count` micro-batches at these stages to a worker."""
        self._ticks[worker] += count * self._work(stages, worker)

    def mean_with(self, units: Sequence[Unit]) -> Fraction:
        """Return the mean ticks of the holders of some units if they run these, too."""
        stages = {unit.slice for unit in units}
        holders = {worker for stage in stages for worker in self._hosts_of[stage]}
        more = sum(self._problem.usual_ticks(kind, unit.slice)
                   for unit in units for kind in self._problem.op_kinds)
        return Fraction(sum(self._ticks[worker] for worker in holders) + more, len(holders))

    def find_first(self, stages: tuple[int, ...]) -> Turn:
        """Return who would finish a micro-batch at these stages first."""
        if stages not in self._turns:
            self._turns[stages] = self._make_turns(stages)
        turns = self._turns[stages]
        while turns:
            first = turns[0]
            finish = self._ticks[first.worker] + self._work(stages, first.worker)
            if finish == first.finish:
                return first
            heapq.heapreplace(turns, Turn(finish, first.number + len(turns), first.worker))
        return NOBODY

    def _make_turns(self, stages: tuple[int, ...]) -> list[Turn]:
        """Return a heap of the workers that have room at all these stages."""
        hosts = set.intersection(*(set(self._hosts_of[stage]) for stage in stages))
        order = sorted(hosts, key=lambda worker: (self._lost[worker.pipeline], worker))
        turns = [Turn(self._ticks[worker] + self._work(stages, worker), number, worker)
                 for number, worker in enumerate(order)]
        heapq.heapify(turns)
        return turns

    def _work(self, stages: tuple[int, ...], worker: Worker) -> int:
        return sum(self._problem.op_ticks(kind, stage, worker)
                   for stage in stages for kind in self._problem.op_kinds)
