"""What workers and launchers tell the launcher of node 0, through a queue of the store, as JSON."""

from typing import Literal

import msgspec
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from runtime.rendezvous import RendezvousError, pop
from schedules.schedule import Worker
from schedules.trace import MeasuredOp

QUEUE = "reports"


class Joined(msgspec.Struct, frozen=True, tag=True):
    """A worker has its stages and has met the others."""

    worker: Worker
    corpus: str
    """Digest of the text it will read."""


class Ran(msgspec.Struct, frozen=True, tag=True):
    """A worker has stepped its optimizer."""

    worker: Worker
    iteration: int
    loss: float | None
    """Its part of the mean loss; None when that is not finite, which JSON cannot say."""
    window_seconds: float
    """From the start of its first op to the end of its O."""
    ops: tuple[MeasuredOp, ...] = ()
    """When its ops ran, on the shared clock, in the iterations that are traced."""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """A worker has run all iterations and written what it had to write."""

    worker: Worker
    digests: dict[str, str]
    """Of each of its parameters, by name."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker gives up: through an error of its own, or because it lost a peer."""

    worker: Worker
    cause: Literal["error", "lost"]
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker's process is gone: `status` as in subprocess, the exit code or minus the signal."""

    worker: Worker
    status: int


class Left(msgspec.Struct, frozen=True, tag=True):
    """A launcher of another node has seen the end of the run."""

    node: int


Report = Joined | Ran | Finished | Failed | Ended | Left


def push(store: TCPStore, report: Report) -> None:
    """Tell. Raises RendezvousError when node 0 is gone."""
    try:
        store.queue_push(QUEUE, msgspec.json.encode(report).decode())
    except DistError as error:
        raise RendezvousError(f"node 0 is gone: {str(error).splitlines()[0]}") from None


def next_report(store: TCPStore) -> Report | None:
    """The next thing told, None when there is nothing."""
    message = pop(store, QUEUE)
    return None if message is None else msgspec.json.decode(message, type=Report)
