"""Rollback: chooses the checkpoint that a run goes back to if no worker holds some layer, or if copies differ.

All workers are asked which checkpoints they can read, because nodes may have separate folders. The newest one is taken.
Before the first checkpoint the run can start from its beginning, since each worker can build the initial state.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from slipstream.runtime.coordinator.decisions import orders
from slipstream.runtime.coordinator.decisions.lost_workers import reasons_of
from slipstream.runtime.coordinator.decisions.part_moves import Holders
from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap
from slipstream.runtime.coordinator.decisions.questions import PlannerFailedError
from slipstream.runtime.coordinator.decisions.run_state import Step
from slipstream.runtime.coordinator.decisions.schedule_choice import from_checkpoint
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import WentBack
from slipstream.runtime.protocol.to_worker import ReportCheckpoints
from slipstream.schedules.schedule import NoScheduleError, Worker

ANSWER_SECONDS = 30.0
"""Time that a worker has to report its checkpoints. If it takes longer, its file system hangs, and it reads none."""


def why_lost(step: Step, missing: int) -> str:
    """Return a message that explains why no worker holds a layer completely."""
    state, placement = step.state, step.rules.placement
    reasons = reasons_of(state.lost, missing, state.grid, placement, state.members, state.ready)
    held = any(missing in layers for layers in state.holds.values())
    return f"optimizer state of layer {missing} is lost with two workers that both kept it: {reasons}" if held else \
        f"stage {placement.stage_of(state.grid, missing)} has no live worker left: {reasons}"


def give_order(step: Step, why: str) -> None:
    """Go back to the newest checkpoint that a live worker can read, or to the beginning.

    This happens if no worker holds some layer, or if copies differ. Copies are compared whenever a checkpoint is
    written, before the iteration is committed. If copies differ, the checkpoints that precede a committed iteration are
    therefore correct.

    Nothing happens while the answer of a worker, or a schedule, is missing; the caller repeats the call. A run that was
    told to end and has lost layers ends here, and a later run resumes from its last checkpoint. Raises RunError if no
    worker is left, no checkpoint can be read, or there is no schedule.
    """
    state, placement, partition = step.state, step.rules.placement, step.rules.partition
    everyone, first, start = state.everyone, state.log.next_iteration, step.rules.iterations.start
    if state.stopping and state.doubt is None:
        orders.leave(step, why)
        return
    if not everyone:
        raise RunError(why)
    if unasked := sorted(worker for worker in everyone if worker not in state.asked):
        step.change(asked=PersistentMap([*state.asked.items(), *((worker, step.at) for worker in unasked)]))
        step.send(unasked, ReportCheckpoints())
    readable, asked = step.state.readable, step.state.asked
    if any(worker not in readable and step.at - asked[worker] <= ANSWER_SECONDS for worker in everyone):
        return
    possible = range(start, first + 1 if state.doubt is None else max(first, start + 1))
    nothing = f"{why}; no live worker can read a checkpoint, or build what the run began with"
    if newest(readable, everyone, possible) is None:
        raise RunError(nothing)
    try:
        schedule = from_checkpoint(step, everyone)
    except PlannerFailedError:
        raise
    except NoScheduleError as error:
        raise RunError(", and ".join(filter(None, (why, str(error))))) from None
    if schedule is None:
        return
    target = newest(readable, schedule.seat_of, possible)  # idle workers read nothing for others
    if target is None:
        raise RunError(nothing)
    iteration, readers = target
    recovery = state.recovery.begin(step.at).went_back(iteration, first - iteration, in_doubt=state.doubt is not None)
    step.change(recovery=recovery, doubt=None, log=state.log.go_back(iteration), asked=PersistentMap(),
                readable=PersistentMap())
    step.do(WentBack(lost=first - iteration, reason=why))
    reads = who_reads_what(placement.held_by(schedule), readers)
    moves = partition.moves(
        schedule, {reader: partition.read(layers, iteration) for reader, layers in reads.items()}, iteration - 1)
    orders.train(step, schedule, moves, restore=reads)


def newest(readable: Mapping[Worker, Collection[int]], workers: Collection[Worker], iterations: range
           ) -> tuple[int, list[Worker]] | None:
    """Return the last iteration that any worker can go back to, and all workers that can; None if none can."""
    candidates = {worker: set(readable.get(worker, ())).intersection(iterations) for worker in workers}
    last = max((max(choices) for choices in candidates.values() if choices), default=None)
    return None if last is None else (last, sorted(one for one, choices in candidates.items() if last in choices))


def who_reads_what(needs: Holders, readers: Collection[Worker]) -> Mapping[Worker, tuple[int, ...]]:
    """Return the layers that each reader reads: its own, and those of workers that cannot read the checkpoint."""
    reads = {reader: sorted(needs[reader]) for reader in sorted(readers) if reader in needs}
    count = Counter({reader: len(layers) for reader, layers in reads.items()})
    read = {layer for layers in reads.values() for layer in layers}
    for layer in sorted({layer for layers in needs.values() for layer in layers} - read):
        reader = min(reads, key=lambda worker: (count[worker], worker))
        reads[reader].append(layer)
        count[reader] += 1
    return {reader: tuple(layers) for reader, layers in reads.items()}
