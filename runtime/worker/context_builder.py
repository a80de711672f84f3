"""Build the objects that a worker needs before it is ready: device, model, data, and what lasts from order to order."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch

from slipstream.runtime.data.data import (
    get_data_state,
    load_data,
    load_validation_data,
    move_data_to,
    use_saved_states,
)
from slipstream.runtime.data.dealt_samples import digest_data
from slipstream.runtime.models.identity import build_run_identity
from slipstream.runtime.models.layered_model import build_model, parameter_dtype
from slipstream.runtime.models.sharing import sharing_of
from slipstream.runtime.moving.layer_receiver import FetchRequest, LayerReceiver, ReceiverCallbacks
from slipstream.runtime.moving.layer_sender import LayerSender
from slipstream.runtime.moving.layer_store import LayerStore
from slipstream.runtime.moving.received_part import SteppedPart
from slipstream.runtime.placement import Placement
from slipstream.runtime.processes.worker_start import WorkerSpec
from slipstream.runtime.protocol.form_codec import decode_form
from slipstream.runtime.protocol.network_interfaces import configure_interface
from slipstream.runtime.protocol.node_reports import ReportSender
from slipstream.runtime.protocol.rendezvous import RendezvousError
from slipstream.runtime.protocol.store import connect_store
from slipstream.runtime.protocol.to_coordinator import FetchFailed, FetchUpToDate, Injected, JoinWorker
from slipstream.runtime.protocol.to_worker import Leave
from slipstream.runtime.ranks.worker_group import enter_group
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.torch_groups import TCPStore
from slipstream.runtime.state.held_layers import build_holding, build_layer
from slipstream.runtime.worker.checkpointer import Checkpointer
from slipstream.runtime.worker.context import WorkerContext, WorkerLink
from slipstream.runtime.worker.device_memory import DeviceMemory
from slipstream.runtime.worker.injector import Injector
from slipstream.schedules.schedule import Worker

STORE_TIMEOUT = timedelta(seconds=10)
"""Time limit for reaching the store of a coordinator, which either listens or is gone."""


def build_worker_context(spec: WorkerSpec, channel: WorkerLink) -> WorkerContext:
    """Build the context of this process's worker. Errors end the worker."""
    setup, settings = channel.setup, spec.settings
    config = settings.config
    training, device = config.training, _claim_device(setup.device, spec.card)
    torch.set_num_threads(training.threads)
    group = enter_group(spec.rank, training.tensor_parallel)
    model = build_model(config.model, training.seed, parameter_dtype(training), device)
    sharing = sharing_of(model)
    corpus = load_data(config, setup.microbatches, setup.read)
    validation = load_validation_data(config, setup.microbatches)
    digests = digest_data(corpus, validation, training) | setup.first_samples
    identity = build_run_identity(config, data=digests, microbatches=setup.microbatches,
                                  columns=setup.columns)
    checkpointer = Checkpointer(setup, settings, model.layers, spec.worker, channel.send, sharing,
                                identity, partial(get_data_state, corpus))
    use_saved_states(corpus, checkpointer.find_data_state)
    layer_store = LayerStore(partial(build_layer, model, config=training), checkpointer.load,
                             build_holding(model, (), training), model.device)
    store = _connect_to_store(spec, channel)  # which may replace the setup by that of another coordinator
    injector = Injector(channel.setup.injections,
                        lambda index: channel.send(Injected(spec.worker, index, time.monotonic())))
    return WorkerContext(
        worker=spec.worker, group=group, channel=channel, store=store,
        reporter=ReportSender(spec.rank, channel.send, settings.reports),
        links=GroupCache(setup.transport), setup=channel.setup,
        config=config, out=settings.out, device=device, model=model, sharing=sharing, placement=Placement(setup.cuts),
        corpus=corpus, validation=validation, identity=identity,
        forms=list(map(decode_form, setup.forms)), layer_store=layer_store, injector=injector,
        memory=DeviceMemory(spec.worker, device),
        checkpointer=checkpointer,
        layer_receiver=LayerReceiver(
            layer_store.get_module,
            partial(SteppedPart, config=training, device=device, sharing=sharing), device, settings.secret,
            _FetchReporter(spec.worker, channel, injector,
                           partial(move_data_to, corpus) if spec.restarted else lambda _: None), spec.worker),
        layer_sender=LayerSender(configure_interface(spec.coordinator), settings.secret, setup.fetch_bytes_per_second))


def _connect_to_store(spec: WorkerSpec, link: WorkerLink) -> TCPStore:
    """Return a connection to node 0's store, or to the store of a new node 0 if the first has died. Raises
    RendezvousError."""
    deadline = time.monotonic() + spec.settings.coordinator_timeout_seconds
    hello = JoinWorker(spec.worker, link.setup.epoch, spec.rank)
    while True:
        try:
            return connect_store(link.setup.store, STORE_TIMEOUT)
        except RendezvousError:
            if time.monotonic() > deadline:
                raise
        with suppress(RendezvousError):
            store = link.follow_new_coordinator(hello, Leave, lambda setup: connect_store(setup.store, STORE_TIMEOUT))
            if isinstance(store, TCPStore):
                return store
            deadline = 0.0  # the new coordinator continues without this worker


class _FetchReporter(ReceiverCallbacks):
    """Callbacks that report the progress of fetches to the coordinator.

    A worker that joins late may have to read a stream of data from its last saved state on, by `move_data`. It does so
    in a thread during its first fetch, and is up to date only after that: nobody waits for it meanwhile.
    """

    def __init__(self, worker: Worker, channel: WorkerLink, injector: Injector, move_data: Callable[[int], None]
                 ) -> None:
        self._worker = worker
        self._channel = channel
        self._injector = injector
        self._move_data = move_data
        self._has_begun = False
        self._is_moved = False
        self._up_to_date: FetchRequest | None = None
        """Fetch that is up to date, if the data are still being read."""
        self._lock = threading.Lock()

    def on_part_loaded(self, iteration: int) -> None:
        self._injector.fail_if_due(iteration, "loaded")
        with self._lock:
            begins, self._has_begun = not self._has_begun, True
        if begins:
            threading.Thread(target=self._read_data, args=(iteration,), daemon=True, name="moving the data").start()

    def on_up_to_date(self, fetch: FetchRequest) -> None:
        self._injector.fail_if_due(fetch.order, "followed")
        with self._lock:
            self._up_to_date = fetch
        self._report_up_to_date()

    def _read_data(self, iteration: int) -> None:
        self._move_data(iteration)
        with self._lock:
            self._is_moved = True
        self._report_up_to_date()

    def _report_up_to_date(self) -> None:
        with self._lock:
            fetch, self._up_to_date = (self._up_to_date, None) if self._is_moved else (None, self._up_to_date)
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
