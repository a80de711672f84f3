"""Going back: where a run goes on from when nobody holds some layer any more, or copies of it differ.

All workers are asked which checkpoints they can read: nodes may have folders of their own. The newest of all is taken.
Before the first checkpoint the run can begin anew, since every worker can build what it begins with.
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
"""To look which checkpoints there are. Whoever takes longer has a file system that hangs, and reads none."""


def why_lost(step: Step, missing: int) -> str:
    """Why nobody holds a layer any more."""
    state, placement = step.state, step.rules.placement
    reasons = reasons_of(state.lost, missing, state.grid, placement, state.members, state.ready)
    held = any(missing in layers for layers in state.holds.values())
    return f"optimizer state of layer {missing} is lost with two workers that both kept it: {reasons}" if held else \
        f"stage {placement.stage_of(state.grid, missing)} has no live worker left: {reasons}"


def give_order(step: Step, why: str) -> None:
    """Nobody holds a layer, or what is held is in doubt: go back to the newest checkpoint that a live worker can read,
    or to the beginning.

    Copies are compared whenever a checkpoint is written, and then the iteration is committed: in doubt, those that were
    written before one that is committed are right.

    Nothing happens where an answer of a worker, or a schedule, has to come first. A run that is told to end, and has
    lost layers, ends here: that checkpoint is what it goes on from. Raises RunError where nobody is left, or there is
    no schedule.
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
    back = newest(readable, schedule.seat_of, possible)  # who has nothing to do has nothing to give, either
    if back is None:
        raise RunError(nothing)
    iteration, readers = back
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
    """The last of these iterations that any of these workers can go back to, and all that can; None: there is none."""
    found = {worker: set(readable.get(worker, ())).intersection(iterations) for worker in workers}
    last = max((max(mine) for mine in found.values() if mine), default=None)
    return None if last is None else (last, sorted(one for one, mine in found.items() if last in mine))


def who_reads_what(needs: Holders, readers: Collection[Worker]) -> Mapping[Worker, tuple[int, ...]]:
    """The layers that each reader reads: its own, and those that others need who cannot read them."""
    reads = {reader: sorted(needs[reader]) for reader in sorted(readers) if reader in needs}
    count = Counter({reader: len(mine) for reader, mine in reads.items()})
    read = {layer for mine in reads.values() for layer in mine}
    for layer in sorted({layer for mine in needs.values() for layer in mine} - read):
        reader = min(reads, key=lambda worker: (count[worker], worker))
        reads[reader].append(layer)
        count[reader] += 1
    return {reader: tuple(mine) for reader, mine in reads.items()}
