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
    """First message of a worker. The coordinator answers with the `WorkerSetup`, or with
    `Leave`."""

    worker: Worker
    epoch: int = 0
    """Epoch of the coordinator that the worker has lost (`WorkerSetup.epoch`); 0: it is new."""
    rank: int = 0
    """Rank of this process among the processes of its worker."""


class JoinNode(msgspec.Struct, frozen=True, tag=True):
    """First message of a node agent. The coordinator answers with `NodeSetup`, `NodeTaken` or
    `RunEnded`."""

    node: int
    epoch: int = 0
    """Epoch of the coordinator that the agent has lost (`NodeSetup.epoch`); 0: it is new."""
    alive: tuple[Worker, ...] = ()
    """Living workers of the node, if it has followed a previous coordinator."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sign that a worker is alive. A worker that has nothing else to send sends it a few times in
    each heartbeat timeout. One that is silent for longer is given up."""


class HeldState(msgspec.Struct, frozen=True, array_like=True):
    """State that a worker holds: layers, and the parts that it keeps up to date. Parts
    (`runtime.state.parts`) are of parameters and optimizer state."""

    layers: tuple[LayerRange, ...] = ()
    """Layers of the model that the worker holds, as ascending ranges that do not touch."""
    parts: tuple[tuple[int, int, int], ...] = ()
    """Parts that the worker keeps up to date: layer, first element, and end (exclusive)."""
    whole_after: int | None = None
    """Iteration after which the worker has its layers' whole parameters, if it does."""


NOTHING_HELD = HeldState()


def intersect_held_state(ranks: Sequence[HeldState]) -> HeldState:
    """Return the state that all ranks of a worker hold. The ranks have the same partition, but some
    may have been stopped before they applied it, or before they stepped."""
    first = ranks[0]
    layers = frozenset.intersection(*(layers_in(kept.layers) for kept in ranks))
    return HeldState(merge_ranges((layer, layer + 1) for layer in layers),
                     tuple(part for part in first.parts if all(part in kept.parts for kept in ranks)),
                     first.whole_after if len({kept.whole_after for kept in ranks}) == 1 else None)


class RecoveryReport(msgspec.Struct, frozen=True, array_like=True):
    """Report of a paused worker to a new coordinator of all it knows."""

    order: int
    """Number of the last order that the worker has followed."""
    failed: tuple[Worker, ...]
    """Workers of the grid that took no part in that order."""
    iteration: int
    """Last iteration that the worker may have stepped, and can undo if later than `begun`."""
    kept: HeldState
    validated: StepFactor | None
    """Latest factor for an iteration's gradients that the worker knows, if any."""
    pending: bool
    """True if the worker does not know yet the factor of the gradients of `iteration`."""
    begun: int = -1
    """Last iteration whose step cannot be undone, as the order or next step has begun."""
    losses: dict[int, float] = {}
    """Finite losses of the last iterations, as `Acknowledged` reported them. If steps depend on all
    gradients, those that the worker has stepped since are among them."""
    behind: bool = False
    """True if one of the worker's processes has not stepped `iteration`."""
    doubted: bool = False
    """True if the order has ended because copies of the members' state differ (`EndOrder`)."""
    trusted_from: int = 0
    """Latest `Train.trusted_from` that the worker knows."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker sends heartbeats, and waits for an order. The coordinator includes it in
    the first order, or has it fetch layers while the others train."""

    worker: Worker
    addresses: tuple[tuple[str, int], ...]
    """Host and port at which each rank sends layers to ranks of its number."""
    folder: str | None = None
    """Result of `runtime.run_folder.read_lock_holder` for --out: equal for nodes that share it."""
    known: RecoveryReport | None = None
    """Report for a new coordinator, if the worker has followed a previous one."""
    identity: RunIdentity = NO_IDENTITY
    """What the worker would train, which must be the identity of the run."""


class TrainingStarted(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker is connected, has its layers, and begins its first op. A recovery ends
    when the last member has sent it."""

    worker: Worker
    order: int


class Checksum(msgspec.Struct, frozen=True, array_like=True):
    """Checksum of a layer's elements from `start` up to `stop` (`runtime.state.checksum`)."""

    layer: int
    start: int
    stop: int
    state: bool
    """True if the optimizer's state is included, False for parameters alone."""
    sums: tuple[int, ...]
    """Checksum on each rank of the worker, by rank."""

    @property
    def compared_elements(self) -> tuple[int, int, int, bool]:
        """Layer, first element, end, and whether optimizer state counts. Checksums for which these
        are equal must have equal sums."""
        return self.layer, self.start, self.stop, self.state


class SampleDigest(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Digest of a sample that a worker has read in an iteration. The sample is named by the
    micro-batch that would have it without dealing."""

    pipeline: int
    index: int
    digest: str


class IterationReport(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has stepped an iteration, and waits for `Acknowledged`. The coordinator
    commits the iteration when all members have sent it."""

    worker: Worker
    order: int
    iteration: int
    loss: float | None
    """Worker's share of the iteration's mean loss, a summand; None if not finite, for JSON."""
    window_seconds: float
    """Seconds from the start of the worker's first op to the end of its O."""
    times: tuple[OpTime, ...] = ()
    """Median seconds of the worker's compute ops, for each kind of op and slice."""
    ops: tuple[MeasuredOp, ...] = ()
    """Start and end of each op on the shared clock, in iterations that are traced."""
    squares: float | None = None
    """Sum of squares of this worker's gradients before clipping; None if not finite."""
    evaluation: float | None = None
    """Worker's share of the mean validation loss, if evaluated now; None if not finite."""
    checksums: tuple[Checksum, ...] = ()
    """Checksums of all that the worker held before its step, if copies are compared now."""
    samples: tuple[SampleDigest, ...] = ()
    """Digests of the samples that the worker has read, if they are compared now."""
    deal: str = ""
    """Digest of the assignment of samples to micro-batches; empty if samples are not dealt."""


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """Iteration report of one process of a worker, with its rank. It goes to the node's agent,
    which passes it on to the coordinator in `GatheredReports`."""

    rank: int
    report: IterationReport


class GatheredReports(msgspec.Struct, frozen=True, tag=True):
    """Reports of a node's workers, in one message of its agent. Reports that arrive before it is
    answered (`ReportsAcknowledged`) follow in the next one."""

    reports: tuple[RankReport, ...]


class StepValidated(msgspec.Struct, frozen=True, tag=True):
    """Report of the factor by which all members scaled an iteration's gradients. The first member
    sends it, if steps depend on all gradients."""

    order: int
    factor: StepFactor


class Paused(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has stopped, as asked to or without a peer. When all members have
    paused, the coordinator issues the next order."""

    worker: Worker
    order: int
    kept: HeldState
    validated: StepFactor | None
    """Latest factor for an iteration's gradients that the worker knows, if any."""
    reason: str | None
    """Error that ends the order for all members. None: the worker stopped as it was asked to."""
    named: tuple[Worker, ...] = ()
    """Workers between which a connection failed, with this one; empty for any other error."""
    data_end: int | None = None
    """First iteration for which the data have no samples, if that ends the order."""


class FetchUpToDate(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has a fetch's layers, and repeats each step of their senders.

    When all targets of the fetch have sent it, the coordinator chooses the iteration before which
    the members stop (`Acknowledged`).
    """

    worker: Worker
    fetch: int


class FetchFailed(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker cannot get the layers of a fetch. The coordinator plans another
    fetch."""

    worker: Worker
    fetch: int
    reason: str = ""
    """Why the worker cannot get them, in one line."""
    unreachable: bool = False
    """True if the worker could not even connect to a sender."""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has written drafts of what `Finish` asked for. When all members have,
    and their state agrees, they may publish it (`Publish`)."""

    worker: Worker
    order: int
    digests: dict[str, str]
    """Digest of each of the worker's parameters, by name, equal for all holders."""
    checksums: tuple[Checksum, ...] = ()
    """Checksums of all state that the worker holds."""


class Published(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has published its files; when all have, they may leave."""

    worker: Worker
    order: int


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has written its layers of a checkpoint, or failed (`Note`)."""

    worker: Worker
    iteration: int
    seconds: float
    """Seconds that training lost at most: to copy layers, and CPU time to write them."""
    complete: bool = False
    """True if the checkpoint now has all layers."""


class Note(msgspec.Struct, frozen=True, tag=True):
    """Line of text for the user, about an event that training survives."""

    worker: Worker
    text: str


class Injected(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker is about to fail on purpose (`failure_injection`)."""

    worker: Worker
    index: int
    at: float
    """Time of the failure, by `time.monotonic`, which all processes of a machine share."""


class WorkerStatus(msgspec.Struct, frozen=True, tag=True):
    """Answer to `ReportStatus`: the present activity of a worker."""

    worker: Worker
    doing: str
    seconds: float
    """Seconds for which the worker has been doing this."""
    waits: bool
    """True if the worker waits for another process, not for its own work."""
    rank: int | None = None
    """Rank of the process, if it is the only one that does not wait."""
    awaited: tuple[Worker, ...] = ()
    """Workers for which this one waits. Empty if none, or if it waits for node 0."""


class ReadableCheckpoints(msgspec.Struct, frozen=True, tag=True):
    """Answer to `ReportCheckpoints`: the iterations that a worker can return to."""

    worker: Worker
    iterations: tuple[int, ...]


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker, or its node, has received SIGTERM and waits for `Leave`."""

    worker: Worker


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker ends because of an error of its own. The coordinator counts it as
    lost."""

    worker: Worker
    reason: str
    everywhere: bool = False
    """True if other workers would meet the same error, which then ends the run."""


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """Report of a node agent that a worker's process has ended.

    On node 0, the fork server reports it without a message. The coordinator counts the worker as
    lost after it has handled the worker's last messages.
    """

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
