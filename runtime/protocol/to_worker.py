"""Messages from the coordinator to the workers.

Each order has a number. In the generation that it starts, nothing changes: which workers take part,
in which roles, and the first iteration. The generation ends for all members with `EndOrder`, or
with the next order. Each member then reports how far it got (`Paused`), and waits for the next
order.
"""

import msgspec

from slipstream.runtime.protocol.channel import Decoder
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker
from slipstream.schedules.shares import WorkerShare


class StepFactor(msgspec.Struct, frozen=True, array_like=True):
    """Number by which the gradients of an iteration are multiplied. None: the iteration made no
    step. See `runtime.state.step_factors`."""

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
    """True if the optimizer's state is included, False for parameters alone."""


Addresses = tuple[tuple[Worker, tuple[tuple[str, int], ...]], ...]
"""Host and port at which ranks send layers, by worker and rank."""
JSON_NULL = msgspec.Raw(b"null")
MAX_STORED_CONTENTS = 64
"""Latest `ScheduleContent` messages that a worker stores, as the coordinator knows."""


class ScheduleContent(msgspec.Struct, frozen=True, tag=True):
    """Data of a schedule that a worker needs and has not received (`schedules.shares`). It is sent
    before the `AssignedShare` that refers to it by its digest."""

    digest: str
    data: msgspec.Raw


class AssignedShare(msgspec.Struct, frozen=True, tag=True):
    """Share of the order's schedule for a member, sent before the `Train` of that order. It has its
    seat, and the digests of its program and of what else it must know of the schedule."""

    order: int
    share: WorkerShare


class Train(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to run iterations by a schedule, until the last or a message.

    It is sent to all members and to all workers that want to join, when all are ready for the first
    time and whenever members change. A member has already received its work (`AssignedShare`), and
    starts a generation (`runtime.worker.generation`). Any other worker drops the layers that it has
    fetched.
    """

    order: int
    first_iteration: int
    """Number of the first iteration. All iterations before it are committed."""
    failed: tuple[Worker, ...] = ()
    """Workers of the grid that take no part. All others are members."""
    schedule: msgspec.Raw = JSON_NULL
    """Whole schedule in JSON, in runs whose workers deal samples or evaluate by it. Or null."""
    moves: tuple[LayerMove, ...] = ()
    """Transfers of parts of layers made before the first op, while all members wait."""
    cut_for: tuple[tuple[LayerRange, tuple[Worker, ...]], ...] = ()
    """Ranges that keep their partition without some members, with those it was made for."""
    addresses: Addresses = ()
    """Addresses from which the sources of `moves` send layers."""
    fetch: int = 0
    """Number of the `Fetch` that has brought layers to the members that need them. 0: none."""
    factor: StepFactor | None = None
    """Gradient factor of the last committed iteration, for workers that do not know it."""
    restore: tuple[tuple[Worker, tuple[int, ...]], ...] | None = None
    """Layers that each member reads when the run returns to a checkpoint. None: it does not.

    All members first drop all layers. They read these from the checkpoint of `first_iteration`, or
    build them as they were before the run began.
    """
    trusted_from: int = 0
    """Last order, or 0, in which the run went back because copies differed. What a worker holds
    that has followed no order since is wrong, perhaps without its knowledge."""

    @property
    def has_schedule(self) -> bool:
        """True if the message contains the whole schedule."""
        return bytes(self.schedule) != bytes(JSON_NULL)


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to write layers and to report the digests of all parameters. It is sent to the members
    when all iterations are committed, or when the run or some members end early."""

    order: int
    first_iteration: int
    """Number of the last iteration plus one."""
    writers: tuple[tuple[int, Worker], ...]
    """Pairs of a layer of the model and the worker that writes its file."""
    parameters: bool = True
    """True to write final parameters, False for a checkpoint only."""
    factor: StepFactor | None = None
    moves: tuple[LayerMove, ...] = ()
    """Transfers to the writers of the elements of their layers that they lack."""
    addresses: Addresses = ()
    """Addresses from which the sources of `moves` send layers."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Message that all members hold the same final state, so that drafts may be published."""

    order: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Message that the run is over or continues without this worker: the worker ends."""


class EndOrder(msgspec.Struct, frozen=True, tag=True):
    """Message that ends an order's generation: break all connections, and send `Paused`. A member
    is lost or has stopped with an error, or copies of state differ."""

    order: int
    doubted: bool = False
    """True if copies differ, so that the run must go back. It is sent once more if that was found
    after the order's end."""


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """Answer to `IterationReport`: begin the next iteration, or `stop` before it, as all will."""

    order: int
    iteration: int
    stop: bool = False
    save: bool = False
    """True to save layers for a checkpoint of the state before the next iteration."""
    committed: tuple[int, float | None] | None = None
    """Last committed iteration, and its loss if finite, for which a later coordinator may ask."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request to fetch layers for the next order while training continues.

    It is sent to all members and to all workers that want to join; the targets of the moves fetch,
    and keep the layers up to date. It replaces any earlier fetch of the same order. The next order
    uses the layers or drops them.
    """

    number: int
    order: int
    """Number of the order by which members train while layers are fetched."""
    moves: tuple[LayerMove, ...] = ()
    addresses: Addresses = ()
    """Addresses from which the sources of `moves` send layers."""


class ReportStatus(msgspec.Struct, frozen=True, tag=True):
    """Request for the present activity (`WorkerStatus`), when nothing was committed for long."""


class ReportCheckpoints(msgspec.Struct, frozen=True, tag=True):
    """Request for the readable checkpoints (`ReadableCheckpoints`), when layers are lost."""


Order = Train | Finish
ToWorker = (WorkerSetup | ScheduleContent | AssignedShare | Train | Finish | Publish
            | Leave | EndOrder | Acknowledged | Fetch
            | ReportStatus
            | ReportCheckpoints)

decode: Decoder[ToWorker] = Decoder(ToWorker)
