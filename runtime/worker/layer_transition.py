"""Get the layers that a worker needs for an order, from a checkpoint or other workers, and drop the rest."""

from collections.abc import Callable

from slipstream.runtime.checkpoints.checkpoint import CheckpointError
from slipstream.runtime.moving.layer_receiver import FetchRequest, find_layer_sources
from slipstream.runtime.protocol.to_coordinator import Note
from slipstream.runtime.protocol.to_worker import Finish, Train
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.state.part_state import PartState
from slipstream.runtime.state.parts import build_partitions
from slipstream.runtime.worker.activity import WAITING_PREFIX
from slipstream.runtime.worker.context import OrderContext, WorkerContext


def take_layers(part: OrderContext) -> None:
    """Hold exactly the layers that the order's schedule needs of this worker, from a checkpoint or from other members.

    A member drops its old layers only after all members have what they need of them; until then, it reports the parts
    that it has received, too, as held. So if a worker dies meanwhile, nothing is lost: members that have not learned
    that all are ready hold both the old layers and the new ones, the others the new ones. Raises CommunicationError.
    """
    order, context, store = part.order, part.context, part.context.layer_store
    context.injector.fail_if_due(order.first_iteration, "met")
    if order.restore is not None:
        _restore_layers(part, next((layers for worker, layers in order.restore if worker == part.worker), ()))
    elif order.first_iteration == context.setup.first_iteration:
        if context.config.training.shard_optimizer:  # it may keep other parts of layers that it holds
            store.drop_all()
        store.restore_layers(context.placement.model_layers(part.program.holds) - store.holding.modules.keys(),
                             order.first_iteration)
    part.activity.set_activity(f"{WAITING_PREFIX} for layers to move", sorted(
        {move.source for move in order.moves if move.target == part.worker}
        | {move.target for move in order.moves if move.source == part.worker}))
    store.add_received(move_layers(context, order, part.session.raise_if_ended, order.fetch))
    if order.moves or order.fetch:
        part.session.wait_for_all()
    cuts = build_partitions(context.placement.reductions_of(part.program), dict(order.cut_for),
                            store.count_elements,
                            context.setup.failure_domains, sharded=context.config.training.shard_optimizer)
    store.keep_parts(cuts, part.worker, order.first_iteration - 1)
    context.injector.fail_if_due(order.first_iteration, "moved")


def move_layers(context: WorkerContext, order: Train | Finish, require: Callable[[], None], fetch: int = 0
                ) -> list[PartState]:
    """Send the parts that others lack for `order`, and return those that this worker lacks, while all workers wait.

    Parts fetched during training under the number `fetch` (0: there are none) are returned, too. The function `require`
    is called meanwhile, and may raise. Raises CommunicationError.
    """
    senders = find_layer_sources(context.worker, order.moves, order.addresses, context.rank)
    context.layer_receiver.start_fetch(FetchRequest(0, order.order, senders, follow=False))
    receivers = {move.target for move in order.moves if move.source == context.worker}
    context.layer_sender.send_to_waiting(order.order, order.first_iteration - 1, len(receivers), context.layer_store,
                                         require)
    return context.layer_receiver.take_parts(order.order, fetch, require)


def _restore_layers(part: OrderContext, layers: tuple[int, ...]) -> None:
    """Read layers from a checkpoint. Raises CommunicationError if it is damaged; the coordinator then chooses another
    checkpoint."""
    part.activity.set_activity("reads a checkpoint")
    iteration = part.order.first_iteration
    try:
        part.context.layer_store.restore_layers(layers, iteration)
    except CheckpointError as error:
        part.context.channel.send(Note(part.worker, str(error)))
        raise CommunicationError(f"returning to iteration {iteration} failed: {error}") from None
