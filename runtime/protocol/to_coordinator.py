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
    """First message of a worker's process, answered with `WorkerSetup` or `Leave`, or refused."""

    worker: Worker
    epoch: int = 0
    """Epoch of the coordinator that the worker has lost; 0: it is a new worker."""
    rank: int = 0
    """Rank of this process among the processes of its worker."""


class JoinNode(msgspec.Struct, frozen=True, tag=True):
    """First message of a node agent, answered with `NodeSetup`, `NodeTaken` or `RunEnded`."""

    node: int
    epoch: int = 0
    """Epoch of the coordinator that the agent has lost; 0: it is a new agent."""
    alive: tuple[Worker, ...] = ()
    """Living workers of the node, if the agent has followed an earlier coordinator."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sign of life of a worker that has had nothing else to send."""


class HeldState(msgspec.Struct, frozen=True, array_like=True):
    """State that a worker holds: layers, and parts of their parameters and optimizer state."""

    layers: tuple[LayerRange, ...] = ()
    """Layers of the model that the worker holds, as ascending ranges that do not touch."""
    parts: tuple[tuple[int, int, int], ...] = ()
    """Parts that the worker keeps up to date: layer, first element, end (exclusive)."""
    whole_after: int | None = None
    """Iteration after which all parameters of the layers are current; None if some are not."""


NOTHING_HELD = HeldState()


def intersect_held_state(ranks: Sequence[HeldState]) -> HeldState:
    """Return the state that all ranks of a worker hold."""
    # The ranks have the same partition, but some may have been stopped before they applied it, or
    # before they stepped.
    first = ranks[0]
    layers, parts = layers_in(first.layers), set(first.parts)
    for kept in ranks:
        layers &= layers_in(kept.layers)
        parts.intersection_update(kept.parts)
    ranges = merge_ranges((layer, layer + 1) for layer in layers)
    # Parts keep the order of the first rank; layers become ranges again.
    ordered_parts = tuple(part for part in first.parts if part in parts)
    alike = all(kept.whole_after == first.whole_after for kept in ranks)
    return HeldState(ranges, ordered_parts, first.whole_after if alike else None)


class RecoveryReport(msgspec.Struct, frozen=True, array_like=True):
    """Report of all that a paused worker knows, for a new coordinator."""

    order: int
    """Number of the last order that the worker has followed."""
    failed: tuple[Worker, ...]
    """Workers of the grid that took no part in that order."""
    iteration: int
    """Last iteration that the worker may have stepped; steps after `begun` can be undone."""
    kept: HeldState
    validated: StepFactor | None
    """Step factor of the latest iteration whose factor the worker knows; None: it knows none."""
    pending: bool
    """True if the worker does not know the step factor of `iteration` yet."""
    begun: int = -1
    """Last iteration whose step cannot be undone, because a later order or step has begun."""
    losses: dict[int, float] = {}
    """Latest losses, if finite, by iteration: committed and, with clipping, just stepped ones."""
    behind: bool = False
    """True if one of the worker's processes has not stepped `iteration`."""
    doubted: bool = False
    """True if the order has ended because its state cannot be trusted (`EndOrder.doubted`)."""
    trusted_from: int = 0
    """Latest `Train.trusted_from` that the worker knows."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Report of a worker that it is prepared, sends heartbeats, and waits for an order."""

    worker: Worker
    addresses: tuple[tuple[str, int], ...]
    """Host and port, by rank, from which other workers' ranks of equal number fetch layers."""
    folder: str | None = None
    """Text of --out's lock file, equal for nodes that share it; None without one."""
    known: RecoveryReport | None = None
    """Report for a new coordinator; None if the worker has followed no earlier one."""
    identity: RunIdentity = NO_IDENTITY
    """What the worker would train, which must be the identity of the run."""


class TrainingStarted(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker is connected, has its layers, and begins its first op."""

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
    """Checksum on each rank of the worker, in the order of ranks."""

    @property
    def compared_elements(self) -> tuple[int, int, int, bool]:
        """Elements that the sums cover: layer, first element, end, and whether with state."""
        return self.layer, self.start, self.stop, self.state


class SampleDigest(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Digest of a sample that a worker has read.

    `pipeline` and `index` name the micro-batch to which the sample belongs without dealing.
    """

    pipeline: int
    index: int
    digest: str


class IterationReport(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has stepped an iteration, and waits for `Acknowledged`."""

    worker: Worker
    order: int
    iteration: int
    loss: float | None
    """Worker's summand of the iteration's mean loss; None if not finite, for JSON."""
    window_seconds: float
    """Seconds from the start of the worker's first op to the end of its O."""
    times: tuple[OpTime, ...] = ()
    """Median seconds of the worker's compute ops, for each kind of op and slice."""
    ops: tuple[MeasuredOp, ...] = ()
    """Start and end of each op, by the first member's clock, in traced iterations."""
    squares: float | None = None
    """Sum of squares of this worker's gradients before clipping; None if not finite."""
    evaluation: float | None = None
    """Worker's summand of the mean validation loss; None if not evaluated now, or not finite."""
    checksums: tuple[Checksum, ...] = ()
    """Checksums of all that the worker held before its step; empty if not compared now."""
    samples: tuple[SampleDigest, ...] = ()
    """Digests of the samples that the worker has read; empty if not compared now."""
    deal: str = ""
    """Digest of which micro-batch gets which samples; empty if samples are not dealt."""


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """Iteration report of one rank of a worker, sent to the agent of its node."""

    rank: int
    report: IterationReport


class GatheredReports(msgspec.Struct, frozen=True, tag=True):
    """Reports of a node's workers, in one message of its agent."""

    reports: tuple[RankReport, ...]


class StepValidated(msgspec.Struct, frozen=True, tag=True):
    """Report of the step factor of an iteration, sent by the first member."""

    order: int
    factor: StepFactor


class Paused(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has stopped, as requested or after an error."""

    worker: Worker
    order: int
    kept: HeldState
    validated: StepFactor | None
    """Step factor of the latest iteration whose factor the worker knows; None: it knows none."""
    reason: str | None
    """Error that ends the order for all members. None: the worker stopped as requested."""
    named: tuple[Worker, ...] = ()
    """This worker and those to which its connections failed; empty for any other error."""
    data_end: int | None = None
    """First iteration for which the data have no samples; None if the order ends otherwise."""


class FetchUpToDate(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has a fetch's layers, and repeats each step of their senders.

    When all targets have sent this report, the coordinator chooses the iteration before which the
    members stop (`Acknowledged`).
    """

    worker: Worker
    fetch: int


class FetchFailed(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker cannot get a fetch's layers; node 0 plans another fetch."""

    worker: Worker
    fetch: int
    reason: str = ""
    """Why the worker cannot get the layers, in one line."""
    unreachable: bool = False
    """True if the worker could not even connect to a sender."""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has written drafts of what `Finish` asked for."""

    worker: Worker
    order: int
    digests: dict[str, str]
    """Digest of each of the worker's parameters, by name, equal for all holders."""
    checksums: tuple[Checksum, ...] = ()
    """Checksums of all state that the worker holds."""


class Published(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has published its files; it may leave once all members have."""

    worker: Worker
    order: int


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has written, or failed to write, its layers of a checkpoint."""

    worker: Worker
    iteration: int
    seconds: float
    """Seconds that training has lost at most: copying layers, and CPU time for writing them."""
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
    """Answer to `ReportStatus`: what a worker is doing."""

    worker: Worker
    doing: str
    seconds: float
    """Seconds for which the worker has been doing this."""
    waits: bool
    """True if the worker waits for another process, not for its own work."""
    rank: int | None = None
    """Rank of the worker's only process that does not wait; None: none or several."""
    awaited: tuple[Worker, ...] = ()
    """Workers for which this one waits. Empty if none, or if it waits for node 0."""


class ReadableCheckpoints(msgspec.Struct, frozen=True, tag=True):
    """Answer to `ReportCheckpoints`: the iterations of the checkpoints that a worker can read."""

    worker: Worker
    iterations: tuple[int, ...]


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker, or its node, has received SIGTERM and waits for `Leave`."""

    worker: Worker


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker ends because of its own error; it then counts as lost."""

    worker: Worker
    reason: str
    everywhere: bool = False
    """True if other workers would meet the same error, which then ends the run."""


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """Report of a node agent that the process of a worker has ended."""

    worker: Worker
    status: int
    """Exit status as in subprocess: the exit code, or minus the signal."""


FromWorker = (
    JoinWorker
    | Heartbeat
    | Ready
    | TrainingStarted
    | IterationReport
    | StepValidated
    | Paused
    | FetchUpToDate
    | FetchFailed
    | Finished
    | Published
    | CheckpointSaved
    | Note
    | Injected
    | Leaving
    | WorkerStatus
    | ReadableCheckpoints
    | WorkerFailed
)
FromNodeAgent = JoinNode | Leaving | WorkerEnded | GatheredReports
ToCoordinator = FromWorker | FromNodeAgent

decode: Decoder[ToCoordinator] = Decoder(ToCoordinator)
