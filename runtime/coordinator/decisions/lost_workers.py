"""Lost workers: record their losses, and say why each is lost and which layers are missing with it."""

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.run_state import TransitionBuilder, WorkerLoss
from slipstream.runtime.events import Failed, NodeLost
from slipstream.runtime.placement import Placement
from slipstream.schedules.schedule import Grid, Worker


def describe_losses(losses: Mapping[Worker, WorkerLoss]) -> str:
    """Return the reasons of all losses in one line, separated by commas, or a clause that says so if there are none."""
    return ", ".join(loss.reason for loss in losses.values()) or "none was there from the start"


def describe_layer_loss(losses: Mapping[Worker, WorkerLoss], layer: int, grid: Grid, placement: Placement,
                        members: Collection[Worker], ready: Collection[Worker]) -> str:
    """Return, as one text, the reasons why no worker holds a layer: the losses of all workers that may have held it,
    and the workers of its stage that are neither lost nor members.

    The argument `losses` has each lost worker's loss; the workers in `ready` are connected and wait for an order.
    """
    own = [layer in placement.layers_in_column(grid, column) for column in range(grid.columns)]
    causes = [loss.reason for worker, loss in losses.items() if layer in loss.layers or own[worker.column]]
    for worker in grid.workers():
        if own[worker.column] and worker not in losses and worker not in members:
            causes.append(f"worker {worker} is back, but has no layers yet" if worker in ready
                          else f"worker {worker} was not there from the start")
    return ", ".join(causes)


def record_losses(step: TransitionBuilder, reasons: Iterable[tuple[Worker, str]], since: float) -> None:
    """Record the losses of members, which happened at `since` (`time.monotonic`); `reasons` has each member with the
    reason as text. Members that share a machine and are lost together count as one failure."""
    for worker, reason in reasons:
        state, together = step.state, step.rules.domains.workers_failing_with(worker)
        if state.settler is not None and not any(other in together for other in state.recovery.dead_workers):
            step.update_state(settler=replace(state.settler, failures=state.settler.failures + 1))
        step.update_state(recovery=state.recovery.with_loss(worker, reason, since))
        step.add_effect(Failed(worker=worker, reason=reason))


def record_node_losses(step: TransitionBuilder, lost: Iterable[Worker]) -> None:
    """Record the loss of each failure domain, such as a node, of which some worker is in `lost` and none is connected
    now."""
    domains = step.rules.domains
    for node, workers in {domains.domain_of(worker): domains.workers_failing_with(worker) for worker in lost}.items():
        if node is not None and len(workers) > 1 and not any(worker in step.state.live for worker in workers):
            step.update_state(recovery=step.state.recovery.with_node_loss(node))
            step.add_effect(NodeLost(node=node, workers=workers))
