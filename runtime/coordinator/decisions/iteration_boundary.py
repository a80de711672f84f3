"""Iteration boundary: changes that are prepared while all members train, and the boundary at which they take place.

Layers for workers that join, and layers that move to a better schedule, are fetched while training continues. When they
have arrived, all members stop before the same iteration. They also stop if the run or a member is to end, or if another
schedule is better for the workers' speeds.
"""

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.join_planning import Join
from slipstream.runtime.coordinator.decisions.run_state import Step, Training
from slipstream.runtime.coordinator.decisions.schedule_choice import settled, with_joining
from slipstream.runtime.errors import RunError
from slipstream.schedules.schedule import NoScheduleError, Schedule


def look(step: Step, phase: Training) -> None:
    """Prepare the changes that have become possible while all members train."""
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
    """Request a schedule for changed speeds of workers, and let workers that were left out long enough join again."""
    state = step.state
    step.change(slow=state.slow.look(state.current, state.log.next_iteration, step))


def _begin(step: Step, schedule: Schedule, *, settles: bool = False) -> bool:
    """Start a fetch for a schedule while training continues; return whether a fetch or a join is pending now."""
    state = step.state
    join = Join(schedule=schedule, order=state.order, began=state.log.next_iteration, settles=settles,
                moves=step.fetched_for(schedule), speeds=state.slow.speeds)
    step.change(joins=state.joins.begin(join, state.addresses(join.moves), state.live, step))
    return step.state.joins.join is not None


def _plan_join(step: Step) -> bool:
    """Start a fetch of the layers that waiting workers need; return whether a schedule for them is still being planned.

    If there is no schedule with them, or if they would have nothing to do, they continue to wait while the members
    train.
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
    """Start a fetch for a new partition of the ranges that still have the partition of lost members. Until then, some
    parts of the optimizer state exist in one copy only."""
    state = step.state
    if state.cut_for and state.joins.open(step.at) and not _begin(step, state.current, settles=True):
        _begin(step, state.current)  # without `settles`, failed fetches become an order whose parts move while all wait


def _plan_settling(step: Step) -> None:
    """Start a fetch of layers for a better schedule for the same members, if there is one that is worth the moves."""
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
    if schedule is None or old is None:  # only the ratio of planned periods is used, so a measured one is needed
        return
    held = state.held_now(step.rules.placement)
    moves = {(move.target, move.layer): move for move in step.fetched_for(schedule)
             if move.layer not in held.get(move.target, ())}.values()
    new = old * schedule.seconds(schedule.period_ticks) / state.slow.period_of(state.current)
    if not settler.pays(old, new, moves, pause=state.recovery.last_seconds, to=step) \
            or not _begin(step, schedule, settles=True):
        step.change(settler=replace(settler, closed=present))


def _choose_stop(step: Step) -> None:
    """Choose the iteration before which all members stop, if a change is ready to take place.

    A worker that has reported the furthest iteration may already be acknowledged and run the next one. When members
    report that one, the acknowledgement tells them to stop.
    """
    state = step.state
    if state.joins.complete or state.stopping or state.leaving or state.slow.decision is not None:
        step.change(phase=replace(state.phase, stop_before=_earliest_stop(step)))


def _choose_save(step: Step) -> None:
    """Choose the iteration before whose step all members save, if a checkpoint is due. Acknowledgements announce it."""
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
