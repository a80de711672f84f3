"""A worker's process.

The real main thread, generations, layers and steps run between scripted ends.
"""

from collections import deque
from functools import partial
from types import SimpleNamespace

import torch

from slipstream.runtime.checkpoints.checkpoint import CheckpointError
from slipstream.runtime.models.layered_model import build_model, parameter_dtype
from slipstream.runtime.models.sharing import sharing_of
from slipstream.runtime.moving.layer_messages import LayerRequest, UpToDate
from slipstream.runtime.moving.layer_receiver import LayerReceiver, ReceiverCallbacks, _Transfer
from slipstream.runtime.moving.layer_sender import LayerSender
from slipstream.runtime.moving.layer_store import LayerStore
from slipstream.runtime.moving.received_part import SteppedPart
from slipstream.runtime.processes.worker_start import NodeSettings, WorkerSpec
from slipstream.runtime.protocol.node_reports import ReportSender
from slipstream.runtime.protocol.setup import CommonSettings, WorkerResilience, WorkerSetup
from slipstream.runtime.protocol.to_coordinator import (
    CheckpointSaved,
    FetchFailed,
    FetchUpToDate,
    ReadableCheckpoints,
    Ready,
)
from slipstream.runtime.protocol.to_worker import Leave, ReportCheckpoints
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.nccl import NcclBackend
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.state.held_layers import build_holding, build_layer
from slipstream.runtime.worker.checkpointer import Checkpointer
from slipstream.runtime.worker.context import WorkerContext
from slipstream.runtime.worker.device_memory import DeviceMemory
from slipstream.runtime.worker.injected_faults import Injector
from slipstream.runtime.worker.main_thread import MainThread
from slipstream.runtime.worker.order_threads import OrderThreads
from tests.runtime.coordinator.counting_workers import PLACEMENT
from tests.runtime.exact.fibers import Acting, Fiber, Lock, let_others_run, wait_until
from tests.runtime.exact.wires import NcclEnd, ScriptedGloo

CPU = torch.device("cpu")
SECRET = SimpleNamespace()


FULL_QUEUE = 3
"""Messages of steps that wait for one receiver, from which on its sender waits."""


class Receiver:
    """What asks a sender for layers, and what is on its way to it."""

    def __init__(self, request) -> None:
        self.request, self.asking, self.answered, self.closed, self.full = (
            request,
            True,
            False,
            False,
            False,
        )
        self.queue = deque()

    @property
    def has_pending(self) -> bool:
        return not self.closed and bool(self.queue)


class Server:
    """As `runtime.moving.layer_server.LayerServer`."""

    def __init__(self) -> None:
        self.receivers = []

    def list_asking(self):
        return [receiver for receiver in self.receivers if receiver.asking and not receiver.closed]

    def list_following(self):
        return [
            receiver
            for receiver in self.receivers
            if receiver.answered and receiver.request.order is None and not receiver.closed
        ]

    def list_sockets(self):
        return []

    def send_states(self, receiver, states) -> None:
        receiver.asking, receiver.answered = False, True
        for message, state in states:
            self.queue_message(receiver, message, state)

    def queue_message(self, receiver, message, tensors=None) -> None:
        receiver.queue.append((message, tensors or {}))
        receiver.full = receiver.full or len(receiver.queue) > FULL_QUEUE * len(
            receiver.request.parts
        )

    def drop_receiver(self, receiver) -> None:
        receiver.closed = True
        receiver.queue.clear()


class Sender(LayerSender):
    def __init__(self, worker) -> None:
        self._server, self.address = Server(), (str(worker), 1)

    def list_sockets(self):
        return frozenset()


class Transfer(_Transfer):
    """One fetch, from senders of this world."""

    world = None

    def _receive_from(self, source, sender) -> None:
        try:
            let_others_run()
            process = self.world.workers.get(source)
            if process is None or self.world.is_apart(self._worker, source):
                process = None
                raise ConnectionError("it is gone")
            receiver = Receiver(
                LayerRequest(
                    sender.parts, None if self.fetch.follow else self.fetch.order, self._worker
                )
            )
            process.sender._server.receivers.append(receiver)
            while not self._over:
                if self.world.takes_nothing(self._worker):
                    if not self.fetch.follow:  # the sender drops it, as it takes nothing
                        raise ConnectionError("it was closed")
                    wait_until(lambda: receiver.closed or self._over or process.killed)
                wait_until(
                    lambda: receiver.queue or receiver.closed or self._over or process.killed
                )
                if receiver.queue:
                    message, tensors = receiver.queue[0]
                    self._apply_message(
                        source, message, {key: tensor.clone() for key, tensor in tensors.items()}
                    )
                    receiver.queue.popleft()
                    receiver.full = receiver.full and bool(receiver.queue)
                    if not receiver.queue:
                        self._apply_message(source, UpToDate(), {})
                elif not self._over and (receiver.closed or process.killed):
                    raise ConnectionError("it is gone")
            receiver.closed = True
        except Exception as error:
            reason = f"fetching layers from worker {source} failed: {error}"
            self._fail_transfer(CommunicationError(reason, (source,)), unreachable=process is None)


class Told(ReceiverCallbacks):
    def __init__(self, process) -> None:
        self._process = process

    def on_up_to_date(self, fetch) -> None:
        self._process.say(FetchUpToDate(self._process.worker, fetch.number))

    def on_fetch_failed(self, fetch, reason, *, unreachable) -> None:
        self._process.say(FetchFailed(self._process.worker, fetch.number, reason, unreachable))


class Saving(Checkpointer):
    """Keeps checkpoints in the memory of the world: one of all layers is complete.

    A draft becomes one as in files.
    """

    def __init__(self, process, sharing) -> None:
        self.process, self._every, self._first, self._damaged = (
            process,
            process.world.every,
            0,
            set(),
        )
        self._sharing, self._drafts = sharing, {}

    def save(self, iteration, copied, require=lambda: None) -> None:
        states = copied()
        if states:
            self._drafts[iteration] = states
            self.process.say(CheckpointSaved(self.process.worker, iteration, 0.0))

    def save_last(self, order, copied) -> None:
        self.save(order.first_iteration, copied)

    def begin_order(self, order, first_iteration) -> None:
        self.allow_committed(first_iteration - 1)
        self._drafts.clear()

    def allow_committed(self, iteration) -> None:
        for committed in [draft for draft in self._drafts if draft <= iteration]:
            self.process.world.save(committed, self._drafts.pop(committed))

    def publish_last(self, iteration) -> None:
        self.allow_committed(iteration)

    def drop_later(self, iteration) -> None:
        self.process.world.drop_saved(iteration)

    def list_iterations(self):
        return tuple(sorted({0, *self.process.world.complete()} - self._damaged))

    def load(self, iteration, layers):
        if iteration == 0:
            return {}
        saved = self.process.world.disk_of.get(iteration, {})
        if not set(layers) <= saved.keys():
            self._damaged.add(iteration)
            raise CheckpointError("it is gone")
        copies = {}
        for layer in layers:
            copies[layer] = {key: tensor.clone() for key, tensor in saved[layer].items()}
        return copies


class Threads(OrderThreads):
    def __init__(self, process) -> None:
        super().__init__(process.failed)
        self._finishing, self._process = Lock(), process

    def start_thread(self, device, name, work):
        return Fiber(self._process, work)


class Main(MainThread):
    """The real handling of messages."""

    def __init__(self, process, context, channel) -> None:
        self._worker, self._channel, self._context = process.worker, channel, context
        self._threads, self._generation, self._finish_order, self._down = (
            Threads(process),
            None,
            None,
            (),
        )
        self._assigned, self._contents, self._losses, self._trusted_from = None, {}, {}, 0


class Process:
    """One worker, from its start to its death."""

    def __init__(self, worker, world) -> None:
        self.worker, self.world, self.fibers, self.killed = worker, world, [], False
        self.said, self.inbox = deque(), deque()
        self.following = True
        """Whether its coordinator lives."""
        config, training = world.config, world.config.training
        model = build_model(config.model, training.seed, parameter_dtype(training), CPU)
        sharing, build = sharing_of(model), partial(build_layer, model, config=training)
        common = CommonSettings(
            iterations=training.iterations,
            traced=0,
            nodes=1,
            transport="gloo",
            device="cpu",
            cuts=PLACEMENT.cuts,
            columns=(),
            forms=(),
            microbatches=world.microbatches,
            resilience=WorkerResilience(
                heartbeat_timeout_seconds=1.0,
                checkpoint_every=world.every,
                verify_every=world.verify_every,
            ),
        )
        setup = WorkerSetup(common=common, first_iteration=0, store=None)
        settings = NodeSettings(config=config, secret=SECRET, out="")
        spec = WorkerSpec(worker, None, None, settings)
        channel = SimpleNamespace(send=self.say, setup=setup)
        self.host, self.nccl_ends = ScriptedGloo(world.wires), []
        links = GroupCache("gloo")
        links.host = self.host
        links.backend = NcclBackend(self._nccl_end) if world.nccl else self.host
        links.backends = (self.host, links.backend) if world.nccl else (self.host,)
        checkpointer, passed = Saving(self, sharing), world.forms
        store = LayerStore(build, checkpointer.load, build_holding(model, (), training), CPU)
        injector = Injector((), lambda _: None)
        injector.fail_if_due = let_others_run
        receiver = LayerReceiver(
            store.get_module,
            partial(SteppedPart, config=training, device=CPU, sharing=sharing),
            CPU,
            SECRET,
            Told(self),
            worker,
        )
        kind = type("Transfer", (Transfer,), {"world": world})
        receiver._begin = partial(kind, **receiver._begin.keywords)
        self.sender = Sender(worker)
        self.context = WorkerContext(
            spec=spec,
            group=None,
            channel=channel,
            reporter=ReportSender(0, self.say, None),
            store=world.store,
            links=links,
            setup=setup,
            device=CPU,
            model=model,
            sharing=sharing,
            placement=PLACEMENT,
            corpus=world.corpus,
            validation=None,
            forms=[passed[cut] for cut in PLACEMENT.cuts],
            layer_store=store,
            memory=DeviceMemory(worker, CPU),
            injector=injector,
            checkpointer=checkpointer,
            layer_sender=self.sender,
            layer_receiver=receiver,
        )
        self.main = Main(self, self.context, channel)
        self.say(self.ready(None))

    @property
    def order(self):
        """Its order; None where it has none, and can be forgotten."""
        return self.main._generation or self.main._finish_order

    def _nccl_end(self, store, prefix, rank, size, timeout, directed):
        end = NcclEnd(self.world.wires, ("nccl", id(store), prefix), rank, size)
        self.nccl_ends.append(end)
        return end

    def ready(self, report):
        return Ready(self.worker, (self.sender.address,), None, report)

    def say(self, message) -> None:
        if self.following and not self.killed:
            self.said.append(message)

    def failed(self, error) -> None:
        raise error

    def hear(self) -> None:
        message = self.inbox.popleft()
        Acting.process = self
        if isinstance(message, Leave):
            self.world.workers.pop(self.worker)
            self.kill()
        elif isinstance(message, ReportCheckpoints):
            self.say(ReadableCheckpoints(self.worker, self.context.checkpointer.list_iterations()))
        else:
            self.main._handle_message(message)

    def can(self):
        """What may happen to it next, by the name of the method."""
        generation = self.main._generation
        if not self.following:
            if generation is None or generation.paused:
                yield "follow_another"
        elif self.said:
            yield "is_heard"
        if self.inbox:
            yield "hear"
        if any(fiber.ready() for fiber in self.fibers):
            yield "step"

    def is_heard(self) -> None:
        self.world.happens(self.said.popleft())

    def step(self) -> None:
        """One of its threads runs on."""
        Acting.process = self
        self.world.rng.choice([fiber for fiber in self.fibers if fiber.ready()]).resume()

    def lose_coordinator(self) -> None:
        Acting.process = self
        self.inbox.clear()
        self.said.clear()
        self.following = False
        if self.main._generation is not None:
            self.main._generation.end_order()
        self.context.layer_receiver.drop_fetches(2**62)

    def follow_another(self) -> None:
        generation, self.following = self.main._generation, True
        report = (
            self.main._build_recovery_report()
            if generation is not None
            or self.main._finish_order is not None
            or self.main._losses
            or self.context.layer_store.holding.modules
            else None
        )
        self.main._contents.clear()
        object.__setattr__(self.context, "store", self.world.store)
        self.say(self.ready(report))

    def kill(self) -> None:
        """The process is gone, whatever it was at."""
        self.killed = True
        for end in self.host.ends:
            end.broken = True
        for end in self.nccl_ends:
            end.broken = True
        while self.fibers:
            self.fibers[0].resume()
