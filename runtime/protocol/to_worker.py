"""Messages from the coordinator to the workers.

Orders are numbered. Within one, nothing changes: which workers take part, in which roles, and where the iterations
begin. An order ends for all with `EndOrder`, or with the next one; then each member says how far it got (`Paused`), and
waits for the next order.
"""

import msgspec

from slipstream.runtime.protocol.channel import Decoder
from slipstream.runtime.protocol.setup import Setup
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.parts import Share
from slipstream.schedules.schedule import Worker


class Factor(msgspec.Struct, frozen=True, array_like=True):
    """What the gradients of an iteration are multiplied by; None: it made no step. See
    `runtime.model.state.clipping`."""

    iteration: int
    factor: float | None


class Move(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Elements [start, stop) of a layer that `target` lacks and gets from `source`."""

    target: Worker
    source: Worker
    layer: int
    start: int
    stop: int
    state: bool = True
    """With the optimizer's state, else parameters alone."""


Addresses = tuple[tuple[Worker, tuple[tuple[str, int], ...]], ...]
"""Where each rank of some workers listens (`runtime.worker.layer_sender`)."""
NOTHING = msgspec.Raw(b"null")
KEPT_CONTENTS = 64
"""A worker keeps so many contents, the last ones to come; its coordinator knows which these are."""


class Content(msgspec.Struct, frozen=True, tag=True):
    """What a worker must know of a schedule, and does not yet (`schedules.parts`). Sent before the `Assigned` that
    names it."""

    digest: str
    data: msgspec.Raw


class Assigned(msgspec.Struct, frozen=True, tag=True):
    """What a member does in an order. Sent before its `Train`."""

    order: int
    share: Share


class Train(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An order: run iterations by a schedule, until the last one or until told otherwise.

    Sent to all members and all workers that want to join, when all are ready for the first time and whenever members
    change. Members have been sent what they do in it (`Assigned`), and start a generation
    (`runtime.worker.generation`); another worker drops what it has fetched.
    """

    order: int
    first_iteration: int
    """The iterations before it are committed."""
    failed: tuple[Worker, ...] = ()
    """The workers of the grid that take no part; all others do."""
    schedule: msgspec.Raw = NOTHING
    """The whole schedule, in runs that deal or evaluate data by it; else null."""
    moves: tuple[Move, ...] = ()
    """Made before the first op, while all wait."""
    cut_for: tuple[tuple[LayerRange, tuple[Worker, ...]], ...] = ()
    """The ranges whose parts stay as they are, as some have gone who keep them: with those by whom they are cut
    (`runtime.model.state.parts.Cut.left`)."""
    addresses: Addresses = ()
    """Of their sources."""
    fetch: int = 0
    """The `Fetch` that gave those who need them their layers before; 0: none."""
    factor: Factor | None = None
    """Of the last committed iteration, for workers that do not know it."""
    restore: tuple[tuple[Worker, tuple[int, ...]], ...] | None = None
    """Where layers were lost, and the run goes back: drop all layers, and read these, of each member that can read
    them, from the checkpoint of `first_iteration`, or build them as they were before the run began."""

    @property
    def has_schedule(self) -> bool:
        """Whether there is a whole schedule."""
        return bytes(self.schedule) != bytes(NOTHING)


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An order, sent when all iterations are committed: write layers, and report the digests of all parameters."""

    order: int
    first_iteration: int
    """One after the last."""
    writers: tuple[tuple[int, Worker], ...]
    """Each layer, and the worker that writes it."""
    parameters: bool = True
    """Whether to write the final parameters; else a checkpoint only, as where the run ends early."""
    factor: Factor | None = None
    moves: tuple[Move, ...] = ()
    """What the writers lack."""
    addresses: Addresses = ()
    """Of their sources."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Sent when the run is over: the worker ends."""


class EndOrder(msgspec.Struct, frozen=True, tag=True):
    """Sent when a member is lost or has stopped with an error: break all connections, and send `Paused`."""

    order: int
    doubted: bool = False
    """Whether copies of what members hold differ, so that the run is to go back. Sent once more where the order has
    ended before that was found."""


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Ran`, which has arrived: begin the next iteration, or stop before it, as all members will."""

    order: int
    iteration: int
    stop: bool = False
    save: bool = False
    """Save a checkpoint of the state before the next iteration."""
    committed: tuple[int, float | None] | None = None
    """The last committed iteration and its loss, where that is finite: whoever leads the run next may ask for it."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """While training goes on: get layers for the next order, and keep them up to date.

    Sent to all members and all workers that want to join; the targets of the moves fetch. It replaces any earlier fetch
    of the same order. The next order uses it or drops it.
    """

    number: int
    order: int
    """The one that is being followed."""
    moves: tuple[Move, ...] = ()
    addresses: Addresses = ()
    """Of their sources."""


class ReportStatus(msgspec.Struct, frozen=True, tag=True):
    """Sent when nothing has been committed for long: say what you do (`Status`)."""


class ReportCheckpoints(msgspec.Struct, frozen=True, tag=True):
    """Sent when nobody holds some layer any more: say which checkpoints you can read (`Checkpoints`)."""


Order = Train | Finish
ToWorker = (Setup | Content | Assigned | Train | Finish | Leave | EndOrder | Acknowledged | Fetch | ReportStatus
            | ReportCheckpoints)

decode: Decoder[ToWorker] = Decoder(ToWorker)
