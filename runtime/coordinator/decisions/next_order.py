"""Choose what follows when all remaining members have paused, and prepare changes.

Layers for workers that join, and layers that move to a better schedule, are fetched while training
continues. When they have arrived, all members stop before the same iteration. They also stop if the
run or a member is to end, or if another schedule is better for the workers' speeds.

`untouched` says that the run has committed no iteration yet, so that each worker can still build
every layer.
"""

from collections.abc import Collection

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions import checkpoint_rollback, orders
from slipstream.runtime.coordinator.decisions.effects import (
    GiveUpWorker,
    PlannerFailedError,
    PreparedSchedule,
)
from slipstream.runtime.coordinator.decisions.orders import (
    find_immediate_schedule,
    find_initial_schedule,
    find_joining_schedule,
    find_rebalanced_schedule,
)
from slipstream.runtime.coordinator.decisions.part_moves import NO_PREVIOUS_OWNERS
from slipstream.runtime.coordinator.decisions.rebalancing import LayerFetch
from slipstream.runtime.coordinator.decisions.run_state import (
    FinishingPhase,
    GatheringPhase,
    TrainingPhase,
    TransitionBuilder,
    WorkerLoss,
)
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import Noted
from slipstream.runtime.protocol.to_worker import LayerMove, Leave
from slipstream.schedules.schedule import NoScheduleError, Worker


def issue_next_order(step: TransitionBuilder) -> None:
    """Give the next order: to train, to finish or to leave.

    If the order's schedule is not known yet, requests it; the answer leads to another call. Members
    with wrong copies or samples are given up first, before any order. Raises RunError if the run
    cannot continue, and PlannerFailedError if the planner itself failed.
    """
    # Nothing is ordered before members with wrong copies are lost.
    if _give_up_faulty(step):
        return
    # Without data for the next iteration, the run ends.
    state, stop = step.state, step.rules.iterations.stop
    first = state.log.next_iteration
    if state.data_end is not None and first >= state.data_end:
        step.update_state(stopping=True)
        state = step.state
    # Whoever is left out as slow is better than nobody.
    untouched = first == step.rules.iterations.start
    missing = [] if untouched else step.find_lost_layers(state.paused)
    if missing or not state.available_workers:
        step.update_state(slow=state.slow.with_readmitted(state.slow.left_out))
    everyone = step.state.available_workers
    # Go back if layers are lost or copies differ; otherwise leave, finish or train.
    if missing:
        checkpoint_rollback.order_rollback(
            step, checkpoint_rollback.describe_lost_layer(step, missing[0])
        )
    elif state.doubt is not None:
        checkpoint_rollback.order_rollback(step, state.doubt)
    elif not everyone:
        why = f"no worker is left: {orders.describe_losses(state.lost)}"
        if not state.stopping:
            raise RunError(why)
        orders.send_leave(step, why)
    elif not state.leaving or first >= stop or _try_release(step, untouched):
        if step.state.stopping and untouched:
            orders.send_leave(step)
        elif (first >= stop or step.state.stopping) and not isinstance(state.phase, GatheringPhase):
            orders.send_finish_order(step)
        else:
            _issue_train_order(step, untouched)


def _give_up_faulty(step: TransitionBuilder) -> bool:
    # Faulty members count as not paused, so that no order is given before they are lost.
    faulty = [worker for worker in step.state.faulty if worker in step.state.members]
    step.update_state(faulty=(), paused=step.state.paused.without_keys(*faulty))
    for worker in faulty:
        step.add_effect(GiveUpWorker(worker, f"worker {worker} {step.state.fault}"))
    return bool(faulty)


def give_up_unreachable(step: TransitionBuilder) -> bool:
    """Report why the current order ended empty, and give up the worker at fault.

    Returns whether a worker is given up, which takes several empty orders in a row. Does nothing if
    the order ended without an error, has committed an iteration, or read a checkpoint. Raises
    RunError after too many empty orders, if no worker is more likely at fault than the others.
    """
    state, phase = step.state, step.state.phase
    reason = state.empty.reason
    if reason is None or (
        isinstance(phase, TrainingPhase)
        and (state.log.next_iteration > phase.began or phase.restores)
    ):
        return False
    # The order is empty: users see the reason, and it counts against those that members named.
    step.add_effect(
        Noted(text=f"order {state.order} ended before any iteration was committed: {reason}")
    )
    # Is one worker at fault? If not, no order would ever commit anything, and the run ends.
    empty = state.empty.with_current_counted()
    step.update_state(empty=empty)
    culprit = empty.find_culprit(state.members)
    if culprit is None and empty.has_ended_too_many:
        raise RunError(
            f"{empty.number} orders in a row have ended before any iteration was committed, and no "
            f"single worker is at fault; the last one: {reason}"
        )
    if culprit is not None:
        # It counts as not paused, so that no order is given before it is lost.
        step.update_state(
            paused=state.paused.without_keys(culprit),
            phase=replace(phase, outdated=False) if isinstance(phase, FinishingPhase) else phase,
        )
        step.add_effect(
            GiveUpWorker(
                culprit,
                f"worker {culprit} was named {empty.counts[culprit]} times in "
                f"{empty.number} orders in a row in which nothing was committed, last by "
                f"{reason}",
            )
        )
    return culprit is not None


def release_after_save(step: TransitionBuilder) -> bool:
    """Let members leave whose layers were saved; return False if the run itself ends instead."""
    state = step.state
    if (
        not state.leaving
        or state.log.next_iteration >= step.rules.iterations.stop
        or _stop_if_nobody_stays(step)
    ):
        return False
    step.update_state(phase=TrainingPhase(ended=True))
    _release_leaving(step)
    return True


def _issue_train_order(step: TransitionBuilder, untouched: bool) -> None:
    state, partition = step.state, step.rules.partition
    # By which schedule? That of a fetch, else that for the speeds, else that for who is left.
    join = None if untouched else state.joins.completed_fetch
    if join is not None:
        prepared: PreparedSchedule | None = join.prepared
    else:
        prepared = _find_speed_schedule(step) or _find_next_schedule(step, untouched)
    if prepared is None:
        return
    schedule = prepared.schedule
    # What moves before the first op? Before the first commit nothing: all build their layers.
    moves, preserved = tuple[LayerMove, ...](), NO_PREVIOUS_OWNERS
    if not untouched:
        if join is None:
            preserved = partition.find_preserved_ranges(
                schedule, state.current, state.cut_for, state.paused
            )
        moves = partition.plan_moves(
            schedule,
            state.paused,
            state.log.next_iteration - 1,
            () if join is None else join.moves,
            cut_for=preserved,
        )
    orders.send_train_order(step, prepared, moves, join, cut_for=preserved)


def _try_release(step: TransitionBuilder, untouched: bool) -> bool:
    """Release members that have a signal to end; return whether an order can follow now."""
    # If none would remain, or no schedule exists for the others, the whole run is stopped instead.
    state = step.state
    staying = state.members - state.leaving
    if _stop_if_nobody_stays(step):
        return True
    # Layers that only the leaving members hold are saved first.
    if not untouched and step.find_lost_layers(staying):
        orders.send_finish_order(step)
        return False
    # Then a schedule for the others must exist.
    try:
        if _find_schedule_for(step, staying, untouched) is None:
            return False
    except (NoScheduleError, RunError):
        step.update_state(stopping=True)
        return True
    _release_leaving(step)
    return True


def _stop_if_nobody_stays(step: TransitionBuilder) -> bool:
    """Stop the run if all live workers are to end; return whether it stops."""
    if step.state.leaving.issuperset(step.state.live):
        step.update_state(stopping=True)
    return step.state.stopping


def _release_leaving(step: TransitionBuilder) -> None:
    # Members that leave count as lost from now on, and what they held is gone with them.
    leaving, lost = sorted(step.state.leaving), step.state.lost
    reasons = {worker: f"worker {worker} has left, as it was asked to" for worker in leaving}
    for worker, reason in reasons.items():
        lost = lost.with_entry(
            worker, WorkerLoss(reason, step.state.held_by_paused.get(worker, frozenset()))
        )
    step.send(leaving, Leave())
    step.update_state(lost=lost)
    step.remove_workers(leaving)
    orders.record_losses(step, reasons.items(), step.at)


def _find_speed_schedule(step: TransitionBuilder) -> PreparedSchedule | None:
    # The decision was made for certain workers, and may be outdated by a loss.
    decision = step.state.slow.decision
    if decision is None or decision.prepared is None:
        return None
    planned_for = {*decision.prepared.schedule.seat_of, *decision.left_out}
    return decision.prepared if step.state.members == planned_for else None


def _find_next_schedule(step: TransitionBuilder, untouched: bool) -> PreparedSchedule | None:
    """Return the schedule of an order that no fetch prepared; None while it is planned."""
    # If members can train without the workers that wait to join, the schedule is for members only;
    # the others fetch their layers meanwhile.
    state = step.state
    if not untouched and state.members and state.waiting_workers:
        try:
            return _find_schedule_for(step, state.members, untouched)
        except (NoScheduleError, RunError):
            pass
    # Otherwise it is for all, and members wait until the others have their layers.
    try:
        return _find_schedule_for(step, state.available_workers, untouched)
    except PlannerFailedError:
        raise  # not a RunError: a restarted coordinator asks the planner again
    except NoScheduleError as error:
        raise RunError(
            ", and ".join(filter(None, (orders.describe_losses(state.lost), str(error))))
        ) from None


def _find_schedule_for(
    step: TransitionBuilder, live: Collection[Worker], untouched: bool
) -> PreparedSchedule | None:
    return find_initial_schedule(step, live) if untouched else find_immediate_schedule(step, live)


def prepare_changes(step: TransitionBuilder, phase: TrainingPhase) -> None:
    """Prepare joins, moved layers, stops and checkpoints while all train, unless told to stop."""
    if phase.ended:
        return
    # One change at a time: joins come first, then missing copies of state, then better schedules.
    _plan_for_speeds(step)
    if _can_stop(step):
        if not _plan_join(step):
            _plan_repartition(step)
            _plan_rebalancing(step)
        _choose_stop(step)
        _choose_save(step)


def _plan_for_speeds(step: TransitionBuilder) -> None:
    state = step.state
    step.update_state(
        slow=state.slow.request_decision(state.current, state.log.next_iteration, step)
    )


def _begin_fetch(
    step: TransitionBuilder, prepared: PreparedSchedule, *, rebalances: bool = False
) -> bool:
    """Start a fetch; return whether a change pends. `rebalances`: members stay the same."""
    state = step.state
    join = LayerFetch(
        prepared=prepared,
        order=state.order,
        began=state.log.next_iteration,
        rebalances=rebalances,
        moves=step.plan_fetches(prepared.schedule),
        speeds=state.slow.planned_speeds,
    )
    step.update_state(
        joins=state.joins.begin_fetch(
            join, state.find_source_addresses(join.moves), state.live, step
        )
    )
    return step.state.joins.join is not None


def _plan_join(step: TransitionBuilder) -> bool:
    """Start a fetch for waiting workers; return whether its schedule is still being planned."""
    # The workers continue to wait if there is no schedule, or if it has nothing for them to do.
    state = step.state
    # Is anybody waiting, and no change pending that has to be made first?
    if not (state.joins.can_begin(step.at) or state.joins.is_preemptible) or not (
        waiting := state.waiting_workers
    ):
        return False
    try:
        prepared = find_joining_schedule(step, state.available_workers)
    except (NoScheduleError, RunError):
        return False
    if prepared is None or not waiting & prepared.schedule.seat_of.keys():
        return prepared is None
    # More workers are better than better placed layers.
    if state.joins.is_preemptible:
        step.update_state(
            joins=state.joins.cancel_fetch("a worker wants to join", state.live, step)
        )
    if step.state.joins.can_begin(step.at):
        _begin_fetch(step, prepared)
    return False


def _plan_repartition(step: TransitionBuilder) -> None:
    # Until ranges that have lost members are partitioned anew, some parts of the optimizer state
    # exist in one copy only.
    state = step.state
    if (
        state.cut_for
        and state.joins.can_begin(step.at)
        and not _begin_fetch(step, state.prepared, rebalances=True)
    ):
        # without `rebalances`, failed fetches become an order whose parts move while all wait
        _begin_fetch(step, state.prepared)


def _plan_rebalancing(step: TransitionBuilder) -> None:
    """Start a fetch for a better schedule that saves more time than its moves cost."""
    state = step.state
    # Drop a change that was planned for other speeds.
    speeds, join = state.slow.planned_speeds, state.joins.join
    if join is not None and state.joins.is_preemptible and join.speeds != speeds:
        step.update_state(
            joins=state.joins.cancel_fetch(
                "the speeds of the workers have changed", state.live, step
            )
        )
        state = step.state
    # Is there still something to find in this order, at these speeds?
    rebalancing, present = state.rebalancing, (state.order, speeds)
    if (
        rebalancing is None
        or rebalancing.closed == present
        or state.slow.is_deciding
        or not state.joins.can_begin(step.at)
    ):
        return
    try:
        prepared = find_rebalanced_schedule(step)
    except (NoScheduleError, RunError):
        step.update_state(rebalancing=replace(rebalancing, closed=present))
        return
    assert isinstance(state.phase, TrainingPhase)
    old = state.log.median_period_after(max(state.phase.began, state.slow.since))
    # Only the ratio of planned periods is used, so a measured one is needed.
    if prepared is None or old is None:
        return
    # What would it cost? Each layer that a worker lacks counts once, in however many parts.
    schedule, layers_of = prepared.schedule, state.find_held_layers(step.rules.placement)
    moves = {
        (move.target, move.layer): move
        for move in step.plan_fetches(schedule)
        if move.layer not in layers_of.get(move.target, ())
    }.values()
    # What would it gain? Start the fetch if it pays; if not, search no more.
    new = (
        old * schedule.seconds(schedule.period_ticks) / state.slow.planned_period_of(state.current)
    )
    if not rebalancing.decide_move(
        old, new, moves, pause=state.recovery.last_recovery_seconds, to=step
    ) or not _begin_fetch(step, prepared, rebalances=True):
        step.update_state(rebalancing=replace(rebalancing, closed=present))


def _choose_stop(step: TransitionBuilder) -> None:
    state = step.state
    if (
        state.joins.is_complete
        or state.stopping
        or state.leaving
        or state.slow.decision is not None
    ):
        # Two after the furthest reported one: a member may already run the next iteration, and the
        # acknowledgement of its report on that one tells it where to stop.
        step.update_state(phase=replace(state.phase, stop_before=_find_earliest_stop(step)))


def _choose_save(step: TransitionBuilder) -> None:
    """Choose the iteration before whose step all members save, if a checkpoint is due."""
    # All save the same state: the iteration is one that no member can have begun.
    state, before = step.state, _find_earliest_stop(step)
    if state.checkpoints.is_due(step.at) and _can_stop(step):
        step.update_state(
            phase=replace(state.phase, save_before=before),
            checkpoints=state.checkpoints.with_request(before, step.at),
        )


def _find_earliest_stop(step: TransitionBuilder) -> int:
    return step.state.log.furthest_reported + 2


def _can_stop(step: TransitionBuilder) -> bool:
    phase = step.state.phase
    return (
        isinstance(phase, TrainingPhase)
        and not phase.ended
        and phase.stop_before is None
        and _find_earliest_stop(step) < step.rules.iterations.stop
    )
