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
    """Return the worker of a process from the name of the process, such as `1.2:0`."""
    return Worker.parse(process.partition(":")[0])


@dataclass(frozen=True, slots=True)
class GroupConnection:
    """Connection between the processes of one worker during one generation."""

    backend: Any
    """Backend of torch.distributed for these ranks, to which calls are passed on."""
    guard: Callable[[str], AbstractContextManager[None]]
    """Function of a call's description; in its context, errors become CommunicationError."""
    device: torch.device
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
    """Members of one generation; this process belongs to the member `worker`."""

    order: int
    ranks: Mapping[Worker, int]
    """Rank of each member, from 0 upwards; equal at every member."""
    worker: Worker
    group: Ranks | None = None
    """Processes of this worker, each connected to its rank in other workers; None: only one."""

    def peer_process(self, worker: Worker) -> str:
        """Return the name of the process of `worker` that has this process's rank."""
        return f"{worker}:{0 if self.group is None else self.group.rank()}"

    def processes_of_worker(self, worker: Worker) -> tuple[str, ...]:
        """Return the names of all processes of a worker, in the order of their ranks."""
        processes = 1 if self.group is None else self.group.size()
        return tuple(f"{worker}:{rank}" for rank in range(processes))

    def all_processes(self) -> tuple[str, ...]:
        """Return the names of all members' processes, ordered by member, then by rank."""
        return tuple(
            process
            for worker in sorted(self.ranks, key=self.ranks.__getitem__)
            for process in self.processes_of_worker(worker)
        )
