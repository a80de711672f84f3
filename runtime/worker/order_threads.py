"""Run a worker's long work for orders, each piece in a thread of its own."""

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from slipstream.runtime.checkpoints.parameters import draft_layer_with_retry, publish_layer
from slipstream.runtime.protocol.to_coordinator import Checksum, Finished, Note, Paused, Published
from slipstream.runtime.protocol.to_worker import Finish, Order, Train
from slipstream.runtime.ranks.shards import gather_layer
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.stuck_calls import AbandonedError
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.state.checksum import tensor_digest
from slipstream.runtime.state.part_state import PartState
from slipstream.runtime.state.parts import VersionError
from slipstream.runtime.worker.context import WorkerContext
from slipstream.runtime.worker.generation import GenerationRunner, move_layers


class OrderThreads:
    """Threads that carry out the coordinator's orders on a worker.

    An error in one of them is passed to the function `failed`. In all methods, `previous` ran this
    worker's generation of the order before; None if there is none.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._finishing = threading.Lock()
        """Lock held while layers are written at the end, or changed by an order. An order to finish
        may end early."""
        self._between_ranks: GenerationSession | None = None
        """Connections between the worker's ranks in the last order to finish."""
        self._next = threading.Event()
        """Event that is set when the next order has come. Each order has a new one."""

    @property
    def is_finishing(self) -> bool:
        """True while parameters are being written."""
        return self._finishing.locked()

    def start_training(self, context: WorkerContext, order: Train, generation: GenerationRunner,
                       previous: GenerationRunner | None) -> None:
        """Start a thread that ends the generation before, and runs that of `order`."""
        self._begin_order()

        def work() -> None:
            with self._finishing:
                context.checkpointer.begin_order(order.order, order.first_iteration)
                leave_generation(context, previous, order)
                if previous is not None and self._between_ranks is not None:
                    self._between_ranks.close()  # all ranks have met for another order, so none uses it
                    self._between_ranks = None
                if order.restore is not None:
                    context.layer_store.drop_all()
                    context.checkpointer.drop_later(order.first_iteration)
            generation.run()

        self.start_thread(context.device, f"generation {order.order}", work)

    def sit_out(self, context: WorkerContext, order: Train, previous: GenerationRunner | None) -> None:
        """Start a thread that leaves the last generation, and drops all layers.

        This worker takes no part in the order. Its state is then out of date, but other workers may
        first need parts of it, which it sends.
        """
        over = self._begin_order()

        def work() -> None:
            context.checkpointer.begin_order(order.order, order.first_iteration)
            leave_generation(context, previous, order)
            if any(move.source == context.worker for move in order.moves):
                with suppress(CommunicationError):  # the order is over, or the receivers report the failure
                    move_layers(context, order, partial(_raise_if_over, over))
            context.layer_store.drop_all()
            context.links.close_idle()
            if context.group is not None:  # an abandoned thread, or one that never met all, left it connected
                context.group.connect(None)

        self.start_thread(context.device, "leaving the order", work)

    def start_finishing(self, context: WorkerContext, order: Finish, previous: GenerationRunner | None) -> None:
        """Start a thread that writes the layers assigned by `order`, and reports digests.

        Digests, of all held parameters, must agree between peers. If another worker that has parts
        of these layers is lost, there will be another order.
        """
        over = self._begin_order()

        def work() -> None:
            with self._finishing:
                context.checkpointer.begin_order(order.order, order.first_iteration)
                leave_generation(context, previous, order)
                try:
                    received = move_layers(context, order, partial(_raise_if_over, over))
                except CommunicationError as error:
                    if not over.is_set():
                        context.channel.send(Paused(context.worker, order.order, context.layer_store.list_held_state(),
                                                    None, str(error), (context.worker, *error.peers)))
                    return
                context.layer_store.set_parameters(received, order.first_iteration - 1)
                self._between_ranks = _connect_ranks(context, order)
                _write_layers(context, order, received)

        self.start_thread(context.device, "finish", work)

    def start_publishing(self, context: WorkerContext, order: Finish) -> None:
        """Start a thread that publishes what was written for `order`, and reports that. The
        coordinator has found that all members hold the same state."""
        def work() -> None:
            with self._finishing:
                for layer, worker in order.writers if order.parameters and context.rank == 0 else ():
                    if worker == context.worker:
                        publish_layer(Path(context.spec.settings.out), layer, order.order)
                context.checkpointer.publish_last(order.first_iteration)
                context.channel.send(Published(context.worker, order.order))

        self.start_thread(context.device, "publish", work)

    def drop_layers(self, context: WorkerContext) -> None:
        """Drop all layers, after any writing has ended."""
        with self._finishing:
            context.layer_store.drop_all()

    def _begin_order(self) -> threading.Event:
        """End the waits of the last order. Return an event for the end of this one."""
        self._next.set()
        self._next = threading.Event()
        return self._next

    def start_thread(self, device: torch.device, name: str, work: Callable[[], None]) -> threading.Thread:
        """Start a thread that runs `work` with `device` as its GPU; errors go to `failed`."""
        def run() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # the current device is set for each thread
                work()
            except AbandonedError:
                pass
            except BaseException as error:
                self._failed(error)

        thread = threading.Thread(target=run, daemon=True, name=name)
        thread.start()
        return thread


def _raise_if_over(over: threading.Event) -> None:
    if over.is_set():
        raise CommunicationError("the order is over")


def leave_generation(context: WorkerContext, previous: GenerationRunner | None, order: Order) -> None:
    """Undo what the last generation has not committed, and tell receivers of `order`.

    Does nothing if `previous` is None. All layers are dropped if this worker cannot return to the
    state from which the order continues.
    """
    if previous is not None:
        try:
            previous.return_to_committed(order)
        except VersionError as error:  # e.g. the others have returned to a checkpoint without this worker's knowledge
            if isinstance(order, Finish) or order.restore is None:
                print(f"order {order.order}: {error}; this worker drops its layers", file=sys.stderr, flush=True)
            context.layer_store.drop_all()
        context.layer_sender.queue_order_begins(order.order, order.first_iteration - 1)


def _connect_ranks(context: WorkerContext, order: Finish) -> GenerationSession | None:
    """Connect the ranks of this worker to gather shards; None if it is one process."""
    if context.group is None:
        return None
    alone = Membership(order.order, {context.worker: 0}, context.worker, context.group)
    return GenerationSession(alone, links=context.links, device=context.device, store=context.store).connect()


def _write_layers(context: WorkerContext, order: Finish, received: Sequence[PartState]) -> None:
    """Write drafts of the assigned layers; report digests of parameters and checksums."""
    # `received` are the parts of these layers that other workers keep.
    holding = context.layer_store.holding
    for layer, worker in order.writers:
        if worker == context.worker and order.parameters:
            copies, module = context.sharing.copies_in(layer), holding.modules[layer]
            full_state = gather_layer(module, context.group)
            if context.rank == 0:
                draft_layer_with_retry(Path(context.spec.settings.out), layer, order.order, {
                    name: tensor for name, tensor in full_state.items() if name not in copies},
                    lambda text: context.channel.send(Note(context.worker, text)))
    store = context.layer_store
    own_layers = [layer for layer, worker in order.writers if worker == context.worker]
    context.checkpointer.save_last(order,
                                   partial(store.gather_whole_layers, own_layers, received, order.first_iteration - 1))
    kept = store.list_held_state()
    digests, checksums = dict[str, str](), tuple[Checksum, ...]()
    if kept is None or kept.whole_after == order.first_iteration - 1:
        digests = {name: tensor_digest(name, parameter) for name, parameter in holding.parameters_by_name().items()}
        with suppress(VersionError):  # it keeps parts that it could not bring up to date, and which no writer takes
            checksums = store.start_checksums(order.first_iteration - 1)()
    context.channel.send(Finished(context.worker, order.order, digests, checksums))
