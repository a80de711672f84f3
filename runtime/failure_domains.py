"""Failure domains: which workers share a machine, and so fail together.

The job file says so (`[topology]`), on several machines or to rehearse their failures on one. Else the launchers do:
the nodes of a machine are neighbours, and each node has its share of the workers. Workers that keep parts of each
other's states know the same (`runtime.protocol.setup.Setup.failure_domains`).
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from slipstream.runtime.replay.placement import PlacementError, assign_to_nodes
from slipstream.schedules.schedule import Grid, Worker

Domains = tuple[tuple[Worker, ...], ...]
"""The workers of each domain, ascending; each worker of the job once."""


class FailureDomains:
    """Those of one run, numbered from 0: with `[topology]`, as that has them. A worker in none fails by itself."""

    def __init__(self, domains: Iterable[Iterable[Worker]]) -> None:
        self.domains: Domains = tuple(tuple(sorted(one)) for one in domains)
        self._number = {worker: number for number, workers in enumerate(self.domains) for worker in workers}

    def number(self, worker: Worker) -> int | None:
        """The domain of a worker."""
        return self._number.get(worker)

    def together(self, worker: Worker) -> tuple[Worker, ...]:
        """All workers that fail together with a worker: itself, and those that share its machine."""
        number = self._number.get(worker)
        return (worker,) if number is None else self.domains[number]


ALONE = FailureDomains(())
"""Where each worker fails by itself."""


def shares_of_nodes(live: Sequence[Worker], nodes: int, topology: Sequence[Collection[Worker]]) -> list[list[Worker]]:
    """The live workers of each node: those of one machine are neighbours, by `topology` where it is given."""
    if not topology or nodes == 1:
        return assign_to_nodes(live, nodes)
    if len(topology) == nodes:
        return [[worker for worker in live if worker in machine] for machine in topology]
    place = {worker: place for place, worker in enumerate(chain(*topology))}
    return assign_to_nodes(sorted(live, key=lambda worker: place.get(worker, 0)), nodes)


def find_domains(grid: Grid, shares: Sequence[Sequence[Worker]], beside: int,
                 topology: Sequence[Collection[Worker]]) -> FailureDomains:
    """The failure domains of a job's workers: by `topology`, or by the workers of each node, `shares`.

    `beside` is how many nodes share the machine of node 0; the others are taken to have as many. Workers that are not
    there from the start would be started on node 0. Raises PlacementError where `topology` is not that of the job.
    """
    if not topology:
        there = {worker for share in shares for worker in share}
        every = [[*shares[0], *(worker for worker in grid.workers() if worker not in there)], *shares[1:]]
        machines = [list(chain(*every[first:first + beside])) for first in range(0, len(every), beside)]
        return FailureDomains(filter(None, machines))
    named = [worker for machine in topology for worker in machine]
    if sorted(named) != sorted(grid.workers()):
        wrong = min(set(named) ^ set(grid.workers()), default=named[0] if named else None)
        raise PlacementError(f"the topology does not name each worker of the schedule once: see worker {wrong}")
    return FailureDomains(topology)
