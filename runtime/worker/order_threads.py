"""What takes a worker long: its part in orders. Each runs in a thread of its own."""

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from slipstream.runtime.model.checkpoints.parameters import save_layer_when_there_is_room
from slipstream.runtime.model.layers.shards import whole_layer
from slipstream.runtime.model.state.digest import tensor_digest
from slipstream.runtime.model.state.part_state import PartState
from slipstream.runtime.model.state.version import VersionError
from slipstream.runtime.protocol.to_coordinator import Finished, Note
from slipstream.runtime.protocol.to_worker import Finish, Order, Train
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.session import Session
from slipstream.runtime.replay.stuck_calls import AbandonedError
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.worker.context import WorkerContext
from slipstream.runtime.worker.generation import Generation
from slipstream.runtime.worker.layers_of_order import move_layers


class OrderThreads:
    """Begins threads; an error in one is told to `failed`.

    `previous` is the generation of the order before, where this worker took part in that.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._finishing = threading.Lock()
        """Held while the layers are written at the end, and while an order changes what is held: that to finish may
        end early."""
        self._between_ranks: Session | None = None
        """Of the last order to finish."""
        self._next = threading.Event()
        """Set when the next order has come; another one for each order."""

    @property
    def finishing(self) -> bool:
        """Whether parameters are being written."""
        return self._finishing.locked()

    def train(self, context: WorkerContext, order: Train, generation: Generation, previous: Generation | None) -> None:
        """Take part in an order."""
        self._begins()

        def work() -> None:
            with self._finishing:
                leave(context, previous, order)
                if previous is not None and self._between_ranks is not None:
                    self._between_ranks.close()  # all ranks have met for another order since, and so have done with it
                    self._between_ranks = None
                if order.restore is not None:
                    context.layer_store.clear()
                    context.checkpointer.go_back(order.first_iteration)
            generation.run()

        self.begin(context.device, f"generation {order.order}", work)

    def stand_aside(self, context: WorkerContext, order: Train, previous: Generation | None) -> None:
        """Take no part in an order. What this worker held is out of date from now on; others may lack parts of it."""
        over = self._begins()

        def work() -> None:
            leave(context, previous, order)
            if any(move.source == context.worker for move in order.moves):
                with suppress(CommunicationError):  # the order is over, or the coordinator hears of it from them
                    move_layers(context, order, partial(_require_not, over))
            context.layer_store.clear()
            context.links.close()
            if context.group is not None:  # a thread that was left behind, or never met all, has not taken it back
                context.group.connect(None)

        self.begin(context.device, "leaving the order", work)

    def finish(self, context: WorkerContext, order: Finish, previous: Generation | None) -> None:
        """Write some layers, and report the digests of all, which must agree between peers.

        Where others have parts of these layers, and one of them is lost, there will be another order.
        """
        over = self._begins()

        def work() -> None:
            with self._finishing:
                leave(context, previous, order)
                try:
                    received = move_layers(context, order, partial(_require_not, over))
                except CommunicationError:
                    return
                context.layer_store.put(received, order.first_iteration - 1)
                self._between_ranks = _connect_ranks(context, order)
                _write(context, order, received)

        self.begin(context.device, "finish", work)

    def forget(self, context: WorkerContext) -> None:
        """Hold nothing any more, once nothing is being written."""
        with self._finishing:
            context.layer_store.clear()

    def _begins(self) -> threading.Event:
        """An order begins, which ends what the last one waits for; set when the next one does."""
        self._next.set()
        self._next = threading.Event()
        return self._next

    def begin(self, device: torch.device, name: str, work: Callable[[], None]) -> threading.Thread:
        """Run long work in a thread."""
        def run() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # of each thread its own
                work()
            except AbandonedError:
                pass
            except BaseException as error:
                self._failed(error)

        thread = threading.Thread(target=run, daemon=True, name=name)
        thread.start()
        return thread


def _require_not(over: threading.Event) -> None:
    """Raises CommunicationError once the order is over."""
    if over.is_set():
        raise CommunicationError("the order is over")


def leave(context: WorkerContext, previous: Generation | None, order: Order) -> None:
    """Close the last generation's connections, which peers may have used until now; undo what is not committed."""
    if previous is not None:
        try:
            previous.leave(order)
        except VersionError as error:  # as where others have gone back to a checkpoint, and it had not heard of that
            if isinstance(order, Finish) or order.restore is None:
                print(f"order {order.order}: {error}; this worker keeps nothing", file=sys.stderr, flush=True)
            context.layer_store.clear()
        context.layer_sender.order_begins(order.order, order.first_iteration - 1)


def _connect_ranks(context: WorkerContext, order: Finish) -> Session | None:
    """What the ranks of this worker gather their shards over; None where it is one process."""
    if context.group is None:
        return None
    alone = Membership(order.order, {context.worker: 0}, context.worker, context.group)
    return Session(alone, links=context.links, device=context.device, store=context.store).connect()


def _write(context: WorkerContext, order: Finish, received: Sequence[PartState]) -> None:
    """`received` are parts of layers, where others have them."""
    holding = context.layer_store.holding
    for layer, worker in order.writers:
        if worker == context.worker and order.parameters:
            copies, module = context.sharing.copies(layer), holding.modules[layer]
            whole = whole_layer(module, context.group)
            if context.rank == 0:
                save_layer_when_there_is_room(Path(context.out), layer, {
                    name: tensor for name, tensor in whole.items() if name not in copies},
                    lambda text: context.channel.send(Note(context.worker, text)))
    store = context.layer_store
    mine = [layer for layer, worker in order.writers if worker == context.worker]
    context.checkpointer.save_last(order, partial(store.whole_layers, mine, received, order.first_iteration - 1))
    kept = store.kept()
    digests = {} if kept is not None and kept.whole_after != order.first_iteration - 1 else {
        name: tensor_digest(name, parameter) for name, parameter in holding.parameters().items()}
    context.channel.send(Finished(context.worker, order.order, digests))
