"""One worker's process: it builds its layers, and follows the orders of the launcher until it may leave."""

import contextlib
import os
import sys
import threading
import traceback
from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from runtime.config import ModelConfig, RunConfig
from runtime.coordinator.membership import Member
from runtime.errors import first_line
from runtime.model.checkpoint import load, open_checkpoint
from runtime.model.data import load_corpus
from runtime.model.digest import tensor_digest
from runtime.model.layers import model_for, parameter_dtype
from runtime.model.optimizer import StageOptimizer, build_optimizer
from runtime.model.parameters import save_layer
from runtime.model.stage import Stage
from runtime.processes.worker_start import Birth
from runtime.protocol.failure_injection import Injector
from runtime.protocol.orders import FETCHES_KEY, Finish, Leave, Train, await_fetch, await_order
from runtime.protocol.rendezvous import RendezvousError, address_towards, connect_store, interface_towards
from runtime.protocol.reports import Failed, Finished, Followed, Ready, Unfollowed, push
from runtime.protocol.setup import JOIN_TIMEOUT, SETUP_KEY, Setup
from runtime.worker.checkpointer import Keeper
from runtime.worker.generation import Plant, Shift
from runtime.worker.heartbeat import Pulse
from runtime.worker.layer_receiver import LayerFetch, LayerReceiver, ReceiverEvents, senders_for
from runtime.worker.layer_sender import LayerSender
from runtime.worker.stage_store import StageStore
from schedules.codec import decode
from schedules.schedule import Worker


def main(birth: Birth) -> int:
    """Run one worker to its end; its exit status. What goes wrong is reported to the launcher."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(birth.rendezvous) or "")
    try:
        store = connect_store(birth.rendezvous)
        try:
            _Worker(birth, store).live()
        except (RendezvousError, DistError):
            raise
        except Exception as error:
            traceback.print_exc()
            push(store, Failed(birth.worker, f"{type(error).__name__}: {first_line(error)}"))
        else:
            return 0
    except (RendezvousError, DistError) as error:
        # Without node 0 there is nobody to tell.
        print(first_line(error), file=sys.stderr)
    return 1


def warm_up() -> None:
    """Spend once, before workers are forked, the time that each would: torch imports much when first used."""
    config = RunConfig(model=ModelConfig(blocks=1, width=2, heads=1, context=2))
    model = model_for(config.model, 0, torch.float32, torch.device("cpu"))
    stage = Stage(0, (0, model.layers), model, first=True, last=True, loss_scale=1.0, config=config)
    build_optimizer(stage.modules, config.training)


class _Worker:
    """One worker's part in one run."""

    def __init__(self, birth: Birth, store: TCPStore) -> None:
        self._birth = birth
        self._worker = birth.worker
        self._store = store
        self._setup = setup = msgspec.json.decode(store.get(SETUP_KEY), type=Setup)
        pulse = Pulse(birth.rendezvous, birth.worker, after=birth.after,
                      timeout_seconds=setup.heartbeat_timeout_seconds)
        training, device = setup.config.training, _claim_device(setup.device, birth.card)
        torch.set_num_threads(training.threads)
        model = model_for(setup.config.model, training.seed, parameter_dtype(training.dtype), device)
        self._model = model
        self._holdings = StageStore(self._build, self._restore)
        injector = Injector(setup.injections, birth.worker, pulse.store)
        follower = LayerReceiver(self._holdings.fresh, training, device,
                                 _FetchReports(birth.worker, pulse.store, injector))
        threading.Thread(target=_hear_fetches, daemon=True, name="fetches", args=(
            birth.worker, connect_store(birth.rendezvous), store.add(FETCHES_KEY, 0), follower)).start()
        self._plant = Plant(
            worker=birth.worker, store=store, setup=setup, device=device,
            layers=model.layers, corpus=load_corpus(setup.config), holdings=self._holdings, pulse=pulse,
            boundaries=[form.boundary() for form in setup.forms],
            injector=injector, keeper=Keeper(setup, model.layers, store, birth.worker), follower=follower,
            source=LayerSender(address_towards(birth.rendezvous), setup.fetch_bytes_per_second))
        self._shift: Shift | None = None

    def live(self) -> None:
        """Follow orders. Raises whatever goes wrong within this worker."""
        if self._birth.after:
            # It will most likely play its own role: what takes time is done while the others train.
            self._holdings.prepare(index for index, column in enumerate(self._setup.columns)
                                   if column == self._worker.column)
        push(self._store, Ready(self._worker, self._plant.corpus.digest, self._plant.source.address))
        founder = Member(self._setup.lighthouse, self._worker) if self._birth.after == 0 else None
        number, taken_in = self._birth.after, False
        while True:
            number += 1
            order = await_order(self._store, number)
            self._end_shift(order)
            match order:
                case Leave():
                    break
                case Finish():
                    self._finish(order)
                case Train():
                    schedule = decode(bytes(order.schedule))
                    if self._worker in schedule.seat_of:
                        taken_in = True
                        self._shift = Shift(self._plant, order, schedule)
                        push(self._store, self._shift.work(founder if order.founding else None, JOIN_TIMEOUT))
                    elif taken_in:
                        print(f"worker {self._worker} was given up by the others, in order {number}", file=sys.stderr)
                        break
                    else:
                        self._plant.follower.drop(order.number)
        if founder is not None:
            founder.close()

    def _end_shift(self, order: Train | Finish | Leave) -> None:
        """Let go of the connections, which others may have read from until now, and forget what was not committed."""
        if self._shift is not None:
            self._shift.end()
            if not isinstance(order, Leave):
                self._shift.go_back(order.first_iteration - 1, order.factor)
                self._plant.source.generation_begins(order.number, order.first_iteration - 1)
            self._shift = None

    def _build(self, index: int) -> tuple[Stage, StageOptimizer]:
        setup = self._setup
        start, end = setup.ranges[index]
        stage = Stage(index, (start, end), self._model, first=start == 0, last=end == self._model.layers,
                      loss_scale=setup.loss_scale, config=setup.config)
        return stage, build_optimizer(stage.modules, setup.config.training)

    def _restore(self, stage: Stage, optimizer: StageOptimizer) -> None:
        """A stage is built as it is before iteration 0; where this run goes on from a checkpoint, that is read.

        Only before the first iteration: later the checkpoint may be gone, swept away by newer ones.
        """
        if self._setup.resume is not None:
            for layer, state in load(open_checkpoint(Path(self._setup.resume)), range(*stage.layers)).items():
                optimizer.load_layer_state(layer, state)

    def _finish(self, order: Finish) -> None:
        """Write some layers; tell the digests of all, which must agree between peers."""
        stages = self._holdings.stages.values()
        for layer, worker in order.writers:
            if worker == self._worker:
                stage = next(stage for stage in stages if layer in range(*stage.layers))
                save_layer(Path(self._birth.out), layer, stage.layer_state(layer))
        self._plant.keeper.save_last(order, self._holdings)
        digests = {name: tensor_digest(name, parameter) for stage in stages
                   for name, parameter in stage.parameters().items()}
        push(self._store, Finished(self._worker, order.number, digests))


class _FetchReports(ReceiverEvents):
    """Tells the launcher how fetches go."""

    def __init__(self, worker: Worker, store: TCPStore, injector: Injector) -> None:
        self._worker = worker
        self._store = store
        self._injector = injector

    def loaded(self, iteration: int) -> None:
        self._injector.at(iteration, "loaded")

    def up_to_date(self, fetch: LayerFetch) -> None:
        self._injector.at(fetch.generation, "followed")
        push(self._store, Followed(self._worker, fetch.number))

    def failed(self, fetch: LayerFetch) -> None:
        # When node 0 is gone, the main thread finds out by itself.
        with contextlib.suppress(RendezvousError):
            push(self._store, Unfollowed(self._worker, fetch.number))


def _hear_fetches(worker: Worker, store: TCPStore, after: int, receiver: LayerReceiver) -> None:
    """Begin each `Fetch` as it comes; `store` is this thread's own."""
    # When node 0 is gone there is nothing to hear; the main thread finds out by itself.
    with contextlib.suppress(RendezvousError):
        number = after
        while True:
            number += 1
            fetch = await_fetch(store, number)
            stages = next((stages for one, stages in fetch.needs if one == worker), ())
            senders = senders_for(worker, fetch.moves, fetch.addresses)
            receiver.begin(LayerFetch(fetch.number, fetch.order, stages, senders, follow=True))


def _claim_device(kind: str, card: int | None) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    assert card is not None
    torch.cuda.set_device(card)
    return torch.device("cuda", card)
