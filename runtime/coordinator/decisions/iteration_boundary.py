"""Iteration boundary: changes that are prepared while all members train, and the boundary at which they take place.

Layers for workers that join, and layers that move to a better schedule, are fetched while training continues. When they
have arrived, all members stop before the same iteration. They also stop if the run or a member is to end, or if another
schedule is better for the workers' speeds.
"""

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.layer_fetches import LayerFetch
from slipstream.runtime.coordinator.decisions.run_state import TrainingPhase, TransitionBuilder
from slipstream.runtime.coordinator.decisions.schedule_choice import find_joining_schedule, find_settled_schedule
from slipstream.runtime.coordinator.decisions.schedule_requests import PreparedSchedule
from slipstream.runtime.errors import RunError
from slipstream.schedules.schedule import NoScheduleError


def prepare_changes(step: TransitionBuilder, phase: TrainingPhase) -> None:
    """Prepare changes while all members train (`phase` is the present one), as far as that is possible now: start
    fetches of layers for workers that join or for better schedules, and choose the iterations before which all members
    stop or save a checkpoint."""
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
    """Request a decision on the schedule if workers' speeds have changed, and let workers that were left out long
    enough join again."""
    state = step.state
    step.update_state(slow=state.slow.request_decision(state.current, state.log.next_iteration, step))


def _begin_fetch(step: TransitionBuilder, prepared: PreparedSchedule, *, settles: bool = False) -> bool:
    """Start to fetch what workers lack for a schedule while training continues; return whether a fetch, or a change
    that needs none, is pending now. Set `settles` to True if the members stay the same and only their layers change."""
    state = step.state
    join = LayerFetch(prepared=prepared, order=state.order, began=state.log.next_iteration, settles=settles,
                      moves=step.plan_fetches(prepared.schedule), speeds=state.slow.planned_speeds)
    step.update_state(joins=state.joins.begin_fetch(join, state.find_source_addresses(join.moves), state.live, step))
    return step.state.joins.join is not None


def _plan_join(step: TransitionBuilder) -> bool:
    """Start a fetch of the layers that workers which wait to join need; return whether a schedule that includes these
    workers is still being planned.

    If there is no such schedule, or if they would have nothing to do in it, they continue to wait while the members
    train.
    """
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
    """Start a fetch of the parts that members need so that no partition includes lost members any more. Until it is
    complete, some parts of the optimizer state exist in one copy only."""
    state = step.state
    if state.cut_for and state.joins.can_begin(step.at) and not _begin_fetch(step, state.prepared, settles=True):
        # without `settles`, failed fetches become an order whose parts move while all wait
        _begin_fetch(step, state.prepared)


def _plan_settling(step: TransitionBuilder) -> None:
    """Start a fetch of layers for a better schedule for the same members, if there is one that saves more time before
    the next failure than moving the layers costs."""
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
    """Choose the iteration before which all members stop, if layers for a change have arrived, the run or a member is
    to end, or another schedule is better for the workers' speeds.

    It is two after the furthest reported one: a member may already run the next iteration, and the acknowledgement of
    its report on that one tells it to stop.
    """
    state = step.state
    if state.joins.is_complete or state.stopping or state.leaving or state.slow.decision is not None:
        step.update_state(phase=replace(state.phase, stop_before=_find_earliest_stop(step)))


def _choose_save(step: TransitionBuilder) -> None:
    """Choose the iteration before whose optimizer step all members save their layers, if a checkpoint is due; they are
    told by acknowledgements."""
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
