"""Membership: who trains together until somebody is lost or joins, and what each process is among them."""

from collections.abc import Mapping
from typing import NamedTuple

from slipstream.runtime.model.layers.worker_group import WorkerGroup
from slipstream.schedules.schedule import Worker


class Membership(NamedTuple):
    """This worker, among those that train together until one is lost or joins."""

    order: int
    """Its number."""
    ranks: Mapping[Worker, int]
    """Of every member, 0 upwards, the same at every member."""
    worker: Worker
    group: WorkerGroup | None = None
    """The processes of this worker, where there are several; those of the same rank in all workers communicate."""

    def process(self, worker: Worker) -> str:
        """The name of the process of a worker with which this one communicates."""
        return f"{worker}:{0 if self.group is None else self.group.rank()}"

    def processes_of(self, worker: Worker) -> tuple[str, ...]:
        """All processes of a worker, by rank."""
        return tuple(f"{worker}:{rank}" for rank in range(1 if self.group is None else self.group.size()))

    def processes(self) -> tuple[str, ...]:
        """Those of all members."""
        return tuple(one for worker in sorted(self.ranks, key=self.ranks.__getitem__)
                     for one in self.processes_of(worker))
