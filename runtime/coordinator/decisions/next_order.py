"""Next order: chooses what follows when all remaining members have paused."""

from collections.abc import Collection

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions import checkpoint_rollback, lost_workers, orders
from slipstream.runtime.coordinator.decisions.effects import GiveUpWorker
from slipstream.runtime.coordinator.decisions.part_moves import NO_PREVIOUS_OWNERS
from slipstream.runtime.coordinator.decisions.run_state import (
    FinishingPhase,
    GatheringPhase,
    TrainingPhase,
    TransitionBuilder,
    WorkerLoss,
)
from slipstream.runtime.coordinator.decisions.schedule_choice import find_immediate_schedule, find_initial_schedule
from slipstream.runtime.coordinator.decisions.schedule_requests import PlannerFailedError, PreparedSchedule
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import Noted
from slipstream.runtime.protocol.to_worker import LayerMove, Leave
from slipstream.schedules.schedule import NoScheduleError, Worker


def issue_next_order(step: TransitionBuilder) -> None:
    """Give the next order: to train, to finish or to leave. If its schedule is not known yet, request it; the answer
    leads to another call. Raises RunError if the run cannot continue."""
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
        why = f"no worker is left: {lost_workers.describe_losses(state.lost)}"
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
    """Give up members whose copies are wrong; return whether there are any. They count as not paused, so that no order
    is given before they are lost."""
    faulty = [worker for worker in step.state.faulty if worker in step.state.members]
    step.update_state(faulty=(), paused=step.state.paused.without_keys(*faulty))
    for worker in faulty:
        step.add_effect(GiveUpWorker(worker, f"worker {worker} {step.state.fault}"))
    return bool(faulty)


def give_up_unreachable(step: TransitionBuilder) -> bool:
    """Report why the current order was empty, and give up the worker at fault after several such orders in a row;
    return whether there is one. It counts as not paused, as in `_give_up_faulty`.

    Raises RunError if there were too many and no worker is more likely at fault than the others.
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
    """Let the members leave that were told to end and whose layers the last order has saved; return whether there were
    any.

    The remaining members go back to the checkpoint that was saved. If the result is False, the run ends, because it is
    complete or was told to end, or because no member would remain.
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
    """Release members that received a signal to end; return whether the next order can be given now.

    The result is False while a schedule without these members is being planned, or while layers that only they hold are
    being saved. If no member would remain, or no schedule exists for the remaining ones, the whole run is stopped
    instead. Set `untouched` to True if the run has committed no iteration, so that no layers have to move.
    """
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
    """Stop the run if all live workers received a signal to end; return whether it is being stopped, for this or
    another reason."""
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
    lost_workers.record_losses(step, reasons.items(), step.at)


def _find_speed_schedule(step: TransitionBuilder) -> PreparedSchedule | None:
    """Return the schedule chosen for the measured speeds; None if there is none or members have changed since."""
    decision = step.state.slow.decision
    if decision is None or decision.prepared is None:
        return None
    planned_for = {*decision.prepared.schedule.seat_of, *decision.left_out}
    return decision.prepared if step.state.members == planned_for else None


def _find_next_schedule(step: TransitionBuilder, untouched: bool) -> PreparedSchedule | None:
    """Find the schedule of an order that no fetch of layers has prepared, and return it; None while it is being
    planned.

    If members can train without the workers that wait to join, the schedule is for members only; the others fetch their
    layers meanwhile. Otherwise it is for all, and members wait until the others have their layers. The argument
    `untouched` is True if the run has committed no iteration: then nothing is fetched, and the schedule is for all.
    Raises RunError if there is no schedule.
    """
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
        raise RunError(", and ".join(filter(None, (lost_workers.describe_losses(state.lost), str(error))))) from None


def _find_schedule_for(step: TransitionBuilder, live: Collection[Worker], untouched: bool) -> PreparedSchedule | None:
    return find_initial_schedule(step, live) if untouched else find_immediate_schedule(step, live)
