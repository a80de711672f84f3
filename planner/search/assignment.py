"""Assignment: who runs the micro-batches of dead and of slow workers, chosen before anything is timed."""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from slipstream.planner.model.bounds import lower_bound, window_bound
from slipstream.planner.model.problem import Problem, Unit
from slipstream.schedules.schedule import Worker

AssignmentRule = Literal["least-loaded", "spread", "round-robin", "by-speed"]
ASSIGNMENT_RULES: tuple[AssignmentRule, ...] = get_args(AssignmentRule)


def assign(problem: Problem, rule: AssignmentRule) -> dict[Unit, Worker]:
    """A host for every unit: that of the layout; else its own worker where that is alive, else a peer by the rule.

    "by-speed" leaves live workers only what they have time for: see `_by_speed`.
    """
    if problem.assigned:
        return {Unit(number, *batch): worker for batch, route in problem.routes.items() for number, worker in route}
    if rule == "by-speed":
        return _by_speed(problem)
    hosts: dict[Unit, Worker] = {}
    rerouted: dict[int, list[Unit]] = {}
    for stage in range(len(problem.grid.stages)):
        for pipeline, count in enumerate(problem.grid.microbatches):
            units = [Unit(stage, pipeline, microbatch) for microbatch in range(count)
                     if stage in problem.grid.path(microbatch)]
            own = problem.worker(stage, pipeline)
            if own not in problem.failed:
                hosts.update(dict.fromkeys(units, own))
            elif units:
                rerouted.setdefault(stage, []).extend(units)
    for units in rerouted.values():
        # By micro-batch, so that those of several pipelines share their peers evenly over time.
        units.sort(key=lambda unit: (unit.microbatch, unit.pipeline))
    lost = _lost(problem)
    if rule == "spread":
        return hosts | _spread(problem, rerouted, lost)
    for stage, units in rerouted.items():
        live = problem.holders[stage]
        hosts |= _round_robin(live, units) if rule == "round-robin" else _least_loaded(problem, stage, units, lost)
    return hosts


def _by_speed(problem: Problem) -> dict[Unit, Worker]:
    """Each stage's micro-batches over its live workers, so that the last of them is done as early as can be.

    A worker keeps as many of its own as it gets, and the others, even over the iteration, go to those that get more:
    to workers of pipelines that run the fewest of others so far.
    """
    hosts: dict[Unit, Worker] = {}
    foreign: Counter[int] = Counter()
    for stage in range(len(problem.grid.stages)):
        price = _prices(problem, stage)
        own = {pipeline: [Unit(stage, pipeline, microbatch) for microbatch in range(count)
                          if stage in problem.grid.path(microbatch)]
               for pipeline, count in enumerate(problem.grid.microbatches)}
        free = _counts(price, {host: len(own[host]) for host in price}, sum(map(len, own.values())))
        shed: list[Unit] = []
        for pipeline, units in own.items():
            gone = len(units) - min(len(units), free.get(pipeline, 0))
            leaving = {(2 * step + 1) * len(units) // (2 * gone) for step in range(gone)}
            shed += [unit for index, unit in enumerate(units) if index in leaving]
            stay = [unit for index, unit in enumerate(units) if index not in leaving]
            hosts.update(dict.fromkeys(stay, problem.worker(stage, pipeline)))
            if pipeline in free:
                free[pipeline] -= len(stay)
        for unit in sorted(shed, key=lambda unit: (unit.microbatch, unit.pipeline)):
            host = min((host for host in free if free[host]), key=lambda host: (foreign[host], -free[host], host))
            hosts[unit] = problem.worker(stage, host)
            free[host] -= 1
            foreign[host] += 1
    return hosts


def _counts(price: Mapping[int, int], own: Mapping[int, int], total: int) -> dict[int, int]:
    """How many units each host runs so that the last is done first; of equal choices, its own."""
    counts = dict.fromkeys(price, 0)
    heap = [(price[host], own[host] < 1, host) for host in price]
    heapq.heapify(heap)
    for _ in range(total):
        load, _, host = heap[0]
        counts[host] += 1
        heapq.heapreplace(heap, (load + price[host], counts[host] + 1 > own[host], host))
    return counts


def _round_robin(live: tuple[Worker, ...], units: list[Unit]) -> dict[Unit, Worker]:
    """ReCycle's rule (SOSP 2024): peer after peer, whatever they already have to do."""
    return {unit: live[index % len(live)] for index, unit in enumerate(units)}


def _spread(problem: Problem, rerouted: Mapping[int, list[Unit]], lost: Sequence[int]) -> dict[Unit, Worker]:
    """Each to the peer whose pipeline runs the fewest of others so far, at whatever stage, where that peer has time.

    Pipelines with dead workers of their own come last: their micro-batches wait for peers, and their workers had better
    have time to spare.

    A peer has time for more than its share where the bound is set by another stage. The stages with the least to spare
    choose first.
    """
    bound = lower_bound(problem)
    rerouted_to = [gone * count for gone, count in zip(lost, problem.grid.microbatches, strict=True)]
    hosts: dict[Unit, Worker] = {}
    for stage in sorted(rerouted, key=lambda stage: -window_bound(problem, problem.column_of[stage])):
        price = _prices(problem, stage)
        least = window_bound(problem, problem.column_of[stage])
        loads = {host: price[host] * problem.grid.microbatches[host] for host in price}
        busiest = -(-(sum(loads.values()) + len(rerouted[stage]) * max(price.values())) // len(price))
        room = max(bound - least, 0) + busiest
        for unit in rerouted[stage]:
            host = min(price, key=lambda host: (loads[host] + price[host] > room, rerouted_to[host], loads[host], host))
            hosts[unit] = problem.worker(stage, host)
            loads[host] += price[host]
            rerouted_to[host] += 1
    return hosts


def _lost(problem: Problem) -> list[int]:
    """How many workers each pipeline has lost."""
    here = Counter(pipeline for live in problem.live_by_column for pipeline in live)
    return [problem.grid.columns - here[pipeline] for pipeline in range(problem.grid.pipelines)]


def _prices(problem: Problem, stage: int) -> dict[int, int]:
    """What a micro-batch takes on each pipeline's worker of a stage, in ticks."""
    return {host.pipeline: sum(problem.cost(kind, stage, host) for kind in problem.kinds)
            for host in problem.holders[stage]}


def _least_loaded(problem: Problem, stage: int, units: list[Unit], lost: Sequence[int]) -> dict[Unit, Worker]:
    """Each to the peer that would be done first with all its work; of equal peers, to one whose pipeline is whole."""
    price = _prices(problem, stage)
    live = sorted(price, key=lambda host: (lost[host], host))
    loads = [(price[host] * (problem.grid.microbatches[host] + 1), index, host) for index, host in enumerate(live)]
    heapq.heapify(loads)
    hosts = {}
    for unit in units:
        load, order, host = heapq.heappop(loads)
        hosts[unit] = problem.worker(stage, host)
        heapq.heappush(loads, (load + price[host], order + len(live), host))
    return hosts
