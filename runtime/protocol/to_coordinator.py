"""Messages from workers and node agents to the coordinator."""

from collections.abc import Sequence

import msgspec

from slipstream.runtime.protocol.channel import Decoder
from slipstream.runtime.protocol.to_worker import Factor
from slipstream.runtime.replay.recorder import OpTime
from slipstream.schedules.layers import LayerRange, joined_ranges, layers_in
from slipstream.schedules.measured_trace import MeasuredOp
from slipstream.schedules.schedule import Worker


class JoinWorker(msgspec.Struct, frozen=True, tag=True):
    """A worker's first message. The coordinator answers with the `Setup`, or with `Leave`."""

    worker: Worker
    epoch: int = 0
    """Of the coordinator that it has followed, and lost; 0: it has just been started."""
    rank: int = 0
    """Of the process, where a worker is several."""


class JoinNode(msgspec.Struct, frozen=True, tag=True):
    """A node agent's first message. The coordinator answers with the `NodeSetup`, or with the end of the run."""

    node: int
    epoch: int = 0
    """Of the coordinator that it has followed, and lost; 0: it has just been started."""
    alive: tuple[Worker, ...] = ()
    """Its workers that live, where it has followed another coordinator."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A worker is alive. Sent a few times in each heartbeat timeout by a worker that has nothing else to say; one that
    is silent for longer is given up."""


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """What a worker holds: layers, and of their parameters and optimizer states what it keeps up to date itself
    (`runtime.model.state.parts`)."""

    layers: tuple[LayerRange, ...] = ()
    """Those of the model that it holds: ascending ranges that do not touch."""
    parts: tuple[tuple[int, int, int], ...] = ()
    """Each a layer and the elements [start, stop) of it."""
    whole_after: int | None = None
    """The iteration after which it has the whole parameters of its layers; None: it lacks some."""


NOTHING_KEPT = Kept()


def kept_by_all(ranks: Sequence[Kept]) -> Kept:
    """What all ranks of a worker keep: they have cut alike, but some may have been stopped before they did, or before
    they stepped."""
    first = ranks[0]
    layers = frozenset.intersection(*(layers_in(kept.layers) for kept in ranks))
    return Kept(joined_ranges((layer, layer + 1) for layer in layers),
                tuple(part for part in first.parts if all(part in kept.parts for kept in ranks)),
                first.whole_after if len({kept.whole_after for kept in ranks}) == 1 else None)


class Known(msgspec.Struct, frozen=True, array_like=True):
    """What a worker knows whose coordinator is gone. It has paused."""

    order: int
    """The last that it has followed."""
    failed: tuple[Worker, ...]
    """The workers of the grid that took no part in that."""
    iteration: int
    """The last that it has stepped, or may have: it can go back by this one, but not beyond `begun`."""
    kept: Kept
    validated: Factor | None
    """Of the last iteration of which it knows."""
    pending: bool
    """Whether it does not know the factor of `iteration` yet."""
    begun: int = -1
    """The last iteration before the order, or whose step it cannot undo any more, as it has begun that of the next."""
    losses: dict[int, float] = {}
    """Of the last committed iterations, as it was told (`Acknowledged`), where they are finite; where steps depend on
    all gradients, also of those that it has stepped since."""
    behind: bool = False
    """Whether one of its processes has not stepped `iteration`."""
    doubted: bool = False
    """Whether the order has ended as copies of what members hold differ (`EndOrder`)."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker has built what it needs, sends heartbeats, and waits for an order.

    The coordinator takes it into the first order, or has it fetch layers while the others train.
    """

    worker: Worker
    corpus: str
    """Digest of the text it will read: the same for all, or the run ends."""
    addresses: tuple[tuple[str, int], ...]
    """Where others may get layers from it: each rank from the one with its own number."""
    folder: str | None = None
    """`runtime.run_folder.holder` of its node's --out: the same for all who share one."""
    known: Known | None = None
    """Where it has followed another coordinator."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """A worker has met the others, has its layers, and begins its first op. The last of them ends a recovery."""

    worker: Worker
    order: int


class Checksum(msgspec.Struct, frozen=True, array_like=True):
    """That of elements [start, stop) of a layer that a worker holds (`runtime.model.state.checksum`)."""

    layer: int
    start: int
    stop: int
    state: bool
    """With the optimizer's state, else of the parameters alone."""
    sums: tuple[int, ...]
    """Of each rank."""

    @property
    def what(self) -> tuple[int, int, int, bool]:
        """Of what it is: where this is the same, the sums must be."""
        return self.layer, self.start, self.stop, self.state


class Ran(msgspec.Struct, frozen=True, tag=True):
    """A worker has stepped its optimizer, and waits for `Acknowledged`.

    The coordinator commits the iteration when all members have sent this.
    """

    worker: Worker
    order: int
    iteration: int
    loss: float | None
    """Its part of the mean loss; None when that is not finite, which JSON cannot say."""
    window_seconds: float
    """From the start of its first op to the end of its O."""
    times: tuple[OpTime, ...] = ()
    """Of what it computed."""
    ops: tuple[MeasuredOp, ...] = ()
    """When its ops ran, on the shared clock, in the iterations that are traced."""
    squares: float | None = None
    """The sum of squares of the gradients that it speaks for, before clipping; None when that is not finite."""
    evaluation: float | None = None
    """Where the parameters were evaluated after this iteration: its part of the mean loss; None when not finite."""
    checksums: tuple[Checksum, ...] = ()
    """Where copies are compared, of all that it held before its step."""


class ReportOf(msgspec.Struct, frozen=True, array_like=True):
    """A report of one of a worker's processes, on its way over its node's agent (`node_reports`)."""

    rank: int
    report: Ran


class Gathered(msgspec.Struct, frozen=True, tag=True):
    """Reports of a node's workers, in one message of its agent. What comes until that is answered (`GoOn`) follows in
    the next one."""

    reports: tuple[ReportOf, ...]


class Validated(msgspec.Struct, frozen=True, tag=True):
    """Where steps depend on all gradients: how all made the step of an iteration. The first member sends it."""

    order: int
    factor: Factor


class Paused(msgspec.Struct, frozen=True, tag=True):
    """A worker has stopped: as it was told to, or because it lost a peer. When all have, the next order is given."""

    worker: Worker
    order: int
    kept: Kept
    validated: Factor | None
    """Of the last iteration of which it knows."""
    reason: str | None
    """An error, which ends the order for all; None when it stopped as told."""


class FetchUpToDate(msgspec.Struct, frozen=True, tag=True):
    """A worker has the layers of a fetch, and keeps up with their sources.

    When all have, the coordinator chooses the iteration before which the members stop (`Acknowledged`).
    """

    worker: Worker
    fetch: int


class FetchFailed(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot get the layers of a fetch; the coordinator plans another one."""

    worker: Worker
    fetch: int


class Finished(msgspec.Struct, frozen=True, tag=True):
    """A worker has written what `Finish` told it to. When all have, they may leave."""

    worker: Worker
    order: int
    digests: dict[str, str]
    """Of each of its parameters, by name; those who hold the same ones must agree."""


class Saved(msgspec.Struct, frozen=True, tag=True):
    """A worker has written its layers of a checkpoint, or could not, which a `Note` tells."""

    worker: Worker
    iteration: int
    seconds: float
    """That training lost at most: to copy them, and what the thread that wrote them computed."""
    complete: bool = False
    """Whether the checkpoint has all layers now."""


class Note(msgspec.Struct, frozen=True, tag=True):
    """A line for people, about something that training survives."""

    worker: Worker
    text: str


class Injected(msgspec.Struct, frozen=True, tag=True):
    """A worker is about to fail on purpose (`failure_injection`); it happens once in a run."""

    worker: Worker
    index: int
    at: float
    """By the clock that all processes of a machine share (time.monotonic)."""


class Status(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ReportStatus`: what a worker does."""

    worker: Worker
    doing: str
    seconds: float
    """For how long."""
    waits: bool
    """Whether for somebody else; else it computes, or does something else of its own."""
    rank: int | None = None
    """Which of the worker's processes, where it is the only one that does not wait."""


class Checkpoints(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ReportCheckpoints`: the iterations that a worker can go back to."""

    worker: Worker
    iterations: tuple[int, ...]


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """A worker, or the node that it is on, was told to end by somebody else (SIGTERM), and waits for `Leave`."""

    worker: Worker


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker gives up through an error of its own, and ends. The coordinator counts it as lost."""

    worker: Worker
    reason: str
    everywhere: bool = False
    """Whether others would meet the same error: then it ends the run."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker's process is gone. Sent by its node agent; on node 0 the fork server reports the same without a message.

    The coordinator counts it as lost, once it has handled the worker's last messages.
    """

    worker: Worker
    status: int
    """As in subprocess, the exit code or minus the signal."""


FromWorker = (JoinWorker | Heartbeat | Ready | Started | Ran | Validated | Paused
              | FetchUpToDate | FetchFailed | Finished | Saved | Note | Injected | Leaving | Status | Checkpoints
              | Failed)
FromNodeAgent = JoinNode | Leaving | Ended | Gathered
ToCoordinator = FromWorker | FromNodeAgent

decode: Decoder[ToCoordinator] = Decoder(ToCoordinator)
