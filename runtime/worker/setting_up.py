"""What a worker makes before it is ready: device, model, data, and the parts that last from order to order."""

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
from torch import nn

from slipstream.runtime.config import RunConfig
from slipstream.runtime.model.computing.forms import forms
from slipstream.runtime.model.data.data import load_corpus, load_validation
from slipstream.runtime.model.layers.layered_model import LayeredModel, model_for, parameter_dtype
from slipstream.runtime.model.layers.sharing import sharing_of
from slipstream.runtime.model.layers.worker_group import enter_group, standing_in
from slipstream.runtime.model.ranks.own_ranks import RankForms
from slipstream.runtime.model.ranks.rank_holding import RankHolding
from slipstream.runtime.model.ranks.rank_parts import RankParts
from slipstream.runtime.model.state.followed_part import SteppedPart
from slipstream.runtime.model.state.holding import build_holding, build_layer
from slipstream.runtime.processes.worker_start import WorkerSpec
from slipstream.runtime.protocol.failure_injection import Injector
from slipstream.runtime.protocol.node_reports import Reporter
from slipstream.runtime.protocol.rendezvous import RendezvousError, address_towards, connect_store
from slipstream.runtime.protocol.to_coordinator import FetchFailed, FetchUpToDate, Injected, JoinWorker
from slipstream.runtime.protocol.to_worker import Leave
from slipstream.runtime.replay.links import Links
from slipstream.runtime.replay.placement import Placement
from slipstream.runtime.torch_private import TCPStore
from slipstream.runtime.worker.checkpointer import Checkpointer
from slipstream.runtime.worker.context import WorkerContext, WorkerLink
from slipstream.runtime.worker.device_memory import DeviceMemory
from slipstream.runtime.worker.layer_receiver import LayerFetch, LayerReceiver, ReceiverEvents
from slipstream.runtime.worker.layer_sender import LayerSender
from slipstream.runtime.worker.layer_store import LayerStore, Restore
from slipstream.runtime.worker.rank_stores import RankStores
from slipstream.schedules.schedule import Worker

STORE_TIMEOUT = timedelta(seconds=10)
"""Of a coordinator that listens, or is gone."""


def set_up(spec: WorkerSpec, channel: WorkerLink) -> WorkerContext:
    """All of it, for this process. Raises errors of its own that end the worker."""
    setup, settings = channel.setup, spec.settings
    config = settings.config
    training, device = config.training, _claim_device(setup.device, spec.card)
    torch.set_num_threads(training.threads)
    group = enter_group(spec.rank, training.tensor_parallel // spec.stands_for, spec.stands_for)
    model = model_for(config.model, training.seed, parameter_dtype(training), device)
    passed = [one.form() for one in setup.forms]
    sharing = sharing_of(model)
    checkpointer = Checkpointer(setup, settings, model.layers, spec.worker, channel.send, sharing)
    by_rank = [] if spec.stands_for == 1 else [_RankModel(config, device, rank) for rank in _ranks(spec)]
    layer_store = _layer_store(spec, model, checkpointer.load, by_rank)
    injector = Injector(setup.injections, lambda index: channel.send(Injected(spec.worker, index, time.monotonic())))
    return WorkerContext(
        worker=spec.worker, group=group, channel=channel, store=_reach_store(spec, channel),
        reporter=Reporter(spec.rank, channel.send, settings.reports),
        links=Links(setup.transport), setup=channel.setup,
        config=config, out=settings.out, device=device, model=model, sharing=sharing, placement=Placement(setup.cuts),
        corpus=load_corpus(config, setup.microbatches), validation=load_validation(config, setup.microbatches),
        forms=passed if spec.stands_for == 1 else [forms(model, config)[cut] for cut in setup.cuts],
        by_rank=RankForms(passed, spec.stands_for), layer_store=layer_store, injector=injector,
        memory=DeviceMemory(spec.worker, device),
        checkpointer=checkpointer,
        layer_receiver=LayerReceiver(
            lambda rank, layer: layer_store.at(rank).module(layer),
            partial(SteppedPart, config=training, device=device, sharing=sharing), device, settings.secret,
            _FetchReports(spec.worker, channel, injector), _ranks(spec)),
        layer_sender=LayerSender(address_towards(spec.coordinator), settings.secret, setup.fetch_bytes_per_second))


def _reach_store(spec: WorkerSpec, link: WorkerLink) -> TCPStore:
    """Node 0's store; that of another node 0, where the first has died meanwhile. Raises RendezvousError."""
    deadline = time.monotonic() + spec.settings.coordinator_timeout_seconds
    hello = JoinWorker(spec.worker, link.setup.epoch, spec.rank, spec.stands_for)
    while True:
        try:
            return connect_store(link.setup.store, STORE_TIMEOUT)
        except RendezvousError:
            if time.monotonic() > deadline:
                raise
        with suppress(RendezvousError):
            store = link.follow_another(hello, Leave, lambda setup: connect_store(setup.store, STORE_TIMEOUT))
            if isinstance(store, TCPStore):
                return store
            deadline = 0.0  # that goes on without this worker


def _layer_store(spec: WorkerSpec, model: LayeredModel, restore: Restore,
                 by_rank: Sequence["_RankModel"]) -> LayerStore:
    """What holds layers; those of each rank, too, where this process stands for several."""
    training = spec.settings.config.training

    build, device = partial(build_layer, model, config=training), model.device
    if spec.stands_for == 1:
        return LayerStore(build, restore, build_holding(model, (), training), device)
    parts = [rank.parts() for rank in by_rank]
    ranks = [(LayerStore(rank.build, restore, mine, device), rank.standing_in)
             for rank, mine in zip(by_rank, parts, strict=True)]
    return RankStores(build, restore, ranks, RankHolding(training, parts, sharing_of(model)), device)


def _ranks(spec: WorkerSpec) -> range:
    """Those that this process stands for."""
    return range(spec.rank * spec.stands_for, (spec.rank + 1) * spec.stands_for)


class _RankModel:
    """The model as a rank of a whole worker has it, for which this process stands.

    Made once, before any thread computes: transformers sets torch's default dtype while it makes one.
    """

    def __init__(self, config: RunConfig, device: torch.device, rank: int) -> None:
        self._training = config.training
        self.standing_in = partial(standing_in, config.training.tensor_parallel, rank)
        with self.standing_in():
            self._model = model_for(config.model, config.training.seed, parameter_dtype(config.training), device)

    def build(self, layer: int, *, filled: bool) -> nn.Module:
        """A layer as that rank has it; unless `filled`, its state is to be loaded."""
        with self.standing_in():
            return build_layer(self._model, layer, self._training, filled=filled)

    def parts(self) -> RankParts:
        """What that rank holds: nothing yet."""
        with self.standing_in():
            return RankParts({}, self._training, sharing_of(self._model))


class _FetchReports(ReceiverEvents):
    """Reports to the coordinator how fetches go."""

    def __init__(self, worker: Worker, channel: WorkerLink, injector: Injector) -> None:
        self._worker = worker
        self._channel = channel
        self._injector = injector

    def loaded(self, iteration: int) -> None:
        self._injector.at(iteration, "loaded")

    def up_to_date(self, fetch: LayerFetch) -> None:
        self._injector.at(fetch.order, "followed")
        self._channel.send(FetchUpToDate(self._worker, fetch.number))

    def failed(self, fetch: LayerFetch) -> None:
        self._channel.send(FetchFailed(self._worker, fetch.number))


def _claim_device(kind: str, card: int | None) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    assert card is not None
    torch.cuda.set_device(card)
    return torch.device("cuda", card)
