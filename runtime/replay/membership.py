"""Name the workers that train together in a generation, and their processes."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker

GradientKey = LayerRange | str
"""Key of gradients that are summed: layers, or the first `LAYER.NAME` of a shared parameter."""


def worker_of_process(process: str) -> Worker:
    """Return the worker of a process, given as `Membership.peer_process` names it."""
    return Worker.parse(process.partition(":")[0])


@dataclass(frozen=True, slots=True)
class GroupConnection:
    """Connection that carries the tensors of a worker's process group during one generation."""

    backend: Any
    """Backend of torch.distributed for these ranks, to which calls are passed on."""
    guard: Callable[[str], AbstractContextManager[None]]
    """Function that returns a context for a described collective, which converts errors."""
    device: torch.device
    """Device on which this rank computes."""
    staged: bool
    """True if tensors pass through host memory."""


class Ranks(Protocol):
    """Processes of one worker, such as `runtime.ranks.worker_group.WorkerGroup`."""

    def rank(self) -> int:
        """Return the rank of this process among those of its worker."""

    def size(self) -> int:
        """Return the number of processes of the worker."""

    def connect(self, connection: GroupConnection) -> None:
        """Set the connection that carries tensors from now on."""

    def disconnect(self, connection: GroupConnection) -> None:
        """Remove a connection, unless another one has replaced it."""


class Membership(NamedTuple):
    """Members of one generation, and which of them this worker is."""

    order: int
    """Number of the order that started the generation."""
    ranks: Mapping[Worker, int]
    """Rank of each member, from 0 upwards; equal at every member."""
    worker: Worker
    group: Ranks | None = None
    """Processes of this worker if it has several, each of which meets its rank in other workers."""

    def peer_process(self, worker: Worker) -> str:
        """Return the name of a worker's process of this one's rank."""
        return f"{worker}:{0 if self.group is None else self.group.rank()}"

    def processes_of_worker(self, worker: Worker) -> tuple[str, ...]:
        """Return the names of all processes of a worker, by rank."""
        return tuple(f"{worker}:{rank}" for rank in range(1 if self.group is None else self.group.size()))

    def all_processes(self) -> tuple[str, ...]:
        """Return the names of all members' processes, by members' and then processes' ranks."""
        return tuple(process for worker in sorted(self.ranks, key=self.ranks.__getitem__)
                     for process in self.processes_of_worker(worker))
