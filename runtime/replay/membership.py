"""Membership: the workers that train together in a generation, and the names of their processes."""

from collections.abc import Mapping
from typing import NamedTuple

from slipstream.runtime.ranks.worker_group import WorkerGroup
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker

GradientKey = LayerRange | str
"""Key of gradients that are summed: a range of layers, or `LAYER.NAME` of a parameter that layers share.

That is the name in the first of these layers.
"""


def worker_of_process(process: str) -> Worker:
    """Return the worker of a process, given as `Membership.peer_process` names it."""
    return Worker.parse(process.partition(":")[0])


class Membership(NamedTuple):
    """Members of one generation, and which of them this worker is."""

    order: int
    """Number of the order that started the generation."""
    ranks: Mapping[Worker, int]
    """Rank of each member, from 0 upwards; equal at every member."""
    worker: Worker
    group: WorkerGroup | None = None
    """Processes of this worker if it has several. Processes of the same rank in all workers communicate with each
    other."""

    def peer_process(self, worker: Worker) -> str:
        """Return the name of the process of a worker with which this process communicates: that of the same rank."""
        return f"{worker}:{0 if self.group is None else self.group.rank()}"

    def processes_of_worker(self, worker: Worker) -> tuple[str, ...]:
        """Return the names of all processes of a worker, by rank."""
        return tuple(f"{worker}:{rank}" for rank in range(1 if self.group is None else self.group.size()))

    def all_processes(self) -> tuple[str, ...]:
        """Return the names of the processes of all members, by the members' ranks and then by the processes' ranks."""
        return tuple(process for worker in sorted(self.ranks, key=self.ranks.__getitem__)
                     for process in self.processes_of_worker(worker))
