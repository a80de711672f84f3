"""The layers that a worker needs for an order: read from a checkpoint, taken from others, kept; the others dropped."""

from collections.abc import Callable

from slipstream.runtime.model.checkpoints.checkpoint import CheckpointError
from slipstream.runtime.model.state.holding import keeps_parts
from slipstream.runtime.model.state.parts import cuts_of
from slipstream.runtime.protocol.to_coordinator import Note
from slipstream.runtime.protocol.to_worker import Finish, Train
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.worker.activity import WAITS
from slipstream.runtime.worker.context import OrderContext, WorkerContext
from slipstream.runtime.worker.layer_receiver import LayerFetch, part_senders_for, senders_for
from slipstream.runtime.worker.layer_store import ByRank


def take_layers(part: OrderContext) -> None:
    """Hold exactly what the order's schedule needs of this worker. Raises CommunicationError."""
    order, context = part.order, part.context
    context.injector.at(order.first_iteration, "met")
    if keeps_parts(context.config.training):
        _take_parts(part)
        context.injector.at(order.first_iteration, "moved")
        return
    needed = context.placement.held(part.schedule, part.worker)
    if order.restore is not None:
        _restore(part, next((layers for worker, layers in order.restore if worker == part.worker), ()),
                 context.layer_store.restore)
    elif order.first_iteration == context.setup.first_iteration:
        context.layer_store.restore(needed, order.first_iteration)
    _move(part, needed)
    context.layer_store.holding.reduce_by(context.placement.reduced(part.schedule, part.worker))
    context.injector.at(order.first_iteration, "moved")


def _take_parts(part: OrderContext) -> None:
    """Where workers keep parts: what is kept changes only once all have what they need of it.

    What has come counts as kept before that. So if a worker dies meanwhile, those that do not hear any more that all
    have theirs keep the old parts and the new ones, and all others the new ones.
    """
    order, context, store = part.order, part.context, part.context.layer_store
    reduced = context.placement.reduced(part.schedule, part.worker)
    if order.restore is not None:
        _restore(part, next((layers for worker, layers in order.restore if worker == part.worker), ()), store.read)
    elif order.first_iteration == context.setup.first_iteration:
        store.clear()
        store.read(context.placement.held(part.schedule, part.worker), order.first_iteration)
    part.activity.begins(f"{WAITS} for parts of layers to move")
    store.receive(move_parts(context, order, part.session.require, order.fetch))
    part.session.wait_for_all()
    cuts = cuts_of(reduced, dict(order.cut_for), store.elements, context.setup.failure_domains,
                   sharded=context.config.training.shard_optimizer)
    store.keep_parts(cuts, part.worker, order.first_iteration - 1)


def move_parts(context: WorkerContext, order: Train | Finish, require: Callable[[], None], fetch: int = 0) -> ByRank:
    """Give what others lack, and get what is lacking here, while all wait; with what has been fetched under a number.

    Raises CommunicationError.
    """
    context.layer_receiver.begin([
        LayerFetch(0, order.number, part_senders_for(context.worker, order.part_moves, order.addresses, rank),
                   follow=False) for rank in context.ranks])
    receivers = {move.target for move in order.part_moves if move.source == context.worker}
    context.layer_sender.give(order.number, order.first_iteration - 1, len(receivers), require)
    return context.layer_receiver.take_parts(order.number, fetch, require)


def _restore(part: OrderContext, layers: tuple[int, ...], read: Callable[[tuple[int, ...], int], None]) -> None:
    """Read layers from a checkpoint. One that is damaged ends the order: the coordinator finds another one."""
    part.activity.begins("reads a checkpoint")
    iteration = part.order.first_iteration
    try:
        read(layers, iteration)
    except CheckpointError as error:
        part.context.channel.send(Note(part.worker, str(error)))
        raise CommunicationError(f"going back to iteration {iteration} failed: {error}") from None


def _move(part: OrderContext, needed: frozenset[int]) -> None:
    """Take over layers that were fetched for this order, or move now while all wait; drop those not needed now.

    Where any move, nobody drops one before all have theirs: whoever dies meanwhile may be the only one that has it.
    """
    order, context, require = part.order, part.context, part.session.require
    part.activity.begins(f"{WAITS} for layers to move")
    context.layer_receiver.begin([
        LayerFetch(0, order.number, senders_for(part.worker, order.moves, order.addresses, rank), follow=False)
        for rank in context.ranks])
    receivers = {move.target for move in order.moves if move.source == part.worker}
    context.layer_sender.give(order.number, order.first_iteration - 1, len(receivers), require)
    store, taken = context.layer_store, context.layer_receiver.take(order.number, order.fetch, require)
    if order.moves or order.fetch:
        store.keep(needed.union(store.holding.modules), taken)
        part.session.wait_for_all()
    store.keep(needed, taken)
