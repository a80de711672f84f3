"""Choose the checkpoint that a run goes back to for lost layers or differing copies.

All workers are asked which checkpoints they can read, because nodes may have separate folders. The
newest checkpoint is taken. If there is none yet, the run can start from its beginning, since each
worker can build the initial state.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from slipstream.runtime.coordinator.decisions import orders
from slipstream.runtime.coordinator.decisions.effects import PlannerFailedError
from slipstream.runtime.coordinator.decisions.orders import (
    describe_layer_loss,
    find_restored_schedule,
)
from slipstream.runtime.coordinator.decisions.part_moves import LayersByWorker
from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap
from slipstream.runtime.coordinator.decisions.run_state import TransitionBuilder
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import WentBack
from slipstream.runtime.protocol.to_worker import ReportCheckpoints
from slipstream.schedules.schedule import NoScheduleError, Worker

CHECKPOINT_ANSWER_SECONDS = 30.0
"""Seconds to report checkpoints; a worker whose file system hangs longer reads none."""


def describe_lost_layer(step: TransitionBuilder, missing: int) -> str:
    """Return a clause that explains why no worker holds all of layer `missing`."""
    state, placement = step.state, step.rules.placement
    reasons = describe_layer_loss(
        state.lost, missing, state.grid, placement, state.members, state.waiting_workers
    )
    # If the parameters are there, only parts of the optimizer's state are lost.
    if any(missing in layers for layers in state.held_by_paused.values()):
        return (
            f"optimizer state of layer {missing} is lost with two workers that both kept it: "
            f"{reasons}"
        )
    stage = placement.stage_of(state.grid, missing)
    if not reasons:  # as after a checkpoint that could not be read
        return f"stage {stage} is held by no worker any more, although its workers live"
    return f"stage {stage} has no live worker left: {reasons}"


def order_rollback(step: TransitionBuilder, why: str) -> None:
    """Order the return to the newest readable checkpoint, or to the beginning.

    First all workers are asked which checkpoints they can read, and then a schedule is requested.
    While an answer is missing (that of a worker for at most `CHECKPOINT_ANSWER_SECONDS`), nothing
    is ordered, and the caller must call again. `why` tells users the reason. A run that was told to
    end leaves instead, unless its state is in doubt. Raises RunError if no worker is left, no
    checkpoint can be read, or there is no schedule, and PlannerFailedError if another attempt may
    find one.
    """
    state, placement, partition = step.state, step.rules.placement, step.rules.partition
    everyone, first = state.available_workers, state.log.next_iteration
    start = step.rules.iterations.start
    # A run that was told to end and has lost layers ends: a later one resumes from its checkpoint.
    if state.stopping and state.doubt is None:
        orders.send_leave(step, why)
        return
    if not everyone:
        raise RunError(why)
    # Ask who can read which checkpoint, and wait for the answers.
    if unasked := sorted(worker for worker in everyone if worker not in state.asked):
        step.update_state(
            asked=PersistentMap([*state.asked.items(), *((worker, step.at) for worker in unasked)])
        )
        step.send(unasked, ReportCheckpoints())
    readable, asked = step.state.readable, step.state.asked
    if any(
        worker not in readable and step.at - asked[worker] <= CHECKPOINT_ANSWER_SECONDS
        for worker in everyone
    ):
        return
    # Copies are compared whenever a checkpoint is written, before the iteration is committed. So if
    # they differ, the checkpoints that precede a committed iteration are correct.
    possible = range(start, first + 1 if state.doubt is None else max(first, start + 1))
    nothing = f"{why}; no live worker can read a checkpoint, or build what the run began with"
    if find_newest_checkpoint(readable, everyone, possible) is None:
        raise RunError(nothing)
    # Find the schedule to continue by; None while it is planned.
    try:
        prepared = find_restored_schedule(step, everyone)
    except PlannerFailedError:
        raise
    except NoScheduleError as error:
        raise RunError(", and ".join(filter(None, (why, str(error))))) from None
    if prepared is None:
        return
    schedule = prepared.schedule
    # Choose again among the members: idle workers read nothing for others.
    target = find_newest_checkpoint(readable, schedule.seat_of, possible)
    if target is None:
        raise RunError(nothing)
    # From here on, the run is at that iteration, and trusts what it reads.
    iteration, readers = target
    recovery = state.recovery.with_begin(step.at).with_rollback(
        iteration, first - iteration, in_doubt=state.doubt is not None
    )
    step.update_state(
        recovery=recovery,
        doubt=None,
        trusted_from=state.trusted_from if state.doubt is None else state.order + 1,
        log=state.log.without_iterations_from(iteration),
        asked=PersistentMap(),
        readable=PersistentMap(),
    )
    # Order each layer to be read by one worker, and sent to the others that need it.
    step.add_effect(WentBack(lost=first - iteration, reason=why))
    reads = assign_layer_readers(placement.held_layers_by_worker(schedule), readers)
    moves = partition.plan_moves(
        schedule,
        {
            reader: partition.build_restored_state(layers, iteration)
            for reader, layers in reads.items()
        },
        iteration - 1,
    )
    orders.send_train_order(step, prepared, moves, restore=reads)


def find_newest_checkpoint(
    readable: Mapping[Worker, Collection[int]], workers: Collection[Worker], iterations: range
) -> tuple[int, list[Worker]] | None:
    """Return the last readable checkpoint's iteration, and who can read it; None without one.

    Only checkpoints of `iterations` count, and only `workers` as readers. `readable` has the
    iterations of the checkpoints that each worker can read.
    """
    candidates = {
        worker: set(readable.get(worker, ())).intersection(iterations) for worker in workers
    }
    last = max((max(choices) for choices in candidates.values() if choices), default=None)
    if last is None:
        return None
    return last, sorted(worker for worker, choices in candidates.items() if last in choices)


def assign_layer_readers(
    needs: LayersByWorker, readers: Collection[Worker]
) -> Mapping[Worker, tuple[int, ...]]:
    """Return the layers that each of `readers` reads from a checkpoint.

    `needs` has the layers that each worker must hold. A reader in it reads all that it needs, and a
    share of the layers that no reader needs; other readers are left out.
    """
    # Reading what it needs itself, a worker waits for no other.
    reads = {reader: sorted(needs[reader]) for reader in sorted(readers) if reader in needs}
    count = Counter({reader: len(layers) for reader, layers in reads.items()})
    read = {layer for layers in reads.values() for layer in layers}
    # The rest goes to whoever reads least, and is sent to those that need it.
    for layer in sorted({layer for layers in needs.values() for layer in layers} - read):
        reader = min(reads, key=lambda worker: (count[worker], worker))
        reads[reader].append(layer)
        count[reader] += 1
    return {reader: tuple(layers) for reader, layers in reads.items()}
