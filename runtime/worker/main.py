"""One worker's process: it builds its layers, and carries out the coordinator's orders until it may leave."""

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import msgspec
import torch

from runtime.config import ModelConfig, RunConfig
from runtime.errors import first_line
from runtime.model.data import load_corpus, load_validation
from runtime.model.digest import tensor_digest
from runtime.model.holding import Holding, build_holding
from runtime.model.layers import model_for, parameter_dtype
from runtime.model.parameters import save_layer
from runtime.model.shards import shards_of, whole_state
from runtime.model.sharing import sharing_of
from runtime.model.slices import SliceRunner
from runtime.model.token_data import BadTokenError
from runtime.model.worker_group import enter_group, first_rank
from runtime.processes.worker_start import WorkerSpec
from runtime.protocol import to_worker
from runtime.protocol.channel import Channel
from runtime.protocol.coordinator_link import CoordinatorLink
from runtime.protocol.failure_injection import Injector
from runtime.protocol.rendezvous import RendezvousError, address_towards, connect_store, interface_towards
from runtime.protocol.setup import Setup
from runtime.protocol.to_coordinator import (
    Checkpoints,
    Failed,
    FetchFailed,
    FetchUpToDate,
    Finished,
    Heartbeat,
    Injected,
    JoinWorker,
    Known,
    Leaving,
    Ready,
    SpeedMeasured,
    Status,
)
from runtime.protocol.to_worker import (
    Acknowledged,
    EndOrder,
    Fetch,
    Finish,
    Leave,
    MeasureSpeed,
    Order,
    ReportCheckpoints,
    ReportStatus,
    ToWorker,
    Train,
)
from runtime.replay.communication import Communicator, Membership
from runtime.replay.placement import Placement
from runtime.replay.recorder import OpTime
from runtime.replay.stuck_calls import AbandonedError
from runtime.run_folder import holder
from runtime.worker.checkpoint_reader import CheckpointReader
from runtime.worker.checkpointer import Checkpointer
from runtime.worker.generation import Generation, WorkerContext, WorkerLink
from runtime.worker.layer_receiver import LayerFetch, LayerReceiver, ReceiverEvents, senders_for
from runtime.worker.layer_sender import LayerSender
from runtime.worker.layer_store import LayerStore
from runtime.worker.speed_test import measure_slice
from schedules.codec import decode
from schedules.schedule import Worker

CONNECT_SECONDS = 60.0
HEARTBEATS_PER_TIMEOUT = 5
LOOK_SECONDS = 0.02
"""While a generation should come to its end."""
STORE_TIMEOUT = timedelta(seconds=10)
"""Of another coordinator, which listens."""
RETRY_SECONDS = 0.2
"""From one attempt to reach another coordinator to the next."""
_SPEC = msgspec.json.Decoder(WorkerSpec)


def main(task: bytes) -> int:
    """Run one worker, as a `WorkerSpec` says; its exit status. Errors are reported to the coordinator."""
    spec = _SPEC.decode(task)
    interface = interface_towards(spec.coordinator)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface or "")
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # else it takes the first that matches
    try:
        def connect(hello: msgspec.Struct, seconds: float) -> Channel[ToWorker]:
            return Channel(spec.coordinator, spec.settings.secret, hello, to_worker.decode, seconds)

        channel = connect(JoinWorker(spec.worker, rank=spec.rank), CONNECT_SECONDS)
        link = CoordinatorLink(channel, channel.wait_for(Setup), connect)
        try:
            return _Worker(spec, link).serve()
        except RendezvousError:
            raise
        except Exception as error:
            traceback.print_exc()
            link.send(Failed(spec.worker, f"{type(error).__name__}: {first_line(error)}",
                             everywhere=isinstance(error, BadTokenError)))
        finally:
            link.close()
    except RendezvousError as error:
        # Without node 0 there is no coordinator to report to.
        print(first_line(error), file=sys.stderr)
    return 1


def warm_up() -> None:
    """Spend once, before workers are forked, the time that each would: torch imports much when first used."""
    config = RunConfig(model=ModelConfig(blocks=1, width=2, heads=1, context=2))
    model = model_for(config.model, 0, torch.float32, torch.device("cpu"))
    holding = build_holding(model, range(model.layers), config.training)
    SliceRunner((0, model.layers), holding.modules, model, loss_scale=1.0, config=config)


class _Worker:
    """One worker's part in one run. Its main thread reads the channel, sends heartbeats, and never computes."""

    def __init__(self, spec: WorkerSpec, channel: WorkerLink) -> None:
        self._spec = spec
        self._worker = spec.worker
        self._channel = channel
        self._setup = setup = channel.setup
        self._config = config = spec.settings.config
        training, device = config.training, _claim_device(setup.device, spec.card)
        torch.set_num_threads(training.threads)
        group = enter_group(spec.rank, training.tensor_parallel)
        model = model_for(config.model, training.seed, parameter_dtype(training.dtype), device)
        self._model = model
        self._sharing = sharing = sharing_of(model)
        self._checkpoints = CheckpointReader(setup.first_iteration, spec.settings, model.layers, sharing)
        self._layer_store = LayerStore(self._build, self._checkpoints.load)
        injector = Injector(setup.injections,
                            lambda index: channel.send(Injected(spec.worker, index, time.monotonic())))
        self._context = WorkerContext(
            worker=spec.worker, group=group, channel=channel, store=connect_store(setup.store), setup=setup,
            config=config, device=device, model=model, placement=Placement(setup.cuts),
            corpus=load_corpus(config, setup.microbatches),
            validation=load_validation(config, setup.microbatches),
            forms=[spec.form() for spec in setup.forms], layer_store=self._layer_store, injector=injector,
            checkpointer=Checkpointer(setup, spec.settings, model.layers, spec.worker, channel.send, sharing),
            layer_receiver=LayerReceiver(self._layer_store.fresh, device, spec.settings.secret,
                                         _FetchReports(spec.worker, channel, injector)),
            layer_sender=LayerSender(address_towards(spec.coordinator), spec.settings.secret,
                                     setup.fetch_bytes_per_second))
        self._generation: Generation | None = None
        self._between_ranks: Communicator | None = None
        """Of the last order, where it was to finish."""
        self._finish_order: Finish | None = None
        """The last order, where it was to finish."""
        self._members: tuple[Worker, ...] = ()
        """Of the last order to train."""
        self._finishing = threading.Lock()
        self._error: BaseException | None = None
        self._waker, self._woken = socket.socketpair()
        self._told_to_end = False
        signal.signal(signal.SIGTERM, self._end_soon)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # until now blocked, as in the fork server

    def _end_soon(self, *_: object) -> None:
        """SIGTERM: leave when the others can do without this worker. It may come again: schedulers repeat it."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._told_to_end = True
        self._waker.send(b"!")

    def serve(self) -> int:
        """Handle the coordinator's messages until this worker may leave; the exit status.

        Raises RendezvousError when node 0 is gone and no other comes, and errors of this worker's own.
        """
        if self._spec.restarted:
            # It will most likely play its own role: what takes time is done while the others train.
            self._layer_store.prepare(self._setup.columns[self._worker.column])
        known = None
        while True:
            self._channel.send(Ready(self._worker, self._data_digest(), (self._context.layer_sender.address,),
                                     holder(Path(self._spec.settings.out)), known))
            try:
                return self._follow()
            except CoordinatorGoneError as gone:
                if not self._find_another(str(gone)):
                    return 0
                known = self._known()

    def _data_digest(self) -> str:
        """Of all data that this worker reads."""
        validation = self._context.validation
        return self._context.corpus.digest + ("" if validation is None else f" {validation.digest}")

    def _follow(self) -> int:
        """Do as the coordinator says; the exit status. Raises CoordinatorGoneError."""
        interval = self._setup.heartbeat_timeout_seconds / HEARTBEATS_PER_TIMEOUT
        beat = time.monotonic() + interval
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ending = self._generation is not None and self._generation.ending
                pause = max(0.0, beat - time.monotonic())
                ready = selector.select(min(pause, LOOK_SECONDS) if ending else pause)
                if self._error is not None:
                    raise self._error
                if self._told_to_end:
                    self._told_to_end = False
                    self._woken.recv(1)
                    self._channel.send(Leaving(self._worker))
                for message in self._read() if any(key.fileobj is self._channel for key, _ in ready) else ():
                    if isinstance(message, Leave):
                        return 0
                    self._handle(message)
                if time.monotonic() >= beat:
                    self._channel.send(Heartbeat())
                    beat = time.monotonic() + interval
                if self._generation is not None and self._generation.ending:
                    self._generation.abandon_if_stuck()

    def _read(self) -> list[ToWorker]:
        try:
            return self._channel.read()
        except RendezvousError as error:
            raise CoordinatorGoneError(str(error)) from None

    def _find_another(self, gone: str) -> bool:
        """Hold still until another coordinator is there; False: this worker may leave.

        Raises RendezvousError when none comes in time, and errors of this worker's own.
        """
        seconds = self._spec.settings.coordinator_timeout_seconds
        print(f"{gone}; waits {seconds:g} s for another coordinator", file=sys.stderr, flush=True)
        deadline = time.monotonic() + seconds
        self._context.layer_receiver.drop(sys.maxsize)
        generation = self._generation
        if generation is not None:
            generation.end_without_coordinator()
        while time.monotonic() < deadline:
            if self._error is not None:
                raise self._error
            if self._told_to_end:
                raise RendezvousError(f"{gone}; told to end")
            if generation is not None and not generation.paused:
                generation.abandon_if_stuck()
                time.sleep(LOOK_SECONDS)
                continue
            with contextlib.suppress(RendezvousError):
                store = self._channel.follow_another(
                    JoinWorker(self._worker, self._channel.setup.epoch, self._spec.rank), Leave,
                    lambda setup: connect_store(setup.store, STORE_TIMEOUT))
                if isinstance(store, Leave):
                    return False
                self._context = replace(self._context, store=store, setup=self._channel.setup)
                self._context.injector.replace(self._channel.setup.injections)
                return True
            time.sleep(RETRY_SECONDS)
        raise RendezvousError(f"{gone}; no other coordinator came within {seconds:g} s")

    def _known(self) -> Known | None:
        """What the new coordinator must know; None where it goes on without what this worker holds."""
        generation = self._generation
        if self._channel.setup.forget:
            if generation is not None:
                generation.let_go()
            self._generation = None
            with self._finishing:
                self._layer_store.clear()
            return None
        if generation is not None:
            return generation.known()
        if self._finish_order is None:
            return Known(0, (), self._setup.first_iteration - 1, (), None, pending=False)
        return Known(
            self._finish_order.number, self._members, self._finish_order.first_iteration - 1,
            self._layer_store.holding.ranges, self._finish_order.factor, pending=False,
            begun=self._finish_order.first_iteration - 1)

    def _handle(self, message: ToWorker) -> None:
        generation = self._generation
        match message:
            case Train():
                self._finish_order = None
                schedule = decode(bytes(message.schedule))
                self._members = tuple(seat.worker for seat in schedule.seats)
                if self._worker in schedule.seat_of:
                    self._generation = next_one = Generation(self._context, message, schedule)
                    self._begin(f"generation {message.number}", lambda: self._train(message, next_one, generation))
                else:
                    self._context.layer_receiver.drop(message.number)
                    self._generation = None
                    self._begin("leaving the order", lambda: self._stand_aside(message, generation))
            case Finish():
                self._generation, self._finish_order = None, message
                self._begin("finish", lambda: self._finish(message, generation))
            case EndOrder() if generation is not None and generation.number == message.order:
                generation.end()
            case Acknowledged() if generation is not None and generation.number == message.order:
                generation.acknowledged(message)
            case Fetch():
                self._context.layer_receiver.begin(_fetch_for(self._worker, message, self._spec.rank))
            case MeasureSpeed():
                self._begin("speed test", lambda: self._measure_speed(message))
            case ReportStatus():
                self._channel.send(self._status())
            case ReportCheckpoints():
                self._begin("checkpoints", lambda: self._channel.send(
                    Checkpoints(self._worker, self._checkpoints.iterations())))

    def _status(self) -> Status:
        """What this worker does. It has no generation before its first order, and after its last."""
        if self._generation is not None:
            return self._generation.status()
        if self._finishing.locked():
            return Status(self._worker, "writes its parameters", 0.0, waits=False)
        return Status(self._worker, "waits for an order", 0.0, waits=True)

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        """Run long work in a thread; an error there ends the main thread."""
        def run() -> None:
            try:
                if self._context.device.type == "cuda":
                    torch.cuda.set_device(self._context.device)  # of each thread its own
                work()
            except AbandonedError:
                pass
            except BaseException as error:
                self._error = error
                self._waker.send(b"!")

        threading.Thread(target=run, daemon=True, name=name).start()

    def _train(self, order: Train, generation: Generation, previous: Generation | None) -> None:
        with self._finishing:  # the order to finish may have ended early
            self._leave(previous, order)
            if order.restore is not None:
                self._layer_store.clear()
                self._checkpoints.go_back(order.first_iteration)
                self._context.checkpointer.go_back(order.first_iteration)
        generation.run()

    def _stand_aside(self, order: Train, previous: Generation | None) -> None:
        """Take no part in an order. What it held is out of date from now on."""
        self._leave(previous, order)
        self._layer_store.clear()

    def _measure_speed(self, request: MeasureSpeed) -> None:
        """Run ops of slices that nobody waits for."""
        context, times = self._context, list[OpTime]()
        for number, layers in request.slices:
            found = context.placement.range_of(layers)
            runner = SliceRunner(found, self._build(range(*found)).modules, context.model,
                                 loss_scale=self._setup.loss_scale, config=self._config)
            times += measure_slice(number, runner, (context.forms[layers[0]], context.forms[layers[1]]), context,
                                   request)
        self._channel.send(SpeedMeasured(self._worker, tuple(times)))

    def _leave(self, previous: Generation | None, order: Order) -> None:
        """Close the last generation's connections, which peers may have used until now; undo what is not committed."""
        if previous is not None:
            if self._between_ranks is not None:  # all ranks have done with it: they have met for another order since
                self._between_ranks.drop()
                self._between_ranks = None
            previous.leave(order)
            if not previous.fits(order):
                self._layer_store.clear()
            self._context.layer_sender.generation_begins(order.number, order.first_iteration - 1)

    def _finish(self, order: Finish, previous: Generation | None) -> None:
        """Write some layers, and report the digests of all, which must agree between peers."""
        with self._finishing:
            self._leave(previous, order)
            self._connect_ranks(order)
            holding = self._layer_store.holding
            for layer, worker in order.writers:
                if worker == self._worker and order.parameters:
                    copies = self._sharing.copies(layer)
                    whole = whole_state({f"model.{name}": tensor for name, tensor in
                                         holding.modules[layer].state_dict().items() if name not in copies},
                                        shards_of(holding.modules[layer]), self._context.group)
                    if first_rank():
                        save_layer(Path(self._spec.settings.out), layer,
                                   {key.removeprefix("model."): tensor for key, tensor in whole.items()})
            self._context.checkpointer.save_last(order, self._layer_store)
            digests = {name: tensor_digest(name, parameter) for name, parameter in holding.parameters().items()}
            self._channel.send(Finished(self._worker, order.number, digests))

    def _connect_ranks(self, order: Finish) -> None:
        """The ranks of this worker are to gather their shards, until they leave or there is another order."""
        context = self._context
        if context.group is not None:
            self._between_ranks = Communicator(
                Membership(order.number, {self._worker: 0}, self._worker, context.group), {},
                transport=context.setup.transport, device=context.device, store=context.store)

    def _build(self, layers: Iterable[int]) -> Holding:
        return build_holding(self._model, layers, self._config.training)


class CoordinatorGoneError(Exception):
    """The connection to the coordinator has ended. The message is one line."""


class _FetchReports(ReceiverEvents):
    """Reports to the coordinator how fetches go."""

    def __init__(self, worker: Worker, channel: WorkerLink, injector: Injector) -> None:
        self._worker = worker
        self._channel = channel
        self._injector = injector

    def loaded(self, iteration: int) -> None:
        self._injector.at(iteration, "loaded")

    def up_to_date(self, fetch: LayerFetch) -> None:
        self._injector.at(fetch.generation, "followed")
        self._channel.send(FetchUpToDate(self._worker, fetch.number))

    def failed(self, fetch: LayerFetch) -> None:
        self._channel.send(FetchFailed(self._worker, fetch.number))


def _fetch_for(worker: Worker, fetch: Fetch, rank: int) -> LayerFetch:
    """One worker's part; where it has none, this ends what was fetched in the same order."""
    return LayerFetch(fetch.number, fetch.order, senders_for(worker, fetch.moves, fetch.addresses, rank), follow=True)


def _claim_device(kind: str, card: int | None) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    assert card is not None
    torch.cuda.set_device(card)
    return torch.device("cuda", card)
