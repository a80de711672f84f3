"""Send orders to train, stop, finish or leave, choose their schedules, and record losses.

Which schedule is requested depends on the layers that workers hold and on whether layers may move.
Each function that finds one returns None while it is being planned; the caller asks again later.
All raise NoScheduleError if there is no schedule, PlannerFailedError if another attempt may find
one, and RunError if the schedule does not fit the job.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.effects import (
    PlannerFailedError,
    PreparedSchedule,
    ScheduleRequest,
)
from slipstream.runtime.coordinator.decisions.part_moves import NO_PREVIOUS_OWNERS
from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap
from slipstream.runtime.coordinator.decisions.run_state import (
    EndedPhase,
    FinishingPhase,
    TrainingPhase,
    TransitionBuilder,
    WorkerLoss,
)
from slipstream.runtime.coordinator.decisions.settling import LayerFetch
from slipstream.runtime.events import Failed, HandedOver, Joined, NodeLost, Noted, OrderGiven
from slipstream.runtime.placement import Placement
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
from slipstream.schedules.schedule import COMPUTE_KINDS, Grid, HeldLayers, NoScheduleError, Schedule, Worker
from slipstream.schedules.shares import DividedSchedule


def send_train_order(step: TransitionBuilder, prepared: PreparedSchedule, moves: tuple[LayerMove, ...],
                     join: LayerFetch | None = None, *, restore: Mapping[Worker, tuple[int, ...]] | None = None,
                     cut_for: OriginalMembers = NO_PREVIOUS_OWNERS) -> None:
    """Order all available workers to train from the first uncommitted iteration on.

    Parameters
    ----------
    moves
        Moves that members make before the first op, while all wait.
    join
        Layers that were fetched for this order while all trained; None: there were none.
    restore
        Layers that workers read from the checkpoint of the first iteration; None: none are read.
    cut_for
        Ranges of layers that keep an earlier partition, with the members for which it was made.
    """
    before, schedule, parts = step.state, prepared.schedule, prepared.parts
    _open_order(step, prepared, join, cut_for, restores=restore is not None)
    _send_shares(step, parts)
    step.send(sorted(before.available_workers), Train(
        order=step.state.order, first_iteration=before.log.next_iteration, moves=moves,
        fetch=0 if join is None else join.fetch, factor=step.state.log.last_factor,
        cut_for=tuple((layers, tuple(members)) for layers, members in cut_for.items()),
        addresses=step.state.find_source_addresses(moves), failed=parts.failed,
        schedule=msgspec.Raw(prepared.text) if step.rules.facts.whole_schedules else JSON_NULL,
        restore=None if restore is None else tuple(restore.items()), trusted_from=step.state.trusted_from))
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
    """Return whether layers have moved for the members of the next order."""
    # With all workers, only moves between them count, as when one is slow: the first schedule may
    # have other layers than the stages. With fewer, layers that moved before the last death do not
    # count.
    before = step.state
    if not any(map(schedule.has_moved_layers, schedule.seats)):
        return False
    stays = before.settled and before.members == frozenset(schedule.seat_of)
    if _is_whole(schedule):
        return schedule != step.rules.first.schedule and (stays or (join is not None and join.settles))
    return stays or join is not None or restores or before.order == 0


def _open_order(step: TransitionBuilder, prepared: PreparedSchedule, join: LayerFetch | None,
                cut_for: OriginalMembers, *, restores: bool) -> None:
    """Begin a new order to train in the state; arguments are as in `send_train_order`."""
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
    """Send each member its share of a schedule, after the contents that it lacks."""
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
    """Tell all members to stop the current order at once, unless they were told before.

    `doubted` says that copies of state differ. It is sent in any case, because another coordinator
    may have to learn this from the members.
    """
    state = step.state
    if isinstance(state.phase, TrainingPhase) and (doubted or not state.phase.ended):
        step.update_state(phase=replace(state.phase, ended=True))
        step.send(sorted(state.members), EndOrder(state.order, doubted))


def send_finish_order(step: TransitionBuilder) -> None:
    """Order members to write final parameters, or a checkpoint if some end early."""
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
    """Tell all workers to leave, and end the run. `why` is the reason why a run that was told to
    end has no checkpoint of its last iteration; None: it has one or needs none."""
    if why is not None:
        step.add_effect(Noted(text=f"{why}: the run, which was asked to end, ends without another checkpoint"))
    step.send(sorted(step.state.live), Leave())
    step.update_state(phase=EndedPhase())


def _find_idle_members(schedule: Schedule) -> frozenset[Worker]:
    idle = {number for number, program in enumerate(schedule.programs)
            if not any(op.kind in COMPUTE_KINDS for op in program)}
    return frozenset(seat.worker for seat in schedule.seats if seat.program in idle)


ScheduleAttempt = Callable[[], PreparedSchedule | None]
"""Function that returns a schedule, or None while it is being planned. It raises NoScheduleError if
there is none."""


def find_initial_schedule(step: TransitionBuilder, live: Collection[Worker]) -> PreparedSchedule | None:
    """Return the schedule before the first step, when each worker can build every layer."""
    return _try_in_order(_attempt_whole_stages(step, live), _attempt_from_checkpoint(step, live))


def find_immediate_schedule(step: TransitionBuilder, live: Collection[Worker]) -> PreparedSchedule | None:
    """Return the schedule with which these paused workers can continue soonest.

    If some lack layers of their stages, one for which no layer moves is preferred to one in which
    each worker holds its stages.
    """
    holds, placement, grid = step.state.held_by_paused, step.rules.placement, step.state.grid
    held = _convert_held_layers(step, live, holds)
    ways = [_attempt_whole_stages(step, live)]
    if all(holds.get(worker) for worker in live):
        displaced = any(not holds[worker] >= placement.layers_in_column(grid, worker.column) for worker in live)
        ways.insert(0 if displaced else 1, lambda: _request_schedule(step, live, held=held))
    return _try_in_order(*ways, lambda: _request_settled(step, held))


def find_joining_schedule(step: TransitionBuilder, live: Collection[Worker]) -> PreparedSchedule | None:
    """Return the schedule for members and joining workers, whose layers are fetched meanwhile."""
    held = _convert_held_layers(step, live, step.state.find_held_layers(step.rules.placement))
    return _choose_by_layer_policy(step, live, lambda: _request_settled(step, held))


def find_restored_schedule(step: TransitionBuilder, live: Collection[Worker]) -> PreparedSchedule | None:
    """Return the schedule for which these workers read all layers from a checkpoint."""
    return _choose_by_layer_policy(step, live, _attempt_from_checkpoint(step, live))


def find_settled_schedule(step: TransitionBuilder) -> PreparedSchedule | None:
    """Return the best schedule for the current members, whatever layers move for it."""
    return _request_settled(step, _convert_held_layers(step, step.state.members,
                                                       step.state.find_held_layers(step.rules.placement)))


def _choose_by_layer_policy(step: TransitionBuilder, live: Collection[Worker],
                            moved: ScheduleAttempt) -> PreparedSchedule | None:
    """Try whole stages and `moved`, the latter first in runs that move layers."""
    ways = (_attempt_whole_stages(step, live), moved)
    return _try_in_order(*(ways if step.rules.settles is None else reversed(ways)))


def _attempt_whole_stages(step: TransitionBuilder, live: Collection[Worker]) -> ScheduleAttempt:
    return lambda: step.rules.first if _is_first_schedule_for(step, live) else _request_schedule(step, live)


def _attempt_from_checkpoint(step: TransitionBuilder, live: Collection[Worker]) -> ScheduleAttempt:
    return lambda: _request_schedule(step, live, from_checkpoint=True)


def _request_settled(step: TransitionBuilder, held: HeldLayers) -> PreparedSchedule | None:
    live = [worker for worker, _ in held]
    return step.rules.first if _is_first_schedule_for(step, live) \
        else _request_schedule(step, live, held=held, settled=True)


def _is_first_schedule_for(step: TransitionBuilder, live: Collection[Worker]) -> bool:
    """Return whether the first schedule is for exactly these workers at their present speeds."""
    return step.state.slow.planned_speeds is None and step.rules.first.schedule.seat_of.keys() == set(live)


def _request_schedule(step: TransitionBuilder, live: Collection[Worker], *, held: HeldLayers | None = None,
                      settled: bool = False, from_checkpoint: bool = False) -> PreparedSchedule | None:
    """Return the answer to a request, or make it; arguments are as in `ScheduleRequest`."""
    # Raises the exception with which the request was answered.
    down = tuple(sorted(set(step.state.grid.workers()).difference(live)))
    question = ScheduleRequest(down, step.state.slow.planned_speeds, held, settled, from_checkpoint)
    answer = step.state.answers.get(question)
    if isinstance(answer, Exception):
        raise answer
    if answer is None:
        step.add_effect(question)
    return answer


def _try_in_order(*ways: ScheduleAttempt) -> PreparedSchedule | None:
    """Call functions until one finds a schedule; raise an error with all messages otherwise."""
    errors = list[NoScheduleError]()
    for way in ways:
        try:
            return way()
        except NoScheduleError as error:
            errors.append(error)
    kind = PlannerFailedError if any(isinstance(failure, PlannerFailedError) for failure in errors) else NoScheduleError
    raise kind(", and ".join(filter(None, dict.fromkeys(map(str, errors)))))


def _convert_held_layers(step: TransitionBuilder, live: Collection[Worker],
                         held: Mapping[Worker, frozenset[int]]) -> HeldLayers:
    placement = step.rules.placement
    return tuple((worker, placement.schedule_layers(held.get(worker, frozenset()))) for worker in sorted(live))


def describe_losses(losses: Mapping[Worker, WorkerLoss]) -> str:
    """Return the reasons of all losses in one line, or that there are none."""
    return ", ".join(loss.reason for loss in losses.values()) or "none was there from the start"


def describe_layer_loss(losses: Mapping[Worker, WorkerLoss], layer: int, grid: Grid, placement: Placement,
                        members: Collection[Worker], ready: Collection[Worker]) -> str:
    """Return, as one text, the reasons why no worker holds a layer.

    They are the losses (`losses`) of all workers that may have held it, and the workers of its
    stage that are neither lost nor `members`; those in `ready` are connected and wait for an order.
    """
    own = [layer in placement.layers_in_column(grid, column) for column in range(grid.columns)]
    causes = [loss.reason for worker, loss in losses.items() if layer in loss.layers or own[worker.column]]
    for worker in grid.workers():
        if own[worker.column] and worker not in losses and worker not in members:
            causes.append(f"worker {worker} is back, but has no layers yet" if worker in ready
                          else f"worker {worker} was not there from the start")
    return ", ".join(causes)


def record_losses(step: TransitionBuilder, reasons: Iterable[tuple[Worker, str]], since: float) -> None:
    """Record the losses of members, each with its reason, at `since` (`time.monotonic`). Members
    that share a machine and are lost together count as one failure."""
    for worker, reason in reasons:
        state, together = step.state, step.rules.domains.workers_failing_with(worker)
        if state.settler is not None and not any(other in together for other in state.recovery.dead_workers):
            step.update_state(settler=replace(state.settler, failures=state.settler.failures + 1))
        step.update_state(recovery=state.recovery.with_loss(worker, reason, since))
        step.add_effect(Failed(worker=worker, reason=reason))


def record_node_losses(step: TransitionBuilder, lost: Iterable[Worker]) -> None:
    """Record each failure domain that lost a worker in `lost` and has none connected."""
    domains = step.rules.domains
    for node, workers in {domains.domain_of(worker): domains.workers_failing_with(worker) for worker in lost}.items():
        if node is not None and len(workers) > 1 and not any(worker in step.state.live for worker in workers):
            step.update_state(recovery=step.state.recovery.with_node_loss(node))
            step.add_effect(NodeLost(node=node, workers=workers))
