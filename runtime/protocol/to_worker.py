"""Messages from the coordinator to the workers.

Each order has a number. In the generation that it starts, nothing changes: which workers take part, in which roles, and
the first iteration. The generation ends for all members with `EndOrder`, or with the next order. Each member then
reports how far it got (`Paused`), and waits for the next order.
"""

import msgspec

from slipstream.runtime.protocol.channel import Decoder
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker
from slipstream.schedules.shares import WorkerShare


class StepFactor(msgspec.Struct, frozen=True, array_like=True):
    """Number by which the gradients of an iteration are multiplied. None: the iteration made no step. See
    `runtime.state.step_factors`."""

    iteration: int
    factor: float | None


class LayerMove(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Transfer of the elements from `start` up to `stop` of a layer from worker `source` to worker `target`, which
    lacks them."""

    target: Worker
    source: Worker
    layer: int
    start: int
    stop: int
    state: bool = True
    """True if the optimizer's state is included, False for parameters alone."""


Addresses = tuple[tuple[Worker, tuple[tuple[str, int], ...]], ...]
"""Host and port at which each rank of some workers sends layers (`runtime.moving.layer_sender`), by worker and rank."""
JSON_NULL = msgspec.Raw(b"null")
MAX_STORED_CONTENTS = 64
"""Number of `ScheduleContent` messages that a worker stores, the latest ones. The coordinator knows which these are."""


class ScheduleContent(msgspec.Struct, frozen=True, tag=True):
    """Data of a schedule that a worker needs and has not received yet (`schedules.shares`). It is sent before
    the `AssignedShare` that refers to it by its digest."""

    digest: str
    data: msgspec.Raw


class AssignedShare(msgspec.Struct, frozen=True, tag=True):
    """Share of the order's schedule for a member: its seat, and the digests of its program and of what else it must
    know of the schedule. It is sent before the `Train` of that order."""

    order: int
    share: WorkerShare


class Train(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to run iterations by a schedule, until the last iteration or until a message stops the members.

    It is sent to all members and to all workers that want to join, when all are ready for the first time and whenever
    members change. A member has already received its work (`AssignedShare`), and starts a generation
    (`runtime.worker.generation`). Any other worker drops the layers that it has fetched.
    """

    order: int
    first_iteration: int
    """Number of the first iteration. All iterations before it are committed."""
    failed: tuple[Worker, ...] = ()
    """Workers of the grid that take no part. All others are members."""
    schedule: msgspec.Raw = JSON_NULL
    """Whole schedule in JSON, in runs whose workers deal samples or evaluate by it; otherwise null."""
    moves: tuple[LayerMove, ...] = ()
    """Transfers of parts of layers that are made before the first op, while all members wait."""
    cut_for: tuple[tuple[LayerRange, tuple[Worker, ...]], ...] = ()
    """Ranges that keep their partition although some of its members are gone, each with the members it was made for
    (`runtime.state.parts.StatePartition.after_losses`)."""
    addresses: Addresses = ()
    """Addresses from which the sources of `moves` send layers."""
    fetch: int = 0
    """Number of the `Fetch` that has already brought layers to the members which need them. 0: none."""
    factor: StepFactor | None = None
    """Gradient factor of the last committed iteration, for workers that do not know it."""
    restore: tuple[tuple[Worker, tuple[int, ...]], ...] | None = None
    """Layers that each member reads when the run returns to a checkpoint because layers were lost; else None.

    All members first drop all layers. They read these from the checkpoint of `first_iteration`, or build them as they
    were before the run began.
    """
    trusted_from: int = 0
    """Number of the last order in which the run went back because copies differed; 0: none.

    What a worker holds that has followed no order since is wrong, perhaps without its knowledge.
    """

    @property
    def has_schedule(self) -> bool:
        """True if the message contains the whole schedule, as in runs whose workers deal samples or evaluate by it."""
        return bytes(self.schedule) != bytes(JSON_NULL)


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to write layers and to report the digests of all parameters, sent to the members when all iterations are
    committed, or when the run or some members end early."""

    order: int
    first_iteration: int
    """Number of the last iteration plus one."""
    writers: tuple[tuple[int, Worker], ...]
    """Pairs of a layer of the model and the worker that writes its file."""
    parameters: bool = True
    """True to write the final parameters. False: write a checkpoint only, as when the run ends early."""
    factor: StepFactor | None = None
    moves: tuple[LayerMove, ...] = ()
    """Transfers to the writers of the elements of their layers that they lack."""
    addresses: Addresses = ()
    """Addresses from which the sources of `moves` send layers."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Message that all members hold the same final state: what was written for the `Finish` of this order may be given
    its final names."""

    order: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Message that the run is over or continues without this worker: the worker ends."""


class EndOrder(msgspec.Struct, frozen=True, tag=True):
    """Message that ends the generation of an order, because a member is lost or has stopped with an error, or copies of
    state differ: break all connections, and send `Paused`."""

    order: int
    doubted: bool = False
    """True if copies of the members' state differ, so that the run must return to a checkpoint. It is sent once more if
    the order had ended before that was found."""


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """Answer to `IterationReport`: begin the next iteration or, if `stop` is set, stop before it, as all members
    will."""

    order: int
    iteration: int
    stop: bool = False
    save: bool = False
    """True if the worker must save its layers for a checkpoint of the state before the next iteration."""
    committed: tuple[int, float | None] | None = None
    """Last committed iteration, and its loss if that is finite. A later coordinator may ask for it."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request to fetch layers for the next order while training continues, and to keep them up to date.

    It is sent to all members and to all workers that want to join; the targets of the moves fetch. It replaces any
    earlier fetch of the same order. The next order uses the layers or drops them.
    """

    number: int
    order: int
    """Number of the order by which members train while layers are fetched."""
    moves: tuple[LayerMove, ...] = ()
    addresses: Addresses = ()
    """Addresses from which the sources of `moves` send layers."""


class ReportStatus(msgspec.Struct, frozen=True, tag=True):
    """Request to report the present activity (`WorkerStatus`), sent when no iteration has been committed for long."""


class ReportCheckpoints(msgspec.Struct, frozen=True, tag=True):
    """Request to report the readable checkpoints (`ReadableCheckpoints`), sent when some layer has no holder any
    more."""


Order = Train | Finish
ToWorker = (WorkerSetup | ScheduleContent | AssignedShare | Train | Finish | Publish
            | Leave | EndOrder | Acknowledged | Fetch
            | ReportStatus
            | ReportCheckpoints)

decode: Decoder[ToWorker] = Decoder(ToWorker)
