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
    """The processes of this worker, where there are several; those that stand for one rank in all workers communicate.
    """
    stand_for: Mapping[Worker, int] = {}
    """For how many ranks each process stands of the workers that have lost some."""

    acts_as: int = 0
    """Which of the ranks it is that this process stands for."""

    @property
    def by_rank(self) -> list["Membership"]:
        """As each of the ranks that this process stands for."""
        return [self._replace(acts_as=rank) for rank in range(self.stands_for)]

    @property
    def stands_for(self) -> int:
        """For how many ranks this process does."""
        return 1 if self.group is None else self.group.stands_for

    def process(self, worker: Worker) -> str:
        """The name of the process of a worker with which this one communicates."""
        return f"{worker}:{self.acts_as + (0 if self.group is None else self.group.rank() * self.stands_for)}"

    def processes_of(self, worker: Worker) -> tuple[str, ...]:
        """All processes of a worker, by the first of the ranks that each stands for."""
        ranks = 1 if self.group is None else self.group.size() * self.stands_for
        each = self.stands_for if worker == self.worker else self.stand_for.get(worker, 1)
        return tuple(f"{worker}:{rank}" for rank in range(0, ranks, each))

    def processes(self) -> tuple[str, ...]:
        """Those of all members."""
        return tuple(one for worker in sorted(self.ranks, key=self.ranks.__getitem__)
                     for one in self.processes_of(worker))
