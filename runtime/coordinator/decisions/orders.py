"""Send orders to train, stop, finish or leave, choose their schedules, and record losses.

Each function that finds a schedule returns None while it is being planned; the caller asks again
later. All of them raise NoScheduleError if there is no schedule, PlannerFailedError if another
attempt may find one, and RunError if the schedule does not fit the job.
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
from slipstream.runtime.coordinator.decisions.rebalancing import LayerFetch
from slipstream.runtime.coordinator.decisions.run_state import (
    EndedPhase,
    FinishingPhase,
    RunState,
    TrainingPhase,
    TransitionBuilder,
    WorkerLoss,
)
from slipstream.runtime.events import (
    Failed,
    HandedOver,
    Joined,
    NodeLost,
    Noted,
    OrderGiven,
    Phase,
)
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
from slipstream.schedules.schedule import (
    COMPUTE_KINDS,
    Grid,
    HeldLayers,
    NoScheduleError,
    Schedule,
    Worker,
)
from slipstream.schedules.shares import DividedSchedule


def send_train_order(
    step: TransitionBuilder,
    prepared: PreparedSchedule,
    moves: tuple[LayerMove, ...],
    join: LayerFetch | None = None,
    *,
    restore: Mapping[Worker, tuple[int, ...]] | None = None,
    cut_for: OriginalMembers = NO_PREVIOUS_OWNERS,
) -> None:
    """Order all available workers to train from the first uncommitted iteration on.

    Parameters
    ----------
    moves
        Moves that members make before the first op, while all wait.
    join
        Fetch that was made for this order while all trained; None: there was none.
    restore
        Layers that workers read from the checkpoint of the first iteration; None: none are read.
    cut_for
        Ranges of layers that keep an earlier partition, with the members for which it was made.
    """
    before, schedule, parts = step.state, prepared.schedule, prepared.parts
    # Each member gets its share of the schedule first, then the order.
    _open_order(step, prepared, join, cut_for, restores=restore is not None)
    _send_shares(step, parts)
    # Each worker needs its share only, unless it deals samples or evaluates.
    whole_schedule = JSON_NULL
    if step.rules.facts.whole_schedules:
        whole_schedule = msgspec.Raw(prepared.text)
    fetch = 0 if join is None else join.fetch
    reads = None if restore is None else tuple(restore.items())
    step.send(
        sorted(before.available_workers),
        Train(
            order=step.state.order,
            first_iteration=before.log.next_iteration,
            moves=moves,
            fetch=fetch,
            factor=step.state.log.last_factor,
            cut_for=tuple((layers, tuple(members)) for layers, members in cut_for.items()),
            addresses=step.state.find_source_addresses(moves),
            failed=parts.failed,
            schedule=whole_schedule,
            restore=reads,
            trusted_from=step.state.trusted_from,
        ),
    )
    # Events: what the order makes of earlier fetches, who joins, and the order itself.
    if join is not None:
        step.add_effect(HandedOver(fetch=join.fetch, order=step.state.order))
    for worker in sorted(step.state.members - before.members) if before.order else ():
        step.add_effect(Joined(worker=worker))
    step.add_effect(
        OrderGiven(
            order=step.state.order,
            schedule=prepared.digest,
            live=len(step.state.members),
            planned_period=round(schedule.seconds(schedule.period_ticks), 9),
            phase=_choose_phase(step.state, schedule),
        )
    )


def _choose_phase(state: RunState, schedule: Schedule) -> Phase:
    if state.rebalanced:
        return "settled"
    return "whole" if _is_whole(schedule) else "at once"


def _is_whole(schedule: Schedule) -> bool:
    return len(schedule.seats) == schedule.grid.pipelines * schedule.grid.columns


def _is_rebalanced(
    step: TransitionBuilder, schedule: Schedule, join: LayerFetch | None, *, restores: bool
) -> bool:
    """Return whether the next order, by `schedule`, counts as rebalanced."""
    # With all workers, only moves between members count, as when one is slow: the first schedule
    # may have other layers than the stages. With fewer workers, layers that moved before the last
    # death do not count.
    before = step.state
    if not any(map(schedule.has_moved_layers, schedule.seats)):
        return False
    stays = before.rebalanced and before.members == frozenset(schedule.seat_of)
    if _is_whole(schedule):
        return schedule != step.rules.first.schedule and (
            stays or (join is not None and join.rebalances)
        )
    return stays or join is not None or restores or before.order == 0


def _open_order(
    step: TransitionBuilder,
    prepared: PreparedSchedule,
    join: LayerFetch | None,
    cut_for: OriginalMembers,
    *,
    restores: bool,
) -> None:
    """Record in the state that a new order begins, with the schedule `prepared`."""
    before, schedule = step.state, prepared.schedule
    members = frozenset(schedule.seat_of)
    order, first = before.order + 1, before.log.next_iteration
    # An order in which no op began was in vain: the next ones follow after pauses.
    nobody_started = (
        isinstance(before.phase, TrainingPhase) and before.phase.ended and not before.phase.started
    )
    # This reports changes of speed, which count in the rebalancing policy below.
    slow = before.slow.with_order(order, schedule, first, step)
    # Layers have just moved for these speeds, unless only optimizer state: no further search.
    rebalancing = step.state.rebalancing
    if rebalancing is not None and join is not None and prepared is not before.prepared:
        rebalancing = replace(rebalancing, closed=(order, join.speeds))
    step.update_state(
        prepared=prepared,
        members=members,
        order=order,
        rebalanced=_is_rebalanced(step, schedule, join, restores=restores),
        paused=PersistentMap(),
        cut_for=cut_for,
        answers={},
        vain=before.vain + 1 if nobody_started else 0,
        newcomers=members - before.members,
        phase=TrainingPhase(
            began=first,
            stop_before=before.data_end,
            restores=restores,
            without_microbatches=_find_idle_members(schedule),
        ),
        empty=before.empty.with_order(members - before.members if before.order else ()),
        recovery=before.recovery.with_order(
            members - before.members,
            at=step.at,
            rebalanced=join is not None and join.rebalances,
            meanwhile=first - join.began if join is not None and join.fetch else 0,
        ),
        joins=before.joins.with_order(step),
        rebalancing=rebalancing,
        log=before.log.with_order(order, members),
        checkpoints=before.checkpoints.with_order(step.at),
        slow=slow,
    )


def _send_shares(step: TransitionBuilder, parts: DividedSchedule) -> None:
    # Find who lacks which content; each is sent once to all who do.
    lacking: dict[str, list[Worker]] = defaultdict(list)
    live = dict(step.state.live)
    for worker, share in parts.shares.items():
        known_contents = live[worker].contents
        unknown = [
            digest
            for digest in dict.fromkeys(share.content_digests)
            if digest not in known_contents
        ]
        live[worker] = replace(
            live[worker], contents=(*known_contents, *unknown)[-MAX_STORED_CONTENTS:]
        )
        for digest in unknown:
            lacking[digest].append(worker)
    # Contents come before the shares that name them.
    step.update_state(live=PersistentMap(live.items()))
    for digest, workers in lacking.items():
        step.send(sorted(workers), ScheduleContent(digest, msgspec.Raw(parts.contents[digest])))
    for worker, share in parts.shares.items():
        step.send((worker,), AssignedShare(step.state.order, share))


def send_end_order(step: TransitionBuilder, *, doubted: bool = False) -> None:
    """Tell all members to stop the current order at once, unless they were told before.

    `doubted` says that the members' state cannot be trusted; they are then told again. Does nothing
    unless the order is one to train.
    """
    # Another coordinator may have to learn from members that their state is in doubt.
    state = step.state
    if isinstance(state.phase, TrainingPhase) and (doubted or not state.phase.ended):
        step.update_state(phase=replace(state.phase, ended=True))
        step.send(sorted(state.members), EndOrder(state.order, doubted))


def send_finish_order(step: TransitionBuilder) -> None:
    """Order members to write the final parameters or, if iterations are left, a checkpoint."""
    state, rules = step.state, step.rules
    # The holders of a layer take turns as its writer.
    holders: dict[int, list[Worker]] = defaultdict(list)
    for worker, layers in sorted(state.held_by_paused.items()):
        for layer in layers:
            holders[layer].append(worker)
    writers = {layer: workers[layer % len(workers)] for layer, workers in sorted(holders.items())}
    # A writer needs all parts of its layers, of which it may keep only some.
    moves = rules.partition.plan_writer_moves(writers, state.paused)
    order, first = state.order + 1, state.log.next_iteration
    step.update_state(
        phase=FinishingPhase(ordered_at=step.at),
        order=order,
        log=state.log.with_order(order, state.members),
        slow=state.slow if state.leaving else state.slow.with_run_ended(first, step),
    )
    step.send(
        sorted(state.members),
        Finish(
            order=order,
            first_iteration=first,
            writers=tuple(writers.items()),
            factor=step.state.log.last_factor,
            moves=moves,
            addresses=state.find_source_addresses(moves),
            parameters=first >= rules.iterations.stop,
        ),
    )


def send_leave(step: TransitionBuilder, why: str | None = None) -> None:
    """Tell all workers to leave, which ends the run.

    Unless `why` is None, users learn that no checkpoint is written, and why.
    """
    if why is not None:
        step.add_effect(
            Noted(text=f"{why}: the run, which was asked to end, ends without another checkpoint")
        )
    step.send(sorted(step.state.live), Leave())
    step.update_state(phase=EndedPhase())


def _find_idle_members(schedule: Schedule) -> frozenset[Worker]:
    busy_programs = set()
    for number, program in enumerate(schedule.programs):
        if any(op.kind in COMPUTE_KINDS for op in program):
            busy_programs.add(number)
    return frozenset(seat.worker for seat in schedule.seats if seat.program not in busy_programs)


ScheduleAttempt = Callable[[], PreparedSchedule | None]
"""Function that returns a schedule, or None while it is planned, or raises NoScheduleError."""


def find_initial_schedule(
    step: TransitionBuilder, live: Collection[Worker]
) -> PreparedSchedule | None:
    """Return the schedule for `live` workers before the first step; None: being planned."""
    # Any schedule will do, because each worker can still build every layer.
    return _try_in_order(_attempt_whole_stages(step, live), _attempt_from_checkpoint(step, live))


def find_immediate_schedule(
    step: TransitionBuilder, live: Collection[Worker]
) -> PreparedSchedule | None:
    """Return the schedule with which paused workers continue soonest; None: being planned."""
    layers_of, placement, grid = step.state.held_by_paused, step.rules.placement, step.state.grid
    holders = _convert_held_layers(step, live, layers_of)
    attempts = [_attempt_whole_stages(step, live)]
    if all(layers_of.get(worker) for worker in live):
        # If some lack layers of their stages, rather move none than load all stages.
        displaced = any(
            not layers_of[worker] >= placement.layers_in_column(grid, worker.column)
            for worker in live
        )
        attempts.insert(
            0 if displaced else 1, lambda: _request_schedule(step, live, holders=holders)
        )
    return _try_in_order(*attempts, lambda: _request_rebalanced(step, holders))


def find_joining_schedule(
    step: TransitionBuilder, live: Collection[Worker]
) -> PreparedSchedule | None:
    """Return the schedule for `live`, members and workers that join; None: being planned."""
    layers_of = step.state.find_held_layers(step.rules.placement)
    holders = _convert_held_layers(step, live, layers_of)
    return _choose_by_layer_policy(step, live, lambda: _request_rebalanced(step, holders))


def find_restored_schedule(
    step: TransitionBuilder, live: Collection[Worker]
) -> PreparedSchedule | None:
    """Return the schedule for workers that restore a checkpoint; None: being planned."""
    return _choose_by_layer_policy(step, live, _attempt_from_checkpoint(step, live))


def find_rebalanced_schedule(step: TransitionBuilder) -> PreparedSchedule | None:
    """Return the best schedule for the members, with layers moved; None: being planned."""
    layers_of = step.state.find_held_layers(step.rules.placement)
    return _request_rebalanced(step, _convert_held_layers(step, step.state.members, layers_of))


def _choose_by_layer_policy(
    step: TransitionBuilder, live: Collection[Worker], moved: ScheduleAttempt
) -> PreparedSchedule | None:
    """Return a schedule with whole stages, or that of `moved`, in which layers may move."""
    # In runs that move layers to better schedules, `moved` comes first.
    whole = _attempt_whole_stages(step, live)
    if step.rules.move_cost is None:
        return _try_in_order(whole, moved)
    return _try_in_order(moved, whole)


def _attempt_whole_stages(step: TransitionBuilder, live: Collection[Worker]) -> ScheduleAttempt:
    return lambda: (
        step.rules.first if _is_first_schedule_for(step, live) else _request_schedule(step, live)
    )


def _attempt_from_checkpoint(step: TransitionBuilder, live: Collection[Worker]) -> ScheduleAttempt:
    return lambda: _request_schedule(step, live, from_checkpoint=True)


def _request_rebalanced(step: TransitionBuilder, holders: HeldLayers) -> PreparedSchedule | None:
    live = [worker for worker, _ in holders]
    if _is_first_schedule_for(step, live):
        return step.rules.first
    return _request_schedule(step, live, holders=holders, rebalanced=True)


def _is_first_schedule_for(step: TransitionBuilder, live: Collection[Worker]) -> bool:
    return (
        step.state.slow.planned_speeds is None
        and step.rules.first.schedule.seat_of.keys() == set(live)
    )


def _request_schedule(
    step: TransitionBuilder,
    live: Collection[Worker],
    *,
    holders: HeldLayers | None = None,
    rebalanced: bool = False,
    from_checkpoint: bool = False,
) -> PreparedSchedule | None:
    """Return the answer to a request for a schedule, or raise it; None: being planned."""
    # The request may be an effect of several events until it is answered: the planner drops copies.
    down = tuple(sorted(set(step.state.grid.workers()).difference(live)))
    question = ScheduleRequest(
        down, step.state.slow.planned_speeds, holders, rebalanced, from_checkpoint
    )
    answer = step.state.answers.get(question)
    if isinstance(answer, Exception):
        raise answer
    if answer is None:
        step.add_effect(question)
    return answer


def _try_in_order(*attempts: ScheduleAttempt) -> PreparedSchedule | None:
    """Return the result of the first attempt that raises no NoScheduleError."""
    # If all raise, users see all messages; after a planner that failed, another try may succeed.
    errors = list[NoScheduleError]()
    for attempt in attempts:
        try:
            return attempt()
        except NoScheduleError as error:
            errors.append(error)
    kind = NoScheduleError
    if any(isinstance(failure, PlannerFailedError) for failure in errors):
        kind = PlannerFailedError
    raise kind(", and ".join(filter(None, dict.fromkeys(map(str, errors)))))


def _convert_held_layers(
    step: TransitionBuilder, live: Collection[Worker], layers_of: Mapping[Worker, frozenset[int]]
) -> HeldLayers:
    placement = step.rules.placement
    return tuple(
        (worker, placement.schedule_layers(layers_of.get(worker, frozenset())))
        for worker in sorted(live)
    )


def describe_losses(losses: Mapping[Worker, WorkerLoss]) -> str:
    """Return the reasons of all losses in one line; without any, that nobody was there."""
    return ", ".join(loss.reason for loss in losses.values()) or "none was there from the start"


def describe_layer_loss(
    losses: Mapping[Worker, WorkerLoss],
    layer: int,
    grid: Grid,
    placement: Placement,
    members: Collection[Worker],
    ready: Collection[Worker],
) -> str:
    """Return the reasons why no worker holds `layer`, separated by commas; empty if not known.

    Parameters
    ----------
    losses
        All lost workers.
    members
        Members of the current order.
    ready
        Connected workers that wait to join.
    """
    # The layer may have been held by workers of its stage, or by others that it had moved to.
    columns = {
        column
        for column in range(grid.columns)
        if layer in placement.layers_in_column(grid, column)
    }
    causes = [
        loss.reason
        for worker, loss in losses.items()
        if layer in loss.layers or worker.column in columns
    ]
    # Workers of the stage that are not lost, but hold nothing, explain the rest.
    for worker in grid.workers():
        if worker.column in columns and worker not in losses and worker not in members:
            causes.append(
                f"worker {worker} is back, but has no layers yet"
                if worker in ready
                else f"worker {worker} was not there from the start"
            )
    return ", ".join(causes)


def record_losses(
    step: TransitionBuilder, reasons: Iterable[tuple[Worker, str]], since: float
) -> None:
    """Record that members are lost, each for a reason, since time `since` (`time.monotonic`).

    Losses of one failure domain in one recovery count as one failure.
    """
    for worker, reason in reasons:
        state, together = step.state, step.rules.domains.workers_failing_with(worker)
        if state.rebalancing is not None and not any(
            other in together for other in state.recovery.dead_workers
        ):
            step.update_state(
                rebalancing=replace(state.rebalancing, failures=state.rebalancing.failures + 1)
            )
        step.update_state(recovery=state.recovery.with_loss(worker, reason, since))
        step.add_effect(Failed(worker=worker, reason=reason))


def record_node_losses(step: TransitionBuilder, lost: Iterable[Worker]) -> None:
    """Record the loss of failure domains whose last live workers were in `lost`.

    These are domains of at least two workers, none of which is live any more.
    """
    domains = step.rules.domains
    workers_by_node = {
        domains.domain_of(worker): domains.workers_failing_with(worker) for worker in lost
    }
    for node, workers in workers_by_node.items():
        if (
            node is not None
            and len(workers) > 1
            and not any(worker in step.state.live for worker in workers)
        ):
            step.update_state(recovery=step.state.recovery.with_node_loss(node))
            step.add_effect(NodeLost(node=node, workers=workers))
