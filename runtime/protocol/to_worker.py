"""What the coordinator says to the workers.

Orders are numbered. Between two of them nothing changes: who takes part, who plays which role, where the iterations
begin. An order ends for all with `EndOrder`, or with the next one; then each member says how far it got (`Paused`), and
waits for the next order.
"""

import msgspec

from runtime.protocol.channel import Decoder
from runtime.protocol.setup import Setup
from schedules.schedule import Worker


class Factor(msgspec.Struct, frozen=True, array_like=True):
    """What the gradients of an iteration are multiplied by; None: it made no step. See `runtime.model.clipping`."""

    iteration: int
    factor: float | None


class Move(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A layer, with its optimizer's state, that `target` lacks and gets from `source`."""

    target: Worker
    source: Worker
    layer: int


class Train(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An order: run iterations by a schedule, until the last one or until told otherwise.

    Sent to all workers that are ready, when the first members have come together and whenever members change. Members
    start a generation (`runtime.worker.generation`); whoever is not in the schedule drops what it fetched before.
    """

    number: int
    first_iteration: int
    """The iterations before it are committed."""
    schedule: msgspec.Raw
    moves: tuple[Move, ...] = ()
    """Made before the first op, while all wait."""
    addresses: tuple[tuple[Worker, tuple[str, int]], ...] = ()
    """Where each of their sources listens (`runtime.worker.layer_sender`)."""
    fetch: int = 0
    """The `Fetch` that gave those who need them their layers before; 0: none."""
    factor: Factor | None = None
    """Of the last committed iteration, for those who did not hear of it."""


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An order, sent when all iterations are committed: write layers, and tell the digests of all parameters."""

    number: int
    first_iteration: int
    """One after the last."""
    writers: tuple[tuple[int, Worker], ...]
    """Who writes each layer."""
    factor: Factor | None = None


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Sent when the run is over: the worker ends."""


class EndOrder(msgspec.Struct, frozen=True, tag=True):
    """Sent when a member was lost or has stopped for a reason of its own: break all connections, and say `Paused`."""

    order: int


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Ran`, which has arrived: begin the next iteration, or stop before it, as all members will."""

    order: int
    iteration: int
    stop: bool = False


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """For some, while all train: get layers for the next order, and keep them up to date.

    Sent to all workers that are ready, when somebody wants to come in. It ends those given during the same order, and
    ends itself with the next order, whether that takes it up or not.
    """

    number: int
    order: int
    """The one that is being followed."""
    moves: tuple[Move, ...] = ()
    needs: tuple[tuple[Worker, tuple[int, ...]], ...] = ()
    """The stages that are new to each target."""
    addresses: tuple[tuple[Worker, tuple[str, int]], ...] = ()
    """Where each source listens (`runtime.worker.layer_sender`)."""


Order = Train | Finish
ToWorker = Setup | Train | Finish | Leave | EndOrder | Acknowledged | Fetch

decode: Decoder[ToWorker] = Decoder(ToWorker)
