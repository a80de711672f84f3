"""Group workers that share a machine, and so fail together.

The job file may name these domains (`[topology]`), for several machines or to rehearse their
failures on one. Otherwise they follow from the launchers: nodes with neighboring numbers share a
machine, and each node has its share of the workers. Workers that own parts of each other's
optimizer state are sent the same domains (`runtime.protocol.setup.CommonSettings.failure_domains`).
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from slipstream.runtime.placement import PlacementError, assign_workers_to_nodes
from slipstream.schedules.schedule import Grid, Worker

Domains = tuple[tuple[Worker, ...], ...]
"""Workers of each domain, ascending. Each worker of the job is in at most one domain."""


class FailureDomains:
    """Failure domains of one run, numbered from 0 in the order given. A worker that is in no domain
    fails by itself."""

    def __init__(self, domains: Iterable[Iterable[Worker]]) -> None:
        self.domains: Domains = tuple(tuple(sorted(domain)) for domain in domains)
        self._domain_by_worker = {worker: number for number, workers in enumerate(self.domains) for worker in workers}

    def domain_of(self, worker: Worker) -> int | None:
        """Return the number of a worker's domain, or None if it has none."""
        return self._domain_by_worker.get(worker)

    def workers_failing_with(self, worker: Worker) -> tuple[Worker, ...]:
        """Return all workers that fail together with a worker, including that worker."""
        number = self._domain_by_worker.get(worker)
        return (worker,) if number is None else self.domains[number]


NO_SHARED_DOMAINS = FailureDomains(())
"""Failure domains of a run in which each worker fails by itself."""


def divide_workers_by_node(live: Sequence[Worker], nodes: int,
                           topology: Sequence[Collection[Worker]]) -> list[list[Worker]]:
    """Return the `live` workers of each node, in the order of the nodes' numbers.

    If `topology` names the workers of each machine and there are as many nodes, each node gets the
    workers of one machine. Otherwise each node gets consecutive workers, in the order of `topology`
    if it is given.
    """
    if not topology or nodes == 1:
        return assign_workers_to_nodes(live, nodes)
    if len(topology) == nodes:
        return [[worker for worker in live if worker in machine] for machine in topology]
    place = {worker: place for place, worker in enumerate(chain(*topology))}
    return assign_workers_to_nodes(sorted(live, key=lambda worker: place.get(worker, 0)), nodes)


def find_domains(grid: Grid, shares: Sequence[Sequence[Worker]], beside: int,
                 topology: Sequence[Collection[Worker]]) -> FailureDomains:
    """Return the domains of a job's workers: those of `topology`, else of each machine.

    Node number n has the workers `shares[n]`. Node 0's machine has `beside` nodes, including node
    0, and the other machines are assumed to have as many. A worker that is absent at the start
    counts as one of node 0's, where it would be started. Raises PlacementError if `topology` does
    not name each worker of the grid once.
    """
    if not topology:
        present = {worker for share in shares for worker in share}
        by_node = [[*shares[0], *(worker for worker in grid.workers() if worker not in present)], *shares[1:]]
        machines = [list(chain(*by_node[first:first + beside])) for first in range(0, len(by_node), beside)]
        return FailureDomains(filter(None, machines))
    named = [worker for machine in topology for worker in machine]
    if sorted(named) != sorted(grid.workers()):
        unmatched = min(set(named) ^ set(grid.workers()), default=named[0] if named else None)
        raise PlacementError(f"the topology does not name each worker of the schedule once: see worker {unmatched}")
    return FailureDomains(topology)
