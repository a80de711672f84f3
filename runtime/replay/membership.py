"""Membership: the workers that train together in a generation, and the names of their processes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slipstream.runtime.model.layers.sharing import Sharing
from slipstream.runtime.model.layers.worker_group import WorkerGroup
from slipstream.runtime.placement import Placement
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.worker_programs import WorkerSchedule

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


def find_sharers(placement: Placement, schedule: Schedule, worker: Worker,
                 sharing: Sharing) -> dict[GradientKey, Sequence[Worker]]:
    """Return, for each sum of gradients that a worker takes part in, all workers that take part.

    Keys are ranges of layers (`Placement.reductions_of`), and the first of each group of parameters that layers share.
    """
    sharers_of: dict[GradientKey, Sequence[Worker]] = {}
    for layers, workers in placement.reductions_of(schedule, worker).items():
        sharers_of[layers] = workers
    layers_of_groups = [{place.layer for place in group} for group in sharing.groups]
    ties = dict(schedule.ties) if isinstance(schedule, WorkerSchedule) else dict(
        enumerate(placement.holders_of_groups(schedule, layers_of_groups)))
    for number, members in ties.items():
        if worker in members:
            sharers_of[str(sharing.groups[number][0])] = members
    return sharers_of
