"""Group workers that share a machine, and so fail together.

The job file may name these failure domains (`[topology]`), for several machines or to rehearse
their failures on one. Otherwise the domains follow from the launchers: nodes with neighboring
numbers share a machine, and each node has its share of the workers. All workers are sent the same
domains (`runtime.protocol.setup.CommonSettings.failure_domains`), and choose buddies by them.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from slipstream.runtime.placement import PlacementError, assign_workers_to_nodes
from slipstream.schedules.schedule import Grid, Worker

Domains = tuple[tuple[Worker, ...], ...]
"""Workers of each failure domain, ascending; no worker is in two domains."""


class FailureDomains:
    """Failure domains of one run, numbered from 0 in the order given.

    A worker that is in no domain fails by itself.
    """

    def __init__(self, domains: Iterable[Iterable[Worker]]) -> None:
        self.domains: Domains = tuple(map(tuple, map(sorted, domains)))
        self._number_of = {
            worker: number for number, workers in enumerate(self.domains) for worker in workers
        }

    def domain_of(self, worker: Worker) -> int | None:
        """Return the number of a worker's failure domain; None if the worker is in none."""
        return self._number_of.get(worker)

    def workers_failing_with(self, worker: Worker) -> tuple[Worker, ...]:
        """Return all workers in the failure domain of a worker, including that worker."""
        number = self._number_of.get(worker)
        return (worker,) if number is None else self.domains[number]


NO_SHARED_DOMAINS = FailureDomains(())
"""Failure domains of a run in which each worker fails by itself."""


def divide_workers_by_node(
    live: Sequence[Worker], nodes: int, topology: Sequence[Collection[Worker]]
) -> list[list[Worker]]:
    """Return the `live` workers of each node, in the order of the nodes' numbers.

    If `topology` names the workers of as many machines as there are nodes, each node gets the
    workers of one machine. Otherwise each node gets consecutive workers, in the order of `topology`
    if one is given.
    """
    if not topology or nodes == 1:
        return assign_workers_to_nodes(live, nodes)
    # Several nodes on a machine, or several machines of one node: workers that the topology puts
    # side by side should still be started together.
    place_of = {worker: place for place, worker in enumerate(chain(*topology))}
    if len(topology) != nodes:
        ordered = sorted(live, key=lambda worker: place_of.get(worker, 0))
        return assign_workers_to_nodes(ordered, nodes)
    shares = list[list[Worker]]()
    for machine in topology:
        shares.append([worker for worker in live if worker in machine])
    return shares


def find_domains(
    grid: Grid,
    shares: Sequence[Sequence[Worker]],
    beside: int,
    topology: Sequence[Collection[Worker]],
) -> FailureDomains:
    """Return a job's failure domains: those of `topology`, else one for each machine.

    Node n has the workers `shares[n]`. Without a topology, each `beside` consecutive nodes count as
    one machine, because that many nodes run on the machine of node 0. A worker in no share belongs
    to node 0, which would start it. Raises PlacementError if `topology` does not name each worker
    of the grid once.
    """
    if not topology:
        # Workers that are down belong to a domain, too: they may return.
        present = {worker for share in shares for worker in share}
        absent = [worker for worker in grid.workers() if worker not in present]
        by_node = [[*shares[0], *absent], *shares[1:]]
        machines = [
            list(chain(*by_node[first : first + beside]))
            for first in range(0, len(by_node), beside)
        ]
        return FailureDomains(filter(None, machines))
    workers = [worker for machine in topology for worker in machine]
    if sorted(workers) != sorted(grid.workers()):
        # Without a missing or unknown worker, one is named twice.
        unmatched = set(workers) ^ set(grid.workers())
        example = min(unmatched, default=workers[0] if workers else None)
        raise PlacementError(
            f"the topology does not name each worker of the schedule once: see worker {example}"
        )
    return FailureDomains(topology)
