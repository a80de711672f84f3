"""Orders: messages that make workers train, stop, finish or leave, and the matching changes of the state."""

from collections import defaultdict
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.layer_fetches import LayerFetch
from slipstream.runtime.coordinator.decisions.part_moves import NO_PREVIOUS_OWNERS
from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap
from slipstream.runtime.coordinator.decisions.run_state import (
    EndedPhase,
    FinishingPhase,
    TrainingPhase,
    TransitionBuilder,
)
from slipstream.runtime.coordinator.decisions.schedule_requests import PreparedSchedule
from slipstream.runtime.events import HandedOver, Joined, Noted, OrderGiven
from slipstream.runtime.protocol.to_worker import (
    JSON_NULL,
    MAX_STORED_CONTENTS,
    AssignedShare,
    EndOrder,
    Finish,
    LayerMove,
    Leave,
    ScheduleContent,
    Train,
)
from slipstream.runtime.state.parts import OriginalMembers
from slipstream.schedules.schedule import COMPUTE_KINDS, Schedule, Worker
from slipstream.schedules.shares import DividedSchedule


def send_train_order(step: TransitionBuilder, prepared: PreparedSchedule, moves: tuple[LayerMove, ...],
                     join: LayerFetch | None = None, *, restore: Mapping[Worker, tuple[int, ...]] | None = None,
                     cut_for: OriginalMembers = NO_PREVIOUS_OWNERS) -> None:
    """Send all available workers the order to train by a schedule from the first iteration that is not committed.

    Members make the `moves` before the first op, while all wait. `join` describes the layers that were fetched for this
    order while all trained; None: there were none. `restore` maps workers to the layers that they read from the
    checkpoint of the first iteration; None: nothing is read. `cut_for` maps ranges of layers that keep an earlier
    partition to the members for which it was made.
    """
    before, schedule, parts = step.state, prepared.schedule, prepared.parts
    _open_order(step, prepared, join, cut_for, restores=restore is not None)
    _send_shares(step, parts)
    step.send(sorted(before.available_workers), Train(
        order=step.state.order, first_iteration=before.log.next_iteration, moves=moves,
        fetch=0 if join is None else join.fetch, factor=step.state.log.last_factor,
        cut_for=tuple((layers, tuple(members)) for layers, members in cut_for.items()),
        addresses=step.state.find_source_addresses(moves), failed=parts.failed,
        schedule=msgspec.Raw(prepared.text) if step.rules.whole_schedules else JSON_NULL,
        restore=None if restore is None else tuple(restore.items())))
    if join is not None:
        step.add_effect(HandedOver(fetch=join.fetch, order=step.state.order))
    for worker in sorted(step.state.members - before.members) if before.order else ():
        step.add_effect(Joined(worker=worker))
    step.add_effect(OrderGiven(
        order=step.state.order, schedule=prepared.digest, live=len(step.state.members),
        planned_period=round(schedule.seconds(schedule.period_ticks), 9),
        phase="settled" if step.state.settled else "whole" if _is_whole(schedule) else "at once"))


def _is_whole(schedule: Schedule) -> bool:
    return len(schedule.seats) == schedule.grid.pipelines * schedule.grid.columns


def _has_settled(step: TransitionBuilder, schedule: Schedule, join: LayerFetch | None, *, restores: bool) -> bool:
    """Return whether layers have moved for the members of the next order, which train by `schedule`.

    With all workers, only layers that move between them count, as when one of them is slow: the first schedule may
    have other layers than the stages. With fewer workers, layers that moved before the last death do not count.
    """
    before = step.state
    if not any(map(schedule.has_moved_layers, schedule.seats)):
        return False
    stays = before.settled and before.members == frozenset(schedule.seat_of)
    if _is_whole(schedule):
        return schedule != step.rules.first.schedule and (stays or (join is not None and join.settles))
    return stays or join is not None or restores or before.order == 0


def _open_order(step: TransitionBuilder, prepared: PreparedSchedule, join: LayerFetch | None,
                cut_for: OriginalMembers, *, restores: bool) -> None:
    """Change the state to that at the start of a new order to train. For the arguments see `send_train_order`.

    Set `restores` to True if members read layers from a checkpoint.
    """
    before, schedule = step.state, prepared.schedule
    members = frozenset(schedule.seat_of)
    order, first = before.order + 1, before.log.next_iteration
    nobody_started = isinstance(before.phase, TrainingPhase) and before.phase.ended and not before.phase.started
    slow = before.slow.with_order(order, schedule, first, step)
    settler = step.state.settler
    if settler is not None and join is not None and prepared is not before.prepared:  # else only optimizer state moves
        settler = replace(settler, closed=(order, join.speeds))
    step.update_state(
        prepared=prepared, members=members, order=order,
        settled=_has_settled(step, schedule, join, restores=restores), paused=PersistentMap(), cut_for=cut_for,
        answers={}, vain=before.vain + 1 if nobody_started else 0, newcomers=members - before.members,
        phase=TrainingPhase(began=first, stop_before=before.data_end, restores=restores,
                            without_microbatches=_find_idle_members(schedule)),
        empty=before.empty.with_order(members - before.members if before.order else ()),
        recovery=before.recovery.with_order(
            members - before.members, at=step.at, settled=join is not None and join.settles,
            meanwhile=first - join.began if join is not None and join.fetch else 0),
        joins=before.joins.with_order(step), settler=settler, log=before.log.with_order(order, members),
        checkpoints=before.checkpoints.with_order(step.at), slow=slow)


def _send_shares(step: TransitionBuilder, parts: DividedSchedule) -> None:
    """Send each member its share of a divided schedule (`parts`): its seat, and the digests of its program and of what
    else it must know. Before it, send the contents with these digests that the member does not have yet."""
    lacking: dict[str, list[Worker]] = defaultdict(list)
    live = dict(step.state.live)
    for worker, share in parts.shares.items():
        known_contents = live[worker].contents
        unknown = [digest for digest in dict.fromkeys(share.content_digests) if digest not in known_contents]
        live[worker] = replace(live[worker], contents=(*known_contents, *unknown)[-MAX_STORED_CONTENTS:])
        for digest in unknown:
            lacking[digest].append(worker)
    step.update_state(live=PersistentMap(live.items()))
    for digest, workers in lacking.items():
        step.send(sorted(workers), ScheduleContent(digest, msgspec.Raw(parts.contents[digest])))
    for worker, share in parts.shares.items():
        step.send((worker,), AssignedShare(step.state.order, share))


def send_end_order(step: TransitionBuilder, *, doubted: bool = False) -> None:
    """Tell all members to stop training by the current order at once, unless they have been told before.

    Set `doubted` to True if copies of state differ: the message then says so, and is sent in any case, because another
    coordinator may have to learn this from the members.
    """
    state = step.state
    if isinstance(state.phase, TrainingPhase) and (doubted or not state.phase.ended):
        step.update_state(phase=replace(state.phase, ended=True))
        step.send(sorted(state.members), EndOrder(state.order, doubted))


def send_finish_order(step: TransitionBuilder) -> None:
    """Order the members to write the final parameters, or a checkpoint if the run or some members end early."""
    state, rules, holders = step.state, step.rules, defaultdict[int, list[Worker]](list)
    for worker, layers in sorted(state.held_by_paused.items()):
        for layer in layers:
            holders[layer].append(worker)
    writers = {layer: workers[layer % len(workers)] for layer, workers in sorted(holders.items())}
    moves = rules.partition.plan_writer_moves(writers, state.paused)
    order, first = state.order + 1, state.log.next_iteration
    step.update_state(phase=FinishingPhase(ordered_at=step.at), order=order,
                      log=state.log.with_order(order, state.members),
                      slow=state.slow if state.leaving else state.slow.with_run_ended(first, step))
    step.send(sorted(state.members), Finish(
        order=order, first_iteration=first, writers=tuple(writers.items()), factor=step.state.log.last_factor,
        moves=moves, addresses=state.find_source_addresses(moves), parameters=first >= rules.iterations.stop))


def send_leave(step: TransitionBuilder, why: str | None = None) -> None:
    """Tell all workers to leave, and end the run. `why` is the reason why a run that was told to end has no checkpoint
    of its last iteration; None: it has one or needs none."""
    if why is not None:
        step.add_effect(Noted(text=f"{why}: the run, which was asked to end, ends without another checkpoint"))
    step.send(sorted(step.state.live), Leave())
    step.update_state(phase=EndedPhase())


def _find_idle_members(schedule: Schedule) -> frozenset[Worker]:
    idle = {number for number, program in enumerate(schedule.programs)
            if not any(op.kind in COMPUTE_KINDS for op in program)}
    return frozenset(seat.worker for seat in schedule.seats if seat.program in idle)
