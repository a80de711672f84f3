"""Who runs the micro-batches of a dead worker: dealing them to its peers before anything is timed."""

import heapq
from typing import Literal, get_args

from planner.problem import Problem, Unit

Dealing = Literal["least-loaded", "round-robin"]
DEALINGS: tuple[Dealing, ...] = get_args(Dealing)


def deal(problem: Problem, dealing: Dealing) -> dict[Unit, int]:
    """A host pipeline for every unit: its own worker where that is alive, else a peer by the given rule."""
    hosts: dict[Unit, int] = {}
    for stage in range(len(problem.grid.stages)):
        live = problem.live_by_column[problem.column_of[stage]]
        orphans = []
        for pipeline, count in enumerate(problem.grid.microbatches):
            units = [Unit(stage, pipeline, microbatch) for microbatch in range(count)
                     if stage in problem.grid.path(microbatch)]
            if pipeline in problem.hosts(stage, pipeline) and len(problem.hosts(stage, pipeline)) == 1:
                hosts.update(dict.fromkeys(units, problem.hosts(stage, pipeline)[0]))
            else:
                orphans += units
        # Micro-batch by micro-batch, so that the orphans of several pipelines share their helpers evenly over time.
        orphans.sort(key=lambda unit: (unit.microbatch, unit.pipeline))
        choice = _round_robin(live, orphans) if dealing == "round-robin" else _least_loaded(problem, stage, orphans)
        hosts.update(choice)
    return hosts


def _round_robin(live: tuple[int, ...], orphans: list[Unit]) -> dict[Unit, int]:
    """ReCycle's rule (SOSP 2024): peer after peer, whatever they already have to do."""
    return {unit: live[index % len(live)] for index, unit in enumerate(orphans)}


def _least_loaded(problem: Problem, stage: int, orphans: list[Unit]) -> dict[Unit, int]:
    """Each to the peer that would be done first with all its work."""
    live = problem.live_by_column[problem.column_of[stage]]
    price = {host: sum(problem.cost(kind, stage, host) for kind in problem.kinds) for host in live}
    loads = [(price[host] * (problem.grid.microbatches[host] + 1), index, host) for index, host in enumerate(live)]
    heapq.heapify(loads)
    hosts = {}
    for unit in orphans:
        load, order, host = heapq.heappop(loads)
        hosts[unit] = host
        heapq.heappush(loads, (load + price[host], order + len(live), host))
    return hosts
