"""Choose what follows when all remaining members have paused, and prepare changes.

Layers for workers that join, and layers that move to a better schedule, are fetched while training
continues. When they have arrived, all members stop before the same iteration. They also stop if the
run or a member is to end, or if another schedule is better for the workers' speeds.
"""

from collections.abc import Collection

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions import checkpoint_rollback, orders
from slipstream.runtime.coordinator.decisions.effects import GiveUpWorker, PlannerFailedError, PreparedSchedule
from slipstream.runtime.coordinator.decisions.orders import (
    find_immediate_schedule,
    find_initial_schedule,
    find_joining_schedule,
    find_settled_schedule,
)
from slipstream.runtime.coordinator.decisions.part_moves import NO_PREVIOUS_OWNERS
from slipstream.runtime.coordinator.decisions.run_state import (
    FinishingPhase,
    GatheringPhase,
    TrainingPhase,
    TransitionBuilder,
    WorkerLoss,
)
from slipstream.runtime.coordinator.decisions.settling import LayerFetch
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import Noted
from slipstream.runtime.protocol.to_worker import LayerMove, Leave
from slipstream.schedules.schedule import NoScheduleError, Worker


def issue_next_order(step: TransitionBuilder) -> None:
    """Give the next order: to train, to finish or to leave. If its schedule is not known yet,
    request it; the answer leads to another call. Raises RunError if the run cannot continue."""
    if _give_up_faulty(step):
        return
    state, stop = step.state, step.rules.iterations.stop
    first = state.log.next_iteration
    if state.data_end is not None and first >= state.data_end:
        step.update_state(stopping=True)
        state = step.state
    untouched = first == step.rules.iterations.start
    missing = [] if untouched else step.find_lost_layers(state.paused)
    if missing or not state.available_workers:
        step.update_state(slow=state.slow.with_readmitted(state.slow.left_out))
    everyone = step.state.available_workers
    if missing:
        checkpoint_rollback.order_rollback(step, checkpoint_rollback.describe_lost_layer(step, missing[0]))
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
    """Give up members whose copies are wrong; return whether there are any."""
    # They count as not paused, so that no order is given before they are lost.
    faulty = [worker for worker in step.state.faulty if worker in step.state.members]
    step.update_state(faulty=(), paused=step.state.paused.without_keys(*faulty))
    for worker in faulty:
        step.add_effect(GiveUpWorker(worker, f"worker {worker} {step.state.fault}"))
    return bool(faulty)


def give_up_unreachable(step: TransitionBuilder) -> bool:
    """Report why the current order was empty; give up the worker at fault after several.

    Returns whether there is one. It counts as not paused, as in `_give_up_faulty`. Raises RunError
    if there were too many and no worker is more likely at fault than the others.
    """
    state, phase = step.state, step.state.phase
    reason = state.empty.reason
    if reason is None or (isinstance(phase, TrainingPhase)
                          and (state.log.next_iteration > phase.began or phase.restores)):
        return False
    step.add_effect(Noted(text=f"order {state.order} ended before any iteration was committed: {reason}"))
    empty = state.empty.with_current_counted()
    step.update_state(empty=empty)
    culprit = empty.find_culprit(state.members)
    if culprit is None and empty.has_ended_too_many:
        raise RunError(f"{empty.number} orders in a row have ended before any iteration was committed, and no single "
                       f"worker is at fault; the last one: {reason}")
    if culprit is not None:
        step.update_state(paused=state.paused.without_keys(culprit),
                          phase=replace(phase, outdated=False) if isinstance(phase, FinishingPhase) else phase)
        step.add_effect(GiveUpWorker(culprit, f"worker {culprit} was named {empty.counts[culprit]} times in "
                                              f"{empty.number} orders in a row in which nothing was committed, last by "
                                              f"{reason}"))
    return culprit is not None


def release_after_save(step: TransitionBuilder) -> bool:
    """Release the members that end and whose layers were saved; return whether there are any.

    The remaining members go back to the checkpoint that was saved. If the result is False, the run
    ends, because it is complete or was told to end, or because no member would remain.
    """
    state = step.state
    if not state.leaving or state.log.next_iteration >= step.rules.iterations.stop or _stop_if_nobody_stays(step):
        return False
    step.update_state(phase=TrainingPhase(ended=True))
    _release_leaving(step)
    return True


def _issue_train_order(step: TransitionBuilder, untouched: bool) -> None:
    state, partition = step.state, step.rules.partition
    join = None if untouched else state.joins.completed_fetch
    prepared = join.prepared if join is not None else _find_speed_schedule(step) or _find_next_schedule(step, untouched)
    if prepared is None:
        return
    schedule = prepared.schedule
    moves, stay = tuple[LayerMove, ...](), NO_PREVIOUS_OWNERS
    if not untouched:
        if join is None:
            stay = partition.find_preserved_ranges(schedule, state.current, state.cut_for, state.paused)
        moves = partition.plan_moves(schedule, state.paused, state.log.next_iteration - 1,
                                     () if join is None else join.moves, cut_for=stay)
    orders.send_train_order(step, prepared, moves, join, cut_for=stay)


def _try_release(step: TransitionBuilder, untouched: bool) -> bool:
    """Release members that are to end; return whether the next order can be given now."""
    # It waits while a schedule without them is planned, or layers that only they hold are saved. If
    # none would remain, or no schedule exists for the others, the whole run is stopped instead.
    # `untouched` says that nothing is committed, so that no layers have to move.
    state = step.state
    staying = state.members - state.leaving
    if _stop_if_nobody_stays(step):
        return True
    if not untouched and step.find_lost_layers(staying):
        orders.send_finish_order(step)
        return False
    try:
        if _find_schedule_for(step, staying, untouched) is None:
            return False
    except (NoScheduleError, RunError):
        step.update_state(stopping=True)
        return True
    _release_leaving(step)
    return True


def _stop_if_nobody_stays(step: TransitionBuilder) -> bool:
    """Stop the run if all live workers are to end. Return whether it is being stopped."""
    if step.state.leaving.issuperset(step.state.live):
        step.update_state(stopping=True)
    return step.state.stopping


def _release_leaving(step: TransitionBuilder) -> None:
    leaving, lost = sorted(step.state.leaving), step.state.lost
    reasons = {worker: f"worker {worker} has left, as it was asked to" for worker in leaving}
    for worker, reason in reasons.items():
        lost = lost.with_entry(worker, WorkerLoss(reason, step.state.held_by_paused.get(worker, frozenset())))
    step.send(leaving, Leave())
    step.update_state(lost=lost)
    step.remove_workers(leaving)
    orders.record_losses(step, reasons.items(), step.at)


def _find_speed_schedule(step: TransitionBuilder) -> PreparedSchedule | None:
    """Return the schedule for the measured speeds; None if members have changed since."""
    decision = step.state.slow.decision
    if decision is None or decision.prepared is None:
        return None
    planned_for = {*decision.prepared.schedule.seat_of, *decision.left_out}
    return decision.prepared if step.state.members == planned_for else None


def _find_next_schedule(step: TransitionBuilder, untouched: bool) -> PreparedSchedule | None:
    """Return the schedule of an order that no fetch prepared; None while it is planned."""
    # If members can train without the workers that wait to join, it is for members only; the others
    # fetch their layers meanwhile. Otherwise, and if the run is `untouched`, it is for all, and
    # members wait until the others have their layers. Raises RunError if there is no schedule.
    state = step.state
    if not untouched and state.members and state.waiting_workers:
        try:
            return _find_schedule_for(step, state.members, untouched)
        except (NoScheduleError, RunError):
            pass
    try:
        return _find_schedule_for(step, state.available_workers, untouched)
    except PlannerFailedError:
        raise  # not a RunError: a restarted coordinator asks the planner again
    except NoScheduleError as error:
        raise RunError(", and ".join(filter(None, (orders.describe_losses(state.lost), str(error))))) from None


def _find_schedule_for(step: TransitionBuilder, live: Collection[Worker], untouched: bool) -> PreparedSchedule | None:
    return find_initial_schedule(step, live) if untouched else find_immediate_schedule(step, live)


def prepare_changes(step: TransitionBuilder, phase: TrainingPhase) -> None:
    """Prepare changes while all members train in `phase`, as far as possible now.

    Start fetches of layers for workers that join or for better schedules, and choose the iterations
    before which all members stop or save a checkpoint.
    """
    if phase.ended:
        return
    _plan_for_speeds(step)
    if _can_stop(step):
        if not _plan_join(step):
            _plan_repartition(step)
            _plan_settling(step)
        _choose_stop(step)
        _choose_save(step)


def _plan_for_speeds(step: TransitionBuilder) -> None:
    """Request a schedule for changed speeds, and let workers left out long enough join."""
    state = step.state
    step.update_state(slow=state.slow.request_decision(state.current, state.log.next_iteration, step))


def _begin_fetch(step: TransitionBuilder, prepared: PreparedSchedule, *, settles: bool = False) -> bool:
    """Start to fetch what a schedule needs; return whether a change is pending now."""
    # `settles` says that members stay the same and only their layers change.
    state = step.state
    join = LayerFetch(prepared=prepared, order=state.order, began=state.log.next_iteration, settles=settles,
                      moves=step.plan_fetches(prepared.schedule), speeds=state.slow.planned_speeds)
    step.update_state(joins=state.joins.begin_fetch(join, state.find_source_addresses(join.moves), state.live, step))
    return step.state.joins.join is not None


def _plan_join(step: TransitionBuilder) -> bool:
    """Start a fetch for workers that wait to join; return whether their schedule is planned."""
    # They continue to wait if there is none, or if they would have nothing to do in it.
    state = step.state
    if not (state.joins.can_begin(step.at) or state.joins.is_preemptible) or not (waiting := state.waiting_workers):
        return False
    try:
        prepared = find_joining_schedule(step, state.available_workers)
    except (NoScheduleError, RunError):
        return False
    if prepared is None or not waiting & prepared.schedule.seat_of.keys():
        return prepared is None
    if state.joins.is_preemptible:
        step.update_state(joins=state.joins.cancel_fetch("a worker wants to join", state.live, step))
    if step.state.joins.can_begin(step.at):
        _begin_fetch(step, prepared)
    return False


def _plan_repartition(step: TransitionBuilder) -> None:
    """Start a fetch so that no partition includes lost members any more."""
    # Until it is complete, some parts of the optimizer state exist in one copy only.
    state = step.state
    if state.cut_for and state.joins.can_begin(step.at) and not _begin_fetch(step, state.prepared, settles=True):
        # without `settles`, failed fetches become an order whose parts move while all wait
        _begin_fetch(step, state.prepared)


def _plan_settling(step: TransitionBuilder) -> None:
    """Start a fetch for a better schedule that saves more time than its moves cost."""
    state = step.state
    speeds, join = state.slow.planned_speeds, state.joins.join
    if join is not None and state.joins.is_preemptible and join.speeds != speeds:
        step.update_state(joins=state.joins.cancel_fetch("the speeds of the workers have changed", state.live, step))
        state = step.state
    settler, present = state.settler, (state.order, speeds)
    if settler is None or settler.closed == present or state.slow.is_deciding or not state.joins.can_begin(step.at):
        return
    try:
        prepared = find_settled_schedule(step)
    except (NoScheduleError, RunError):
        step.update_state(settler=replace(settler, closed=present))
        return
    assert isinstance(state.phase, TrainingPhase)
    old = state.log.median_period_after(max(state.phase.began, state.slow.since))
    if prepared is None or old is None:  # only the ratio of planned periods is used, so a measured one is needed
        return
    schedule, held = prepared.schedule, state.find_held_layers(step.rules.placement)
    moves = {(move.target, move.layer): move for move in step.plan_fetches(schedule)
             if move.layer not in held.get(move.target, ())}.values()
    new = old * schedule.seconds(schedule.period_ticks) / state.slow.planned_period_of(state.current)
    if not settler.decide_move(old, new, moves, pause=state.recovery.last_recovery_seconds, to=step) \
            or not _begin_fetch(step, prepared, settles=True):
        step.update_state(settler=replace(settler, closed=present))


def _choose_stop(step: TransitionBuilder) -> None:
    """Choose the iteration before which all members stop, if there is a reason to."""
    state = step.state
    if state.joins.is_complete or state.stopping or state.leaving or state.slow.decision is not None:
        # Two after the furthest reported one: a member may already run the next iteration, and the
        # acknowledgement of its report on that one tells it to stop.
        step.update_state(phase=replace(state.phase, stop_before=_find_earliest_stop(step)))


def _choose_save(step: TransitionBuilder) -> None:
    """Choose the iteration before whose step all members save, if a checkpoint is due."""
    state, before = step.state, _find_earliest_stop(step)
    if state.checkpoints.is_due(step.at) and _can_stop(step):
        step.update_state(phase=replace(state.phase, save_before=before),
                          checkpoints=state.checkpoints.with_request(before, step.at))


def _find_earliest_stop(step: TransitionBuilder) -> int:
    return step.state.log.furthest_reported + 2


def _can_stop(step: TransitionBuilder) -> bool:
    phase = step.state.phase
    return (isinstance(phase, TrainingPhase) and not phase.ended and phase.stop_before is None
            and _find_earliest_stop(step) < step.rules.iterations.stop)
