"""Messages from workers and node agents to the coordinator."""

from collections.abc import Sequence

import msgspec

from slipstream.runtime.protocol.channel import Decoder
from slipstream.runtime.protocol.to_worker import StepFactor
from slipstream.runtime.run_identity import NO_IDENTITY, RunIdentity
from slipstream.schedules.layers import LayerRange, layers_in, merge_ranges
from slipstream.schedules.measured_trace import MeasuredOp, OpTime
from slipstream.schedules.schedule import Worker


class JoinWorker(msgspec.Struct, frozen=True, tag=True):
    """First message of a worker. The coordinator answers with the `WorkerSetup`, or with `Leave`."""

    worker: Worker
    epoch: int = 0
    """Number of the coordinator that the worker has followed and lost (`WorkerSetup.epoch`). 0: the worker has just
    been started."""
    rank: int = 0
    """Rank of this process among the processes of its worker."""


class JoinNode(msgspec.Struct, frozen=True, tag=True):
    """First message of a node agent. The coordinator answers with `NodeSetup`, `NodeTaken` or `RunEnded`."""

    node: int
    epoch: int = 0
    """Number of the coordinator that the agent has followed and lost (`NodeSetup.epoch`). 0: the agent has just been
    started."""
    alive: tuple[Worker, ...] = ()
    """Living workers of the node, if it has followed a previous coordinator."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sign that a worker is alive. A worker that has nothing else to send sends it a few times in each heartbeat
    timeout. A worker that is silent for longer is given up."""


class HeldState(msgspec.Struct, frozen=True, array_like=True):
    """State that a worker holds: layers, and the parts of parameters and optimizer state that it keeps up to date
    itself (`runtime.state.parts`)."""

    layers: tuple[LayerRange, ...] = ()
    """Layers of the model that the worker holds, as ascending ranges that do not touch."""
    parts: tuple[tuple[int, int, int], ...] = ()
    """Parts of layers that the worker keeps up to date: each has the layer, and its elements as start and stop
    (exclusive)."""
    whole_after: int | None = None
    """Iteration after which the worker has the whole parameters of its layers. None: it lacks some."""


NOTHING_HELD = HeldState()


def intersect_held_state(ranks: Sequence[HeldState]) -> HeldState:
    """Return the state that all ranks of a worker hold. The ranks have the same partition, but some may have been
    stopped before they applied it, or before they stepped."""
    first = ranks[0]
    layers = frozenset.intersection(*(layers_in(kept.layers) for kept in ranks))
    return HeldState(merge_ranges((layer, layer + 1) for layer in layers),
                     tuple(part for part in first.parts if all(part in kept.parts for kept in ranks)),
                     first.whole_after if len({kept.whole_after for kept in ranks}) == 1 else None)


class RecoveryReport(msgspec.Struct, frozen=True, array_like=True):
    """Report of a paused worker to a new coordinator: all that it knows of the run."""

    order: int
    """Number of the last order that the worker has followed."""
    failed: tuple[Worker, ...]
    """Workers of the grid that took no part in that order."""
    iteration: int
    """Last iteration whose step the worker has made or may have made. It can undo this step, but not that of
    `begun`."""
    kept: HeldState
    validated: StepFactor | None
    """Latest factor for the gradients of an iteration that the worker knows; None if it knows none."""
    pending: bool
    """True if the worker does not know yet by which factor the gradients of `iteration` are scaled."""
    begun: int = -1
    """Last iteration whose step the worker cannot undo: it lies before the order, or the worker has begun the next
    step."""
    losses: dict[int, float] = {}
    """Finite losses of the last committed iterations, as `Acknowledged` reported them. If steps depend on all
    gradients, losses of iterations that the worker has stepped since are included."""
    behind: bool = False
    """True if one of the worker's processes has not stepped `iteration`."""
    doubted: bool = False
    """True if the order has ended because copies of the members' state differ (`EndOrder`)."""
    trusted_from: int = 0
    """Latest `Train.trusted_from` that the worker knows."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has built what it needs, sends heartbeats, and waits for an order. The coordinator includes
    it in the first order, or has it fetch layers while the others train."""

    worker: Worker
    addresses: tuple[tuple[str, int], ...]
    """Host and port at which each rank of this worker sends layers to others, by rank. A rank of another worker uses
    the address of its own number."""
    folder: str | None = None
    """Result of `runtime.run_folder.read_lock_holder` for the node's --out: equal for all nodes that share the
    folder."""
    known: RecoveryReport | None = None
    """Report for a new coordinator, if the worker has followed a previous one."""
    identity: RunIdentity = NO_IDENTITY
    """What the worker would train. A worker whose identity is not that of the run does not take
    part."""


class TrainingStarted(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has connected to the other members, has its layers, and begins its first op. A recovery ends
    when the last member has sent it."""

    worker: Worker
    order: int


class Checksum(msgspec.Struct, frozen=True, array_like=True):
    """Checksum of the elements from `start` up to `stop` of a layer that a worker holds
    (`runtime.state.checksum`)."""

    layer: int
    start: int
    stop: int
    state: bool
    """True if the optimizer's state is included, False for parameters alone."""
    sums: tuple[int, ...]
    """Checksum on each rank of the worker, by rank."""

    @property
    def compared_elements(self) -> tuple[int, int, int, bool]:
        """Layer, first element, end, and whether the optimizer's state is included: checksums for which these are equal
        must have equal sums."""
        return self.layer, self.start, self.stop, self.state


class SampleDigest(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Digest of a sample that a worker has read in an iteration. The sample is named by the
    micro-batch that would have it without dealing."""

    pipeline: int
    index: int
    digest: str


class IterationReport(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has stepped its optimizer in an iteration, and waits for `Acknowledged`. The coordinator
    commits the iteration when all members have sent it."""

    worker: Worker
    order: int
    iteration: int
    loss: float | None
    """Worker's share of the iteration's mean loss, so that the shares of all members add up to it. None if it is not
    finite, because JSON cannot represent that."""
    window_seconds: float
    """Busy window: seconds from the start of the worker's first op to the end of its O."""
    times: tuple[OpTime, ...] = ()
    """Median seconds of the worker's compute ops, for each kind of op and slice."""
    ops: tuple[MeasuredOp, ...] = ()
    """Start and end of each op on the shared clock, in iterations that are traced."""
    squares: float | None = None
    """Sum of squares, before clipping, of the gradients that this worker reports. None if it is not finite."""
    evaluation: float | None = None
    """Worker's share of the mean validation loss, if an evaluation followed this iteration. None if it is not
    finite."""
    checksums: tuple[Checksum, ...] = ()
    """Checksums of all that the worker held before its step, if copies are compared in this iteration."""
    samples: tuple[SampleDigest, ...] = ()
    """Digests of the samples that the worker has read, if they are compared in this iteration."""
    deal: str = ""
    """Digest of the assignment of samples to micro-batches; empty if samples are not dealt."""


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """Iteration report of one process of a worker, with its rank. The process sends it to its node's agent, which
    passes it on to the coordinator in `GatheredReports`."""

    rank: int
    report: IterationReport


class GatheredReports(msgspec.Struct, frozen=True, tag=True):
    """Reports of a node's workers, in one message of its agent. Reports that arrive before it is answered
    (`ReportsAcknowledged`) follow in the next one."""

    reports: tuple[RankReport, ...]


class StepValidated(msgspec.Struct, frozen=True, tag=True):
    """Report of the factor by which all members scaled the gradients of an iteration before they stepped, if steps
    depend on all gradients. The first member sends it."""

    order: int
    factor: StepFactor


class Paused(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has stopped, as it was asked to or because it lost a peer. When all members have paused, the
    coordinator issues the next order."""

    worker: Worker
    order: int
    kept: HeldState
    validated: StepFactor | None
    """Latest factor for the gradients of an iteration that the worker knows; None if it knows none."""
    reason: str | None
    """Error that ends the order for all members. None: the worker stopped as it was asked to."""
    named: tuple[Worker, ...] = ()
    """Workers between which a connection failed: this one, and those it could not reach. Empty: the error is of another
    kind, or follows from the end of the order."""
    data_end: int | None = None
    """First iteration for which the data have no samples, if the order ends because of that; otherwise None."""


class FetchUpToDate(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has received the layers of a fetch, and repeats each step of their senders. When all targets
    of the fetch have sent it, the coordinator chooses the iteration before which the members stop (`Acknowledged`)."""

    worker: Worker
    fetch: int


class FetchFailed(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker cannot get the layers of a fetch. The coordinator plans another fetch."""

    worker: Worker
    fetch: int
    reason: str = ""
    """Why the worker cannot get them, in one line."""
    unreachable: bool = False
    """True if the worker could not even connect to a sender."""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has written drafts of what `Finish` asked for. When all members have, and their state
    agrees, they may publish it (`Publish`)."""

    worker: Worker
    order: int
    digests: dict[str, str]
    """Digest of each of the worker's parameters, by name. All holders of a parameter must report the same."""
    checksums: tuple[Checksum, ...] = ()
    """Checksums of all state that the worker holds."""


class Published(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has given their final names to the files that it wrote. When all members have, they may
    leave."""

    worker: Worker
    order: int


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has written its layers of a checkpoint, or has failed to, which a `Note` explains."""

    worker: Worker
    iteration: int
    seconds: float
    """Seconds that training lost at most: the time to copy layers, and the computing time of the thread that wrote
    them."""
    complete: bool = False
    """True if the checkpoint now has all layers."""


class Note(msgspec.Struct, frozen=True, tag=True):
    """Line of text for the user, about an event that training survives."""

    worker: Worker
    text: str


class Injected(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker is about to fail on purpose (`failure_injection`), which happens once in a run."""

    worker: Worker
    index: int
    at: float
    """Time of the failure, by `time.monotonic`, a clock that all processes of a machine share."""


class WorkerStatus(msgspec.Struct, frozen=True, tag=True):
    """Answer to `ReportStatus`: the present activity of a worker."""

    worker: Worker
    doing: str
    seconds: float
    """Seconds for which the worker has been doing this."""
    waits: bool
    """True if the worker waits for another process. False: it computes, or does other work of its own."""
    rank: int | None = None
    """Rank of the process, if it is the only one of the worker that does not wait."""
    awaited: tuple[Worker, ...] = ()
    """Workers for which this one waits; empty if it does not wait, or if it waits for node 0."""


class ReadableCheckpoints(msgspec.Struct, frozen=True, tag=True):
    """Answer to `ReportCheckpoints`: the iterations that a worker can return to."""

    worker: Worker
    iterations: tuple[int, ...]


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker, or its node, has received SIGTERM and waits for `Leave`."""

    worker: Worker


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker ends because of an error of its own. The coordinator counts it as lost."""

    worker: Worker
    reason: str
    everywhere: bool = False
    """True if other workers would meet the same error, which then ends the run."""


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """Report of a node agent that a worker's process has ended. On node 0, the fork server reports it without a
    message. The coordinator counts the worker as lost after it has handled the worker's last messages."""

    worker: Worker
    status: int
    """Exit status as in subprocess: the exit code, or minus the signal."""


FromWorker = (JoinWorker | Heartbeat | Ready | TrainingStarted | IterationReport | StepValidated | Paused
              | FetchUpToDate | FetchFailed | Finished | Published
              | CheckpointSaved | Note | Injected | Leaving | WorkerStatus
              | ReadableCheckpoints
              | WorkerFailed)
FromNodeAgent = JoinNode | Leaving | WorkerEnded | GatheredReports
ToCoordinator = FromWorker | FromNodeAgent

decode: Decoder[ToCoordinator] = Decoder(ToCoordinator)
