"""Messages from the coordinator to the workers.

Each order has a number. An order to train starts a generation, which has fixed workers, fixed
roles, and a fixed first iteration. A generation ends for all members with `EndOrder` or the next
order. Each member then reports how far it got (`Paused`), and waits for the next order.
"""

import msgspec

from slipstream.runtime.protocol.channel import Decoder
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker
from slipstream.schedules.shares import WorkerShare


class StepFactor(msgspec.Struct, frozen=True, array_like=True):
    """Step factor of an iteration (`runtime.state.step_factors`); None: its step is skipped."""

    iteration: int
    factor: float | None


class LayerMove(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Transfer of a layer's elements [start, stop) to a worker that lacks them."""

    target: Worker
    source: Worker
    layer: int
    start: int
    stop: int
    state: bool = True
    """True if the optimizer state is sent with the parameters, False for parameters alone."""


Addresses = tuple[tuple[Worker, tuple[tuple[str, int], ...]], ...]
"""Host and port at which each rank of a worker sends layers, by worker."""
JSON_NULL = msgspec.Raw(b"null")
# The coordinator counts on it, and sends older content again.
MAX_STORED_CONTENTS = 64
"""How many of the latest `ScheduleContent` messages a worker stores."""


class ScheduleContent(msgspec.Struct, frozen=True, tag=True):
    """Content of a schedule (`schedules.shares`), sent before any `AssignedShare` that needs it."""

    digest: str
    data: msgspec.Raw


class AssignedShare(msgspec.Struct, frozen=True, tag=True):
    """A member's share of the order's schedule, sent before the order's `Train`."""

    order: int
    share: WorkerShare


class Train(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to run iterations by a schedule; it holds until another message ends it.

    All members get the order, and all workers that want to join. A member already has its work
    (`AssignedShare`), and starts a generation (`runtime.worker.generation`). Any other worker drops
    the layers that it has fetched.
    """

    order: int
    first_iteration: int
    """First iteration to run. All iterations before it are committed."""
    failed: tuple[Worker, ...] = ()
    """Workers of the grid that take no part. All others are members."""
    schedule: msgspec.Raw = JSON_NULL
    """Whole schedule in JSON, if workers deal samples or evaluate by it; else null."""
    moves: tuple[LayerMove, ...] = ()
    """Transfers of parts of layers, made before the first op while all members wait."""
    cut_for: tuple[tuple[LayerRange, tuple[Worker, ...]], ...] = ()
    """Layer ranges that keep an older partition, each with the members it was made for."""
    addresses: Addresses = ()
    """Addresses from which the sources of `moves` send layers."""
    fetch: int = 0
    """Number of the `Fetch` that has brought layers to the members that need them. 0: none."""
    factor: StepFactor | None = None
    """Step factor of the last committed iteration, for workers that lack it; None: unknown."""
    restore: tuple[tuple[Worker, tuple[int, ...]], ...] | None = None
    """Layers that each member reads when the run returns to a checkpoint. None: it does not return.

    All members first drop all layers. Each then reads its layers from the checkpoint of
    `first_iteration`, or builds them as they were before the run began.
    """
    trusted_from: int = 0
    """Order by which the run last went back because of a doubt, or 0.

    State from before that order may be wrong.
    """

    @property
    def has_schedule(self) -> bool:
        """True if the message contains the whole schedule."""
        return bytes(self.schedule) != bytes(JSON_NULL)


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to write layers to files, and to report the digests of all parameters."""

    order: int
    first_iteration: int
    """Number of the last iteration plus one."""
    writers: tuple[tuple[int, Worker], ...]
    """Pairs of a layer of the model and the worker that writes its file."""
    parameters: bool = True
    """True to write final parameters, False for a checkpoint only."""
    factor: StepFactor | None = None
    moves: tuple[LayerMove, ...] = ()
    """Transfers to writers of those elements of their layers that they lack."""
    addresses: Addresses = ()
    """Addresses from which the sources of `moves` send layers."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Message that all members hold the same final state: each now publishes its drafts."""

    order: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Message that the run is over or continues without this worker: the worker ends."""


class EndOrder(msgspec.Struct, frozen=True, tag=True):
    """Message that ends an order's generation: break all connections, and send `Paused`."""

    order: int
    doubted: bool = False
    """True if the members' state cannot be trusted, so that the run must go back.

    Copies differ, or a loss was not finite again although copies are equal.
    """


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """Answer to `IterationReport`: begin the next iteration, or, if `stop`, stop before it."""

    order: int
    iteration: int
    stop: bool = False
    """True for all members if the generation ends before the next iteration."""
    save: bool = False
    """True to save layers for a checkpoint of the state before the next iteration."""
    committed: tuple[int, float | None] | None = None
    """Last committed iteration, and its loss if finite, for a later coordinator; None: none yet."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request to fetch layers for the next order while training continues.

    All members get the request, and all workers that want to join. The targets of the moves fetch
    the layers, and keep them up to date, until the next order uses or drops them. A fetch replaces
    any earlier one of the same order.
    """

    number: int
    order: int
    """Number of the order by which members train while layers are fetched."""
    moves: tuple[LayerMove, ...] = ()
    addresses: Addresses = ()
    """Addresses from which the sources of `moves` send layers."""


class ReportStatus(msgspec.Struct, frozen=True, tag=True):
    """Request for what a worker is doing (`WorkerStatus`), when nothing was committed for long."""


class ReportCheckpoints(msgspec.Struct, frozen=True, tag=True):
    """Request for the checkpoints that a worker can read (`ReadableCheckpoints`)."""


Order = Train | Finish
ToWorker = (
    WorkerSetup
    | ScheduleContent
    | AssignedShare
    | Train
    | Finish
    | Publish
    | Leave
    | EndOrder
    | Acknowledged
    | Fetch
    | ReportStatus
    | ReportCheckpoints
)

decode: Decoder[ToWorker] = Decoder(ToWorker)
