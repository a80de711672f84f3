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

    An error in a thread is passed to the function `on_failure`. In all methods, `previous` is this
    worker's generation in the order before; None if it took no part.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        # Held while layers are written at the end, or changed by an order. An order to finish may
        # end early.
        self._finishing = threading.Lock()
        # Connections between the worker's ranks in the last order to finish.
        self._between_ranks: GenerationSession | None = None
        # Set when the next order has come; each order has a new one.
        self._next = threading.Event()

    @property
    def is_finishing(self) -> bool:
        """True while layers are written at the end, or changed before an order begins."""
        return self._finishing.locked()

    def start_training(
        self,
        context: WorkerContext,
        order: Train,
        generation: GenerationRunner,
        previous: GenerationRunner | None,
    ) -> None:
        """Start a thread that leaves `previous`, and runs `generation` for `order`.

        If the order returns to a checkpoint, all layers and later checkpoints are dropped before.
        """
        self._begin_order()

        def work() -> None:
            # First return to what is committed, in memory or by a checkpoint.
            with self._finishing:
                context.checkpointer.begin_order(order.order, order.first_iteration)
                leave_generation(context, previous, order)
                if previous is not None and self._between_ranks is not None:
                    # All ranks have met for another order, so none uses it.
                    self._between_ranks.close()
                    self._between_ranks = None
                if order.restore is not None:
                    context.layer_store.drop_all()
                    context.checkpointer.drop_later(order.first_iteration)
            generation.run()

        self.start_thread(context.device, f"generation {order.order}", work)

    def sit_out(
        self, context: WorkerContext, order: Train, previous: GenerationRunner | None
    ) -> None:
        """Start a thread for an order without this worker: leave `previous`, drop all layers.

        Parts that other workers need are sent to them first. Idle process groups are closed.
        """
        over = self._begin_order()

        def work() -> None:
            context.checkpointer.begin_order(order.order, order.first_iteration)
            leave_generation(context, previous, order)
            # This worker's state is then out of date, but others may first need parts of it.
            if any(move.source == context.worker for move in order.moves):
                # The order is over, or the receivers report the failure.
                with suppress(CommunicationError):
                    move_layers(context, order, partial(_raise_if_over, over))
            context.layer_store.drop_all()
            context.links.close_idle()
            # An abandoned thread, or one that never met all, left it connected.
            if context.group is not None:
                context.group.connect(None)

        self.start_thread(context.device, "leaving the order", work)

    def start_finishing(
        self, context: WorkerContext, order: Finish, previous: GenerationRunner | None
    ) -> None:
        """Start a thread that writes the layers that `order` assigns, and reports digests of all.

        If it cannot get parts of these layers from other workers, it reports `Paused` instead, or
        nothing if the next order has come.
        """
        over = self._begin_order()

        def work() -> None:
            with self._finishing:
                context.checkpointer.begin_order(order.order, order.first_iteration)
                leave_generation(context, previous, order)
                # Get the parts of these layers that other workers own.
                try:
                    received = move_layers(context, order, partial(_raise_if_over, over))
                except CommunicationError as error:
                    if not over.is_set():
                        context.channel.send(
                            Paused(
                                context.worker,
                                order.order,
                                context.layer_store.list_held_state(),
                                None,
                                str(error),
                                (context.worker, *error.peers),
                            )
                        )
                    return
                context.layer_store.set_parameters(received, order.first_iteration - 1)
                self._between_ranks = _connect_ranks(context, order)
                _write_layers(context, order, received)

        self.start_thread(context.device, "finish", work)

    def start_publishing(self, context: WorkerContext, order: Finish) -> None:
        """Start a thread that makes the drafts of `order` final, and reports that."""

        # The coordinator has found that all members hold the same state.
        def work() -> None:
            with self._finishing:
                writers = order.writers if order.parameters and context.rank == 0 else ()
                for layer, worker in writers:
                    if worker == context.worker:
                        publish_layer(Path(context.spec.settings.out), layer, order.order)
                context.checkpointer.publish_last(order.first_iteration)
                context.channel.send(Published(context.worker, order.order))

        self.start_thread(context.device, "publish", work)

    def drop_layers(self, context: WorkerContext) -> None:
        """Drop all layers, once no thread writes them any more."""
        with self._finishing:
            context.layer_store.drop_all()

    def _begin_order(self) -> threading.Event:
        """End the last order's waits; return an event that is set at this one's end."""
        self._next.set()
        self._next = threading.Event()
        return self._next

    def start_thread(
        self, device: torch.device, name: str, work: Callable[[], None]
    ) -> threading.Thread:
        """Start a thread with `device` as its GPU; errors but AbandonedError go to `on_failure`."""

        def run() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # the current device is set for each thread
                work()
            except AbandonedError:
                pass
            except BaseException as error:
                self._on_failure(error)

        thread = threading.Thread(target=run, daemon=True, name=name)
        thread.start()
        return thread


def _raise_if_over(over: threading.Event) -> None:
    if over.is_set():
        raise CommunicationError("the order is over")


def leave_generation(
    context: WorkerContext, previous: GenerationRunner | None, order: Order
) -> None:
    """Return this worker to the last committed iteration; if impossible, drop all layers.

    Workers that fetch layers from this one learn that `order` begins. Without a `previous`
    generation, nothing is done.
    """
    if previous is not None:
        try:
            previous.return_to_committed(order)
        # e.g. the others have returned to a checkpoint without this worker's knowledge.
        except VersionError as error:
            if isinstance(order, Finish) or order.restore is None:
                print(
                    f"order {order.order}: {error}; this worker drops its layers",
                    file=sys.stderr,
                    flush=True,
                )
            context.layer_store.drop_all()
        context.layer_sender.queue_order_begins(order.order, order.first_iteration - 1)


def _connect_ranks(context: WorkerContext, order: Finish) -> GenerationSession | None:
    """Connect this worker's ranks to gather shards; return None if there is one rank."""
    if context.group is None:
        return None
    alone = Membership(order.order, {context.worker: 0}, context.worker, context.group)
    return GenerationSession(
        alone, links=context.links, device=context.device, store=context.store
    ).connect()


def _write_layers(context: WorkerContext, order: Finish, received: Sequence[PartState]) -> None:
    holding = context.layer_store.holding
    # All ranks gather a layer's shards, and the first one writes it.
    for layer, worker in order.writers:
        if worker == context.worker and order.parameters:
            copies, module = context.sharing.copies_in(layer), holding.modules[layer]
            full_state = gather_layer(module, context.group)
            if context.rank == 0:
                draft_layer_with_retry(
                    Path(context.spec.settings.out),
                    layer,
                    order.order,
                    {name: tensor for name, tensor in full_state.items() if name not in copies},
                    lambda text: context.channel.send(Note(context.worker, text)),
                )
    # The last checkpoint: a draft as well, until the coordinator has compared all digests.
    store = context.layer_store
    own_layers = [layer for layer, worker in order.writers if worker == context.worker]
    context.checkpointer.save_last(
        order, partial(store.gather_whole_layers, own_layers, received, order.first_iteration - 1)
    )
    # The coordinator compares the digests of parameters between peers.
    state = store.list_held_state()
    digests, checksums = dict[str, str](), tuple[Checksum, ...]()
    if state is None or state.whole_after == order.first_iteration - 1:
        digests = {
            name: tensor_digest(name, parameter)
            for name, parameter in holding.parameters_by_name().items()
        }
        # It keeps parts that it could not bring up to date, and which no writer takes.
        with suppress(VersionError):
            checksums = store.start_checksums(order.first_iteration - 1)()
    context.channel.send(Finished(context.worker, order.order, digests, checksums))
