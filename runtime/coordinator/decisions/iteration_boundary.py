"""Boundary: what is prepared while all train, and the iteration boundary at which it takes place.

Workers that join and layers that move are fetched meanwhile. Once they are there, or the run or a member is to end, or
another schedule is better for the workers' speeds, all members stop before the same iteration.
"""

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.join_planning import Join
from slipstream.runtime.coordinator.decisions.run_state import Step, Training
from slipstream.runtime.coordinator.decisions.schedule_choice import settled, with_joining
from slipstream.runtime.errors import RunError
from slipstream.schedules.schedule import NoScheduleError, Schedule


def look(step: Step, phase: Training) -> None:
    """Prepare what has become possible, while all train."""
    if phase.ended:
        return
    _look_for_slow(step)
    if _may_stop(step):
        if not _plan_join(step):
            _plan_cuts(step)
            _plan_settling(step)
        _choose_stop(step)
        _choose_save(step)


def _look_for_slow(step: Step) -> None:
    """Where speeds have changed, have a schedule planned for them; those who were left out long enough, join."""
    state = step.state
    step.change(slow=state.slow.look(state.current, state.log.next_iteration, step))


def _begin(step: Step, schedule: Schedule, *, settles: bool = False) -> bool:
    """Start a fetch for a schedule, while training goes on; whether there is one now."""
    state = step.state
    join = Join(schedule=schedule, order=state.order, began=state.log.next_iteration, settles=settles,
                moves=step.fetched_for(schedule), speeds=state.slow.speeds)
    step.change(joins=state.joins.begin(join, state.addresses(join.moves), state.live, step))
    return step.state.joins.join is not None


def _plan_join(step: Step) -> bool:
    """Where workers want to join, start a fetch of the layers that this needs, while training goes on.

    Where there is no schedule with them, or they would have nothing to do, they wait, and the members train on. Whether
    one is being found.
    """
    state = step.state
    if not (state.joins.open(step.at) or state.joins.gives_way) or not (waiting := state.ready):
        return False
    try:
        schedule = with_joining(step, state.everyone)
    except (NoScheduleError, RunError):
        return False
    if schedule is None or not waiting & schedule.seat_of.keys():
        return schedule is None
    if state.joins.gives_way:
        step.change(joins=state.joins.cancel("a worker wants to join", state.live, step))
    if step.state.joins.open(step.at):
        _begin(step, schedule)
    return False


def _plan_cuts(step: Step) -> None:
    """Where parts of optimizer states have stayed as they were, as some have gone who keep them, start a fetch of parts
    that are cut anew: of some parts, there is only one copy left."""
    state = step.state
    if state.cut_for and state.joins.open(step.at) and not _begin(step, state.current, settles=True):
        _begin(step, state.current)  # fetches have failed too often: parts move while all wait


def _plan_settling(step: Step) -> None:
    """Where there is a schedule for the same members that is worth moving layers, start a fetch of these."""
    state = step.state
    speeds, join = state.slow.speeds, state.joins.join
    if join is not None and state.joins.gives_way and join.speeds != speeds:
        step.change(joins=state.joins.cancel("the speeds of the workers have changed", state.live, step))
        state = step.state
    settler, present = state.settler, (state.order, speeds)
    if settler is None or settler.closed == present or state.slow.deciding or not state.joins.open(step.at):
        return
    try:
        schedule = settled(step)
    except (NoScheduleError, RunError):
        step.change(settler=replace(settler, closed=present))
        return
    assert isinstance(state.phase, Training)
    old = state.log.period_after(max(state.phase.began, state.slow.since))
    if schedule is None or old is None:  # what is planned says how much longer one takes than the other, no more
        return
    held = state.held_now(step.rules.placement)
    moves = {(move.target, move.layer): move for move in step.fetched_for(schedule)
             if move.layer not in held.get(move.target, ())}.values()
    new = old * schedule.seconds(schedule.period_ticks) / state.slow.period_of(state.current)
    if not settler.pays(old, new, moves, pause=state.recovery.last_seconds, to=step) \
            or not _begin(step, schedule, settles=True):
        step.change(settler=replace(settler, closed=present))


def _choose_stop(step: Step) -> None:
    """Choose the iteration before which all members stop, where that is wanted.

    A worker that has reported the furthest iteration has been acknowledged, and runs the one after it. When members
    report that one, the acknowledgement tells them to stop.
    """
    state = step.state
    if state.joins.complete or state.stopping or state.leaving or state.slow.decision is not None:
        step.change(phase=replace(state.phase, stop_before=_earliest_stop(step)))


def _choose_save(step: Step) -> None:
    """Where a checkpoint is due, choose the iteration before whose step all members save; told like a stop."""
    state, before = step.state, _earliest_stop(step)
    if state.checkpoints.due(step.at) and _may_stop(step):
        step.change(phase=replace(state.phase, save_before=before),
                    checkpoints=state.checkpoints.asked(before, step.at))


def _earliest_stop(step: Step) -> int:
    return step.state.log.furthest + 2


def _may_stop(step: Step) -> bool:
    phase = step.state.phase
    return (isinstance(phase, Training) and not phase.ended and phase.stop_before is None
            and _earliest_stop(step) < step.rules.iterations.stop)
