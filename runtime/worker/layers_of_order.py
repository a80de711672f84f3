"""The layers that a worker needs for an order: read from a checkpoint, taken from others, kept; the others dropped."""

from runtime.model.checkpoint import CheckpointError
from runtime.protocol.to_coordinator import Note
from runtime.replay.communication import CommunicationError
from runtime.worker.activity import WAITS
from runtime.worker.context import OrderContext
from runtime.worker.layer_receiver import LayerFetch, senders_for


def take_layers(part: OrderContext) -> None:
    """Hold exactly what the order's schedule needs of this worker. Raises CommunicationError."""
    order, context = part.order, part.context
    context.injector.at(order.first_iteration, "met")
    needed = context.placement.held(part.schedule, part.worker)
    if order.restore is not None:
        _restore(part, next((layers for worker, layers in order.restore if worker == part.worker), ()))
    elif order.first_iteration == context.setup.first_iteration:
        context.layer_store.restore(needed, order.first_iteration)
    _move(part, needed)
    context.layer_store.holding.reduce_by(context.placement.reduced(part.schedule, part.worker))
    context.injector.at(order.first_iteration, "moved")


def _restore(part: OrderContext, layers: tuple[int, ...]) -> None:
    """Read layers from a checkpoint. One that is damaged ends the order: the coordinator finds another one."""
    part.activity.begins("reads a checkpoint")
    iteration = part.order.first_iteration
    try:
        part.context.layer_store.restore(layers, iteration)
    except CheckpointError as error:
        part.context.channel.send(Note(part.worker, str(error)))
        raise CommunicationError(f"going back to iteration {iteration} failed: {error}") from None


def _move(part: OrderContext, needed: frozenset[int]) -> None:
    """Take over layers that were fetched for this order, or move now while all wait; drop those not needed now."""
    order, context, require = part.order, part.context, part.connections.require
    part.activity.begins(f"{WAITS} for layers to move")
    context.layer_receiver.begin([
        LayerFetch(0, order.number, senders_for(part.worker, order.moves, order.addresses, rank), follow=False)
        for rank in context.ranks])
    receivers = {move.target for move in order.moves if move.source == part.worker}
    context.layer_sender.give(order.number, order.first_iteration - 1, len(receivers), require)
    context.layer_store.keep(needed, context.layer_receiver.take(order.number, order.fetch, require))
