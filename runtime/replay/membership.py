"""Membership: who trains together until somebody is lost or joins, and what each process is among them."""

from collections.abc import Mapping
from typing import NamedTuple

from slipstream.runtime.model.layers.worker_group import WorkerGroup
from slipstream.schedules.schedule import Worker


class Membership(NamedTuple):
    """This worker, among those that train together until one is lost or joins."""

    generation: int
    """A number that no other membership of the run has."""
    ranks: Mapping[Worker, int]
    """Of every member, 0 upwards, the same at every member."""
    worker: Worker
    group: WorkerGroup | None = None
    """The processes of this worker, where there are several; those that stand for one rank in all workers communicate.
    """
    stand_for: Mapping[Worker, int] = {}
    """For how many ranks each process stands of the workers that have lost some."""

    @property
    def stands_for(self) -> int:
        """For how many ranks this process does."""
        return 1 if self.group is None else self.group.stands_for

    @property
    def place_of_all(self) -> tuple[int, int]:
        """The place of this process among all processes, and how many there are."""
        index, ranks = (0, 1) if self.group is None else (self.group.rank(), self.group.size() * self.stands_for)
        counts = {worker: ranks // self.stand_for.get(worker, 1) for worker in self.ranks}
        before = sum(count for worker, count in counts.items() if self.ranks[worker] < self.ranks[self.worker])
        return before + index, sum(counts.values())
