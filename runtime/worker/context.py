"""Hold what a worker keeps between orders, what one order needs, and its activity.

The activity is what the worker is doing, which a coordinator asks for if no iteration has been
committed for long. Device, model and data are kept; they are built before a worker is ready.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch

from slipstream.runtime.computing.rehearsal import Rehearsal
from slipstream.runtime.config import RunConfig
from slipstream.runtime.data.data import (
    Data,
    get_data_state,
    load_data,
    load_validation_data,
    move_data_to,
    use_saved_states,
)
from slipstream.runtime.data.dealt_samples import DealtSamples, digest_data
from slipstream.runtime.models.identity import build_run_identity
from slipstream.runtime.models.layered_model import LayeredModel, build_model, parameter_dtype
from slipstream.runtime.models.sharing import Sharing, sharing_of
from slipstream.runtime.moving.layer_receiver import FetchRequest, LayerReceiver, ReceiverCallbacks
from slipstream.runtime.moving.layer_sender import LayerSender
from slipstream.runtime.moving.layer_store import LayerStore
from slipstream.runtime.moving.received_part import SteppedPart
from slipstream.runtime.placement import Placement
from slipstream.runtime.processes.worker_start import WorkerSpec
from slipstream.runtime.protocol.coordinator_link import CoordinatorLink
from slipstream.runtime.protocol.form_codec import decode_form
from slipstream.runtime.protocol.network_interfaces import configure_interface
from slipstream.runtime.protocol.node_reports import ReportSender
from slipstream.runtime.protocol.rendezvous import RendezvousError
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.protocol.store import connect_store
from slipstream.runtime.protocol.to_coordinator import (
    FetchFailed,
    FetchUpToDate,
    Injected,
    JoinWorker,
    WorkerStatus,
)
from slipstream.runtime.protocol.to_worker import Leave, ToWorker, Train
from slipstream.runtime.ranks.worker_group import WorkerGroup, enter_group
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.layer_values import Form
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.replay.stuck_calls import OPEN_CALLS
from slipstream.runtime.replay.torch_groups import TCPStore
from slipstream.runtime.run_identity import NO_IDENTITY, RunIdentity
from slipstream.runtime.state.held_layers import build_holding, build_layer
from slipstream.runtime.worker.checkpointer import Checkpointer
from slipstream.runtime.worker.device_memory import DeviceMemory
from slipstream.runtime.worker.injected_faults import Injector
from slipstream.schedules.program import WorkerProgram
from slipstream.schedules.schedule import Schedule, Worker

WAITING_PREFIX = "waits"
"""First word of the description of an activity in which the worker waits for others."""


class Activity:
    """What a worker is doing now, set by the thread that computes."""

    def __init__(self) -> None:
        self._doing: tuple[str | tuple[int, int], float, tuple[Worker, ...]] = (
            "begins an order",
            time.monotonic(),
            (),
        )

    @property
    def doing(self) -> str | tuple[int, int]:
        """Description of the activity; for an op, its iteration and its index in the program."""
        return self._doing[0]

    def set_activity(self, what: str | tuple[int, int], awaited: Collection[Worker] = ()) -> None:
        """Record the activity that begins now: a description, or an iteration and an op's index.

        A description of waiting begins with `WAITING_PREFIX`; the worker then waits for those in
        `awaited`, or for node 0.
        """
        self._doing = what, time.monotonic(), tuple(awaited)

    def build_status(
        self, worker: Worker, program: WorkerProgram, thread: int | None
    ) -> WorkerStatus:
        """Return the activity as a message.

        `thread` is the identifier of the thread that computes; if it is inside a call that waits
        for others, the message names the call. None: no such thread.
        """
        # What is recorded says when the activity began; a call that hangs in it says more.
        doing, since, awaited = self._doing
        if not isinstance(doing, str):
            iteration, place = doing
            doing = f"iteration {iteration}, {program.ops[place]}"
        call = None if thread is None else OPEN_CALLS.call_of_thread(thread)
        if call is not None:
            doing, since, awaited = f"{doing}: {call.what}", call.began, call.awaited
        return WorkerStatus(
            worker,
            doing,
            time.monotonic() - since,
            awaited=awaited,
            waits=call is not None or doing.startswith(WAITING_PREFIX),
        )


WorkerLink = CoordinatorLink[ToWorker, WorkerSetup]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Objects that a worker's process keeps from order to order."""

    spec: WorkerSpec
    """What this process was started with."""
    group: WorkerGroup | None
    """Group of the worker's processes; None if the worker has one process."""
    channel: WorkerLink
    reporter: ReportSender
    store: TCPStore
    """Store by which process groups find each other."""
    links: GroupCache
    """Process groups that are kept from order to order."""
    setup: WorkerSetup
    device: torch.device
    model: LayeredModel
    sharing: Sharing
    placement: Placement
    corpus: Data
    validation: Data | None
    identity: RunIdentity = NO_IDENTITY
    """What this worker trains, found when the worker was started."""
    forms: Sequence[Form]
    """Shapes and dtypes, on this rank, of each layer's input and the last one's output."""
    rehearsal: Rehearsal = field(default_factory=Rehearsal)
    """Rehearsal of ops, which remembers the layers whose ops have been run once."""
    layer_store: LayerStore
    memory: DeviceMemory
    injector: Injector
    checkpointer: Checkpointer
    layer_sender: LayerSender
    layer_receiver: LayerReceiver

    @property
    def worker(self) -> Worker:
        """Worker of this process."""
        return self.spec.worker

    @property
    def config(self) -> RunConfig:
        """Run configuration from this node's own job file."""
        return self.spec.settings.config

    @property
    def rank(self) -> int:
        """Rank of this process within the worker."""
        return 0 if self.group is None else self.group.rank()

    def list_lasting_sockets(self) -> Sockets:
        """Return the sockets that stay open after an order: those that layers are sent over."""
        return self.layer_sender.list_sockets() | self.layer_receiver.list_sockets()


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderContext:
    """Objects with which this worker carries out one order to train."""

    context: WorkerContext
    order: Train
    program: WorkerProgram
    whole: Schedule | None
    """Schedule of all workers; None unless samples are dealt or evaluations run by it."""
    session: GenerationSession
    activity: Activity
    samples: DealtSamples
    """Samples of each micro-batch, which dealing may exchange between micro-batches."""

    @property
    def worker(self) -> Worker:
        """Worker of this process."""
        return self.context.worker


STORE_TIMEOUT = timedelta(seconds=10)
"""Time limit for reaching a coordinator's store, which answers at once or is gone."""


def build_worker_context(spec: WorkerSpec, channel: WorkerLink) -> WorkerContext:
    """Return the context of this process, with device, model and data ready.

    Sets the process's device, torch's number of threads, and the network interface of gloo and
    NCCL. Raises ConfigError if model or data cannot be loaded, OSError without a route to node 0,
    and RendezvousError if the coordinator is lost and no other one comes in time.
    """
    # The device first, since all that follows is built there.
    setup, settings = channel.setup, spec.settings
    common = setup.common
    config = settings.config
    training, device = config.training, _claim_device(common.device, spec.card)
    torch.set_num_threads(training.threads)
    group = enter_group(spec.rank, training.tensor_parallel)
    # Model and data, and what they are, for the coordinator to compare between workers.
    model = build_model(config.model, training.seed, parameter_dtype(training), device)
    sharing = sharing_of(model)
    corpus = load_data(config, common.microbatches, setup.read)
    validation = load_validation_data(config, common.microbatches)
    digests = digest_data(corpus, validation, training) | common.first_samples
    identity = build_run_identity(
        config, data=digests, microbatches=common.microbatches, columns=common.columns
    )
    # Checkpoints have the state of layers, and of data that are read in order.
    checkpointer = Checkpointer(
        setup,
        settings,
        model.layers,
        spec.worker,
        channel.send,
        sharing,
        identity,
        partial(get_data_state, corpus),
    )
    use_saved_states(corpus, checkpointer.find_data_state)
    layer_store = LayerStore(
        partial(build_layer, model, config=training),
        checkpointer.load,
        build_holding(model, (), training),
        model.device,
    )
    # This may replace the setup by that of another coordinator.
    store = _connect_to_store(spec, channel)
    injector = Injector(
        channel.setup.injections,
        lambda index: channel.send(Injected(spec.worker, index, time.monotonic())),
    )
    return WorkerContext(
        spec=spec,
        group=group,
        channel=channel,
        store=store,
        reporter=ReportSender(spec.rank, channel.send, settings.reports),
        links=GroupCache(common.transport),
        setup=channel.setup,
        device=device,
        model=model,
        sharing=sharing,
        placement=Placement(common.cuts),
        corpus=corpus,
        validation=validation,
        identity=identity,
        forms=list(map(decode_form, common.forms)),
        layer_store=layer_store,
        injector=injector,
        memory=DeviceMemory(spec.worker, device),
        checkpointer=checkpointer,
        layer_receiver=LayerReceiver(
            layer_store.get_module,
            partial(SteppedPart, config=training, device=device, sharing=sharing),
            device,
            settings.secret,
            _FetchReporter(
                spec.worker,
                channel,
                injector,
                partial(move_data_to, corpus) if spec.restarted else lambda _: None,
            ),
            spec.worker,
        ),
        layer_sender=LayerSender(
            configure_interface(spec.coordinator),
            settings.secret,
            common.resilience.fetch_bytes_per_second,
        ),
    )


def _connect_to_store(spec: WorkerSpec, link: WorkerLink) -> TCPStore:
    """Connect to the store of the coordinator, or of the next one if that dies."""
    deadline = time.monotonic() + spec.settings.coordinator_timeout_seconds
    hello = JoinWorker(spec.worker, link.setup.epoch, spec.rank)
    while True:
        try:
            return connect_store(link.setup.store, STORE_TIMEOUT)
        except RendezvousError:
            if time.monotonic() > deadline:
                raise
        with suppress(RendezvousError):
            store = link.follow_new_coordinator(
                hello, Leave, lambda setup: connect_store(setup.store, STORE_TIMEOUT)
            )
            if isinstance(store, TCPStore):
                return store
            deadline = 0.0  # the new coordinator continues without this worker


class _FetchReporter(ReceiverCallbacks):
    # Reports to the coordinator how a fetch goes on. The first part starts a thread that reads data
    # up to the present iteration, and a fetch counts as up to date once that is done, too.
    def __init__(
        self,
        worker: Worker,
        channel: WorkerLink,
        injector: Injector,
        move_data: Callable[[int], None],
    ) -> None:
        self._worker = worker
        self._channel = channel
        self._injector = injector
        self._move_data = move_data
        self._has_begun = False
        self._is_moved = False
        # A fetch that is up to date, while the data are still being read.
        self._up_to_date: FetchRequest | None = None
        self._lock = threading.Lock()

    def on_part_loaded(self, iteration: int) -> None:
        self._injector.fail_if_due(iteration, "loaded")
        with self._lock:
            begins, self._has_begun = not self._has_begun, True
        if begins:
            threading.Thread(
                target=self._read_data, args=(iteration,), daemon=True, name="moving the data"
            ).start()

    def on_up_to_date(self, fetch: FetchRequest) -> None:
        self._injector.fail_if_due(fetch.order, "followed")
        with self._lock:
            self._up_to_date = fetch
        self._report_up_to_date()

    def _read_data(self, iteration: int) -> None:
        # A worker that joins late may have to read a stream of data from its last saved state on.
        # It is up to date only after that: nobody waits for it meanwhile.
        self._move_data(iteration)
        with self._lock:
            self._is_moved = True
        self._report_up_to_date()

    def _report_up_to_date(self) -> None:
        with self._lock:
            fetch = None
            if self._is_moved:
                fetch, self._up_to_date = self._up_to_date, None
        if fetch is not None:
            self._channel.send(FetchUpToDate(self._worker, fetch.number))

    def on_fetch_failed(self, fetch: FetchRequest, reason: str, *, unreachable: bool) -> None:
        self._channel.send(FetchFailed(self._worker, fetch.number, reason, unreachable))


def _claim_device(kind: str, card: int | None) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    assert card is not None
    torch.cuda.set_device(card)
    return torch.device("cuda", card)
