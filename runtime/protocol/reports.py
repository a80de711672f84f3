"""What workers and launchers tell the launcher of node 0, through a queue of the store, as JSON."""

import msgspec
from torch._C._distributed_c10d import TCPStore

from runtime.protocol.orders import Factor
from runtime.protocol.rendezvous import asking_node_0, pop
from schedules.measured_trace import MeasuredOp
from schedules.schedule import Worker

QUEUE = "reports"


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker has its layers, its heart beats, and it waits for an order."""

    worker: Worker
    corpus: str
    """Digest of the text it will read."""
    address: tuple[str, int]
    """Where others may get layers from it."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """A worker has met the others, has its layers, and begins its first op."""

    worker: Worker
    order: int


class Ran(msgspec.Struct, frozen=True, tag=True):
    """A worker has stepped its optimizer."""

    worker: Worker
    order: int
    iteration: int
    loss: float | None
    """Its part of the mean loss; None when that is not finite, which JSON cannot say."""
    window_seconds: float
    """From the start of its first op to the end of its O."""
    ops: tuple[MeasuredOp, ...] = ()
    """When its ops ran, on the shared clock, in the iterations that are traced."""


class Settled(msgspec.Struct, frozen=True, tag=True):
    """Where steps depend on all gradients: how the step of an iteration was made by all."""

    order: int
    factor: Factor


class Paused(msgspec.Struct, frozen=True, tag=True):
    """A worker has stopped: as it was told to, or because it lost a peer."""

    worker: Worker
    order: int
    stages: tuple[int, ...]
    """Those whose layers it holds."""
    settled: Factor | None
    """Of the last iteration of which it knows."""
    reason: str | None
    """What it ran into; None when it stopped as told."""


class Followed(msgspec.Struct, frozen=True, tag=True):
    """A worker has the layers of a fetch, and keeps up with their sources."""

    worker: Worker
    fetch: int


class Unfollowed(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot get the layers of a fetch."""

    worker: Worker
    fetch: int


class Finished(msgspec.Struct, frozen=True, tag=True):
    """All iterations are committed, and a worker has written what it had to write."""

    worker: Worker
    order: int
    digests: dict[str, str]
    """Of each of its parameters, by name."""


class Note(msgspec.Struct, frozen=True, tag=True):
    """Something that people should know, and that training survives."""

    worker: Worker
    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker gives up through an error of its own, and ends."""

    worker: Worker
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker's process is gone: `status` as in subprocess, the exit code or minus the signal."""

    worker: Worker
    status: int


class Left(msgspec.Struct, frozen=True, tag=True):
    """A launcher of another node has seen the end of the run."""

    node: int


Report = Ready | Started | Ran | Settled | Paused | Followed | Unfollowed | Finished | Note | Failed | Ended | Left


def push(store: TCPStore, report: Report) -> None:
    """Tell. Raises RendezvousError when node 0 is gone."""
    with asking_node_0():
        store.queue_push(QUEUE, msgspec.json.encode(report).decode())


def next_report(store: TCPStore) -> Report | None:
    """The next thing told, None when there is nothing."""
    message = pop(store, QUEUE)
    return None if message is None else msgspec.json.decode(message, type=Report)
