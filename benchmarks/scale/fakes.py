"""Define fake workers and node agents, which speak the protocol and compute nothing."""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import msgspec

from benchmarks.scale.shapes import ELEMENTS, LAYERS_A_STAGE, SECRET
from slipstream.runtime.protocol import to_node_agent, to_worker
from slipstream.runtime.protocol.authentication import GREETING_BYTES, TAG_BYTES, ChallengeAnswer
from slipstream.runtime.protocol.channel import FrameParser, encode_frame
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.protocol.to_coordinator import (
    FetchUpToDate,
    GatheredReports,
    Heartbeat,
    HeldState,
    IterationReport,
    JoinNode,
    JoinWorker,
    Paused,
    RankReport,
    Ready,
    RecoveryReport,
    TrainingStarted,
    WorkerStatus,
)
from slipstream.runtime.protocol.to_node_agent import ReportsAcknowledged
from slipstream.runtime.protocol.to_worker import (
    Acknowledged,
    EndOrder,
    Fetch,
    Leave,
    ReportStatus,
    Train,
)
from slipstream.schedules.measured_trace import OpTime
from slipstream.schedules.schedule import OpKind, Worker

if TYPE_CHECKING:
    from benchmarks.scale.cluster import Cluster


class Fake(asyncio.Protocol):
    """Connection to node 0 that shakes hands and passes messages on."""

    def __init__(self, hello: msgspec.Struct, decode: Callable[[bytes], object]) -> None:
        self._hello, self._decode = hello, decode
        self._answer: ChallengeAnswer | None = None
        self._frames: FrameParser | None = None
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self.bytes = 0
        self._said = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the greeting."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Handle the connection's end: node 0 is gone, or has given this worker up."""
        self._transport = None

    @property
    def connected(self) -> bool:
        """True if there is a connection whose handshake is complete."""
        return self._transport is not None and self._frames is not None

    def abort(self) -> None:
        """End the connection, as the end of the process would."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def say(self, message: msgspec.Struct) -> None:
        """Send a message."""
        if self._transport is not None and self._answer is not None:
            self._transport.write(encode_frame(message).with_tag(self._answer.keys.sending))
            self._said = time.monotonic()

    def data_received(self, data: bytes) -> None:
        """Answer the greeting, check the proof, and then take messages."""
        self.bytes += len(data)
        if self._frames is None:
            data = self._shake_hands(data)
        if self._frames is not None:
            for body in self._frames.parse_messages(data):
                self.take(self._decode(body))

    def take(self, message: object) -> None:
        """Handle a message."""

    def _shake_hands(self, data: bytes) -> bytes:
        self._received += data
        if self._answer is None and len(self._received) >= GREETING_BYTES:
            self._answer = ChallengeAnswer(
                SECRET, "control", bytes(self._received[:GREETING_BYTES])
            )
            del self._received[:GREETING_BYTES]
            assert self._transport is not None
            self._transport.write(self._answer.hello)
            self.say(self._hello)
        if self._answer is None or len(self._received) < TAG_BYTES:
            return b""
        self._answer.verify_proof(bytes(self._received[:TAG_BYTES]))
        self._frames = FrameParser(self._answer.keys.receiving)
        rest = bytes(self._received[TAG_BYTES:])
        self._received.clear()
        return rest


class FakeAgent(Fake):
    """Launcher of a node other than node 0. It gathers reports as `protocol.node_reports` does."""

    def __init__(self, node: int, epoch: int = 0, alive: tuple[Worker, ...] = ()) -> None:
        super().__init__(JoinNode(node, epoch, alive), to_node_agent.decode)
        self._reporters: dict[Worker, FakeWorker] = {}
        self._reports: list[RankReport] = []
        self._asked = False

    def report(self, worker: "FakeWorker", ran: IterationReport) -> None:
        """Report that a worker has stepped."""
        self._reporters[ran.worker] = worker
        self._reports.append(RankReport(0, ran))
        self._ask()

    def take(self, message: object) -> None:
        """Pass answers on to workers."""
        if isinstance(message, ReportsAcknowledged):
            self._asked = False
            for workers, acknowledged in message.acknowledged:
                for worker in workers:
                    self._reporters[worker].take(acknowledged)
            self._ask()

    def _ask(self) -> None:
        if self._reports and not self._asked and self.connected:
            reports, self._reports, self._asked = tuple(self._reports), [], True
            self.say(GatheredReports(reports))


class FakeWorker(Fake):
    """Worker that steps on demand, and passes orders and acknowledgements to the cluster."""

    def __init__(
        self,
        cluster: "Cluster",
        worker: Worker,
        epoch: int = 0,
        former: RecoveryReport | None = None,
    ) -> None:
        super().__init__(JoinWorker(worker, epoch), to_worker.decode)
        self._cluster, self.worker, self.known = cluster, worker, former
        self.epoch = epoch
        self.order = 0
        """Number of the order in which the worker takes part, or 0."""
        self.begun = self.reached = -1
        self.ended = False
        self.sent = 0.0
        layers = LAYERS_A_STAGE * worker.column, LAYERS_A_STAGE * (worker.column + 1)
        self.kept = HeldState(
            (layers,), tuple((layer, 0, ELEMENTS.total) for layer in range(*layers))
        )
        self._times = tuple(
            OpTime(kind, worker.column, 2 * cluster.stages, 0.01)
            for kind in (OpKind.F, OpKind.I, OpKind.W)
        )

    def take(self, message: object) -> None:
        """Do what node 0 says."""
        match message:
            case WorkerSetup():
                self.epoch = message.epoch
                self.say(
                    Ready(
                        self.worker,
                        ((f"10.0.{self.worker.pipeline}.{self.worker.column}", 20000),),
                        "folder",
                        self.known,
                    )
                )
                self._cluster.prepared(self)
            case Train():
                self._cluster.trains(self, message)
            case Acknowledged() if message.order == self.order:
                if message.stop:
                    self.pause()
                self._cluster.acknowledged(self, message)
            case EndOrder() if message.order == self.order:
                self.ended = True
                self._cluster.order_ended(self)
                self.pause()
            case Fetch() if any(move.target == self.worker for move in message.moves):
                self.say(FetchUpToDate(self.worker, message.number))
            case ReportStatus():
                self.say(WorkerStatus(self.worker, "waits", 1.0, waits=True))
            case Leave():
                self.abort()

    def begins(self, order: int, first: int) -> None:
        """Begin an order in which this worker takes part."""
        self.order, self.begun, self.reached, self.ended = order, first - 1, first - 1, False
        self.say(TrainingStarted(self.worker, order))

    def ran(self, iteration: int) -> None:
        """Report an iteration of the present order."""
        self.reached, self.sent = iteration, time.monotonic()
        ran = IterationReport(self.worker, self.order, iteration, 0.001, 0.5, self._times)
        agent = self._cluster.agent_of(self.worker)
        if agent is None:
            self.say(ran)
        elif self.connected:
            agent.report(self, ran)
            self._said = self.sent

    def pause(self) -> None:
        """Stop, and report it."""
        self.say(Paused(self.worker, self.order, self.kept, None, None))

    def beat(self, interval: float) -> None:
        """Send a heartbeat if nothing was sent for an interval."""
        if time.monotonic() - self._said >= interval:
            self.say(Heartbeat())
