"""Boundary: what is prepared while all train, and the iteration boundary at which it takes place.

Workers that join and layers that move are fetched meanwhile. Once they are there, or the run or a member is to end, or
another schedule is better for the workers' speeds, all members stop before the same iteration.
"""

from functools import partial

from slipstream.runtime.coordinator.context import CoordinatorContext
from slipstream.runtime.coordinator.cost_fit import LEAD
from slipstream.runtime.coordinator.layer_moves import plan_moves
from slipstream.runtime.coordinator.planning import NoScheduleError
from slipstream.runtime.coordinator.schedule_choice import ScheduleChoice
from slipstream.runtime.errors import RunError
from slipstream.runtime.protocol.to_worker import NewCosts


class BoundaryPlanner:
    """Plans the boundaries of one run."""

    def __init__(self, context: CoordinatorContext, choice: ScheduleChoice) -> None:
        self._context = context
        self._choice = choice

    def look(self) -> None:
        """Prepare what has become possible, while all train."""
        self._look_for_slow()
        if not self._plan_join():
            self._plan_cuts()
            self._plan_settling()
        self._choose_stop()
        self._choose_save()
        self._choose_costs()

    def _look_for_slow(self) -> None:
        """Where speeds have changed, have a schedule planned for them; those who are worth their place again, join."""
        state = self._context.state
        if state.phase == "training" and not state.ended:
            state.ready |= self._context.slow.look(state.current, self._context.log.next_iteration)

    def _plan_join(self) -> bool:
        """Where workers want to join, start a fetch of the layers that this needs, while training goes on.

        Where there is no schedule with them, or they would have nothing to do, they wait, and the members train on.
        Whether one is being found.
        """
        context, state = self._context, self._context.state
        waiting = state.ready - state.members
        if not waiting or not context.joins.open_to_join or not self._may_stop():
            return False
        try:
            schedule = self._choice.with_joining(state.everyone)
        except (NoScheduleError, RunError):
            return False
        if schedule is None or not waiting & schedule.seat_of.keys():
            return schedule is None
        context.joins.give_way()
        if context.joins.open:
            context.joins.begin(state.number, schedule, context.fetched_for(schedule), state.addresses,
                                context.log.next_iteration, context.schedules.speeds)
        return False

    def _plan_cuts(self) -> None:
        """Where parts of optimizer states have stayed as they were, as some have gone who keep them, start a fetch of
        parts that are cut anew: of some parts, there is only one copy left."""
        context, state = self._context, self._context.state
        if not state.cut_for or not context.joins.open or not self._may_stop():
            return
        begin = partial(context.joins.begin, state.number, state.current, context.fetched_for(state.current),
                        state.addresses, context.log.next_iteration, context.schedules.speeds)
        if not begin(settles=True):
            begin(settles=False)  # fetches have failed too often: parts move while all wait

    def _plan_settling(self) -> None:
        """Where there is a schedule for the same members that is worth moving layers, start a fetch of these."""
        context, state, settler = self._context, self._context.state, self._context.settler
        speeds = context.schedules.speeds
        context.joins.drop_for_other_speeds(speeds)
        if settler is None or not settler.open(state.number, speeds) or context.slow.deciding \
                or not context.joins.open or not self._may_stop():
            return
        try:
            schedule = self._choice.settled()
        except (NoScheduleError, RunError):
            settler.close(state.number, speeds)
            return
        old = context.log.period_after(max(state.began, context.slow.since))
        if schedule is None or old is None:  # what is planned says how much longer one takes than the other, no more
            return
        moves = plan_moves(context.placement.held_by(schedule), context.held_now())
        new = old * schedule.seconds(schedule.period_ticks) / context.slow.period_of(state.current)
        if not settler.pays(old, new, moves, pause=context.recovery.last_seconds) or not context.joins.begin(
                state.number, schedule, context.fetched_for(schedule), state.addresses, context.log.next_iteration,
                speeds, settles=True):
            settler.close(state.number, speeds)

    def _choose_stop(self) -> None:
        """Choose the iteration before which all members stop, where that is wanted.

        A worker that has reported the furthest iteration has been acknowledged, and runs the one after it. When members
        report that one, the acknowledgement tells them to stop.
        """
        context, state = self._context, self._context.state
        wanted = context.joins.complete or state.stopping or state.leaving or context.slow.decision is not None
        if wanted and self._may_stop():
            state.stop_before = self._earliest_stop()

    def _choose_save(self) -> None:
        """Where a checkpoint is due, choose the iteration before whose step all members save; told like a stop."""
        context = self._context
        if context.checkpoints.due() and self._may_stop():
            context.state.save_before = self._earliest_stop()
            context.checkpoints.asked(context.state.save_before)

    def _choose_costs(self) -> None:
        """Where costs are better known than so far, choose the iteration from which on samples are dealt by them."""
        context, state = self._context, self._context.state
        costs, following = context.costs, context.log.next_iteration
        told = state.new_costs is None or state.new_costs.first < following
        if costs is not None and state.phase == "training" and not state.ended and told and costs.look(following):
            first = context.log.furthest + 1 + LEAD
            state.new_costs = NewCosts(first, costs.current)
            context.listeners.note(f"from iteration {first} on, samples are dealt by costs fitted to what was "
                                   f"measured: known to {costs.error:.1%}, {costs.error_before:.1%} before")

    def _earliest_stop(self) -> int:
        return self._context.log.furthest + 2

    def _may_stop(self) -> bool:
        state = self._context.state
        return (state.phase == "training" and not state.ended and state.stop_before is None
                and self._earliest_stop() < self._context.iterations.stop)
