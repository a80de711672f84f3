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
    """Worker that may take the next micro-batch at some stages; the least turn takes it."""

    finish: float
    """Ticks of work that the worker would then have in all."""
    number: int
    """Rank of the worker among those with equal `finish`."""
    worker: Worker


NOBODY = Turn(math.inf, 0, Worker(-1, -1))
"""Turn that is returned if no worker may run all stages."""


def assign_least_loaded(
    problem: Problem,
    rerouted: Mapping[int, Sequence[Unit]],
    lost: Sequence[int],
    assigned: Mapping[Unit, Worker],
    hosts_of: Mapping[int, Sequence[Worker]],
) -> dict[Unit, Worker]:
    """Assign each re-routed unit to the host that would then have the least work.

    All units of a micro-batch in a column go to one host, or one by one if this host would then
    have more work than the mean.

    Parameters
    ----------
    problem
        Problem whose units are assigned.
    rerouted
        Units without a worker, by stage.
    lost
        Number of dead workers, by pipeline.
    assigned
        Workers of the other units.
    hosts_of
        Possible workers of re-routed units, by stage; at least one for each.
    """
    loads, hosts = _Loads(problem, lost, hosts_of), dict[Unit, Worker]()
    # What workers run already.
    counts = Counter((unit.slice, worker) for unit, worker in assigned.items())
    for (stage, worker), count in counts.items():
        loads.add((stage,), worker, count)
    # Column by column, as its workers hold all of its stages.
    by_column = defaultdict[int, list[Unit]](list)
    for stage, units in rerouted.items():
        by_column[problem.reduction_root[problem.column_of[stage]]] += units
    for units in by_column.values():
        mean = loads.mean_with(units)
        units.sort(key=lambda unit: (unit.microbatch, unit.pipeline, unit.slice))
        for _, group in itertools.groupby(units, key=lambda unit: (unit.microbatch, unit.pipeline)):
            together = tuple(group)
            parts = [together]
            if loads.find_first(_stages_of(together)).finish > mean:
                parts = [(unit,) for unit in together]
            for part in parts:
                worker = loads.find_first(_stages_of(part)).worker
                loads.add(_stages_of(part), worker)
                hosts |= dict.fromkeys(part, worker)
    return hosts


def _stages_of(units: Sequence[Unit]) -> tuple[int, ...]:
    return tuple(unit.slice for unit in units)


class _Loads:
    """Ticks of work of each worker, for the units that it has so far."""

    def __init__(
        self, problem: Problem, lost: Sequence[int], hosts_of: Mapping[int, Sequence[Worker]]
    ) -> None:
        self._problem, self._lost, self._hosts_of = problem, lost, hosts_of
        self._ticks = Counter[Worker]()
        self._turns: dict[tuple[int, ...], list[Turn]] = {}

    def add(self, stages: tuple[int, ...], worker: Worker, count: int = 1) -> None:
        self._ticks[worker] += count * self._work(stages, worker)

    def mean_with(self, units: Sequence[Unit]) -> Fraction:
        """Return the mean ticks of work of the units' hosts, these units added."""
        stages = {unit.slice for unit in units}
        holders = {worker for stage in stages for worker in self._hosts_of[stage]}
        more = sum(
            self._problem.usual_ticks(kind, unit.slice)
            for unit in units
            for kind in self._problem.op_kinds
        )
        return Fraction(sum(self._ticks[worker] for worker in holders) + more, len(holders))

    def find_first(self, stages: tuple[int, ...]) -> Turn:
        if stages not in self._turns:
            self._turns[stages] = self._make_turns(stages)
        # Loads only grow: a turn is renewed when it comes first, and moves back if it has changed.
        turns = self._turns[stages]
        while turns:
            first = turns[0]
            finish = self._ticks[first.worker] + self._work(stages, first.worker)
            if finish == first.finish:
                return first
            heapq.heapreplace(turns, Turn(finish, first.number + len(turns), first.worker))
        return NOBODY

    def _make_turns(self, stages: tuple[int, ...]) -> list[Turn]:
        # Of equal loads, first a worker whose pipeline has lost fewest: those of broken pipelines,
        # whose micro-batches wait for peers, should have time to spare.
        hosts = set.intersection(*(set(self._hosts_of[stage]) for stage in stages))
        order = sorted(hosts, key=lambda worker: (self._lost[worker.pipeline], worker))
        turns = [
            Turn(self._ticks[worker] + self._work(stages, worker), number, worker)
            for number, worker in enumerate(order)
        ]
        heapq.heapify(turns)
        return turns

    def _work(self, stages: tuple[int, ...], worker: Worker) -> int:
        return sum(
            self._problem.op_ticks(kind, stage, worker)
            for stage in stages
            for kind in self._problem.op_kinds
        )
