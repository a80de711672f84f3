"""The layers that a worker needs for an order: read from a checkpoint, taken from others, kept; the others dropped."""

from collections.abc import Callable

from slipstream.runtime.model.checkpoints.checkpoint import CheckpointError
from slipstream.runtime.model.state.part_state import PartState
from slipstream.runtime.model.state.parts import cuts_of
from slipstream.runtime.protocol.to_coordinator import Note
from slipstream.runtime.protocol.to_worker import Finish, Train
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.worker.activity import WAITS
from slipstream.runtime.worker.context import OrderContext, WorkerContext
from slipstream.runtime.worker.layer_receiver import LayerFetch, senders_for


def take_layers(part: OrderContext) -> None:
    """Hold exactly what the order's schedule needs of this worker. Raises CommunicationError.

    What is held changes only once all have what they need of it, and what has come counts as held before that. So if a
    worker dies meanwhile, those that do not hear any more that all have theirs keep the old layers and the new ones,
    and all others the new ones.
    """
    order, context, store = part.order, part.context, part.context.layer_store
    context.injector.at(order.first_iteration, "met")
    if order.restore is not None:
        _restore(part, next((layers for worker, layers in order.restore if worker == part.worker), ()))
    elif order.first_iteration == context.setup.first_iteration:
        if context.config.training.shard_optimizer:  # of the layers that it holds, it may keep other parts
            store.clear()
        store.read(context.placement.held(part.schedule, part.worker) - store.holding.modules.keys(),
                   order.first_iteration)
    part.activity.begins(f"{WAITS} for layers to move")
    store.receive(move_layers(context, order, part.session.require, order.fetch))
    if order.moves or order.fetch:
        part.session.wait_for_all()
    cuts = cuts_of(context.placement.reduced(part.schedule, part.worker), dict(order.cut_for), store.elements,
                   context.setup.failure_domains, sharded=context.config.training.shard_optimizer)
    store.keep_parts(cuts, part.worker, order.first_iteration - 1)
    context.injector.at(order.first_iteration, "moved")


def move_layers(context: WorkerContext, order: Train | Finish, require: Callable[[], None], fetch: int = 0
                ) -> list[PartState]:
    """Give what others lack, and get what is lacking here, while all wait; with what has been fetched under a number.

    Raises CommunicationError.
    """
    senders = senders_for(context.worker, order.moves, order.addresses, context.rank)
    context.layer_receiver.begin(LayerFetch(0, order.order, senders, follow=False))
    receivers = {move.target for move in order.moves if move.source == context.worker}
    context.layer_sender.give(order.order, order.first_iteration - 1, len(receivers), context.layer_store, require)
    return context.layer_receiver.take(order.order, fetch, require)


def _restore(part: OrderContext, layers: tuple[int, ...]) -> None:
    """Read layers from a checkpoint. One that is damaged ends the order: the coordinator finds another one."""
    part.activity.begins("reads a checkpoint")
    iteration = part.order.first_iteration
    try:
        part.context.layer_store.read(layers, iteration)
    except CheckpointError as error:
        part.context.channel.send(Note(part.worker, str(error)))
        raise CommunicationError(f"going back to iteration {iteration} failed: {error}") from None
