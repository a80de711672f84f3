"""Next order: what follows once all members that are left have paused."""

import contextlib
import time
from collections.abc import Collection, Iterable

from slipstream.runtime.coordinator.context import CoordinatorContext
from slipstream.runtime.coordinator.going_back import GoingBack
from slipstream.runtime.coordinator.layer_moves import plan_moves
from slipstream.runtime.coordinator.orders import Orders
from slipstream.runtime.coordinator.planning import NoScheduleError
from slipstream.runtime.coordinator.schedule_choice import ScheduleChoice
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import Failed, NodeLost
from slipstream.runtime.protocol.to_worker import Leave, PartMove
from slipstream.schedules.schedule import Schedule, Worker


class NextOrder:
    """Decides on the next order of one run, again and again."""

    def __init__(self, context: CoordinatorContext, orders: Orders, choice: ScheduleChoice,
                 going_back: GoingBack) -> None:
        self._context = context
        self._orders = orders
        self._choice = choice
        self._going_back = going_back

    def give(self) -> None:
        """Give it, if there is a schedule for it; else this is to be called again when there is one. Raises RunError.
        """
        context, state = self._context, self._context.state
        first = context.log.next_iteration
        untouched = first == context.iterations.start
        missing = [] if untouched else context.lost_layers(state.holds)
        if missing or not state.everyone:
            state.ready |= context.slow.take_back()
        if missing:
            self._going_back.give_order(missing[0])
            return
        if not state.everyone and state.stopping:
            self._orders.leave(f"no worker is left: {context.lost.reasons()}")
            return
        if not state.everyone:
            raise RunError(f"no worker is left: {context.lost.reasons()}")
        if state.leaving and first < context.iterations.stop and not self._release(untouched):
            return
        if state.stopping and untouched:
            self._orders.leave()
        elif (first >= context.iterations.stop or state.stopping) and state.phase != "gathering":
            self._orders.finish()
        else:
            self._train(untouched)

    def enter_loss(self, worker: Worker, reason: str, since: float) -> None:
        """Enter that a member is gone, since a time by time.monotonic. Those of one machine that go together are one
        failure."""
        context = self._context
        together = context.domains.together(worker)
        if context.settler is not None and not any(other in together for other in context.recovery.dead):
            context.settler.failed()
        context.recovery.lost(worker, reason, since)
        context.events.write(Failed(worker=worker, reason=reason))

    def enter_nodes(self, lost: Iterable[Worker]) -> None:
        """Enter that whole nodes are gone, where these, which are lost, were the last of their machines."""
        context, left = self._context, self._context.state.everyone | self._context.slow.left_out
        together = {context.domains.number(worker): context.domains.together(worker) for worker in lost}
        for node, workers in together.items():
            if node is not None and len(workers) > 1 and left.isdisjoint(workers):
                context.recovery.node_lost(node)
                context.events.write(NodeLost(node=node, workers=workers))

    def _train(self, untouched: bool) -> None:
        context = self._context
        join = None if untouched else context.joins.current()
        schedule = join.schedule if join is not None else self._for_speeds() or self._next_schedule(untouched)
        if schedule is None:
            return
        fetched, partition, state = join is not None and join.fetch, context.partition, context.state
        if partition is not None:
            stay = {} if untouched or join is not None else partition.left(
                schedule, state.current, state.cut_for, state.kept)
            parts = () if untouched else partition.moves(
                schedule, state.kept, state.holds, context.log.next_iteration - 1,
                [move for move in join.moves if isinstance(move, PartMove)] if join is not None and fetched else (),
                cut_for=stay)
            self._orders.train(schedule, (), join, parts, cut_for=stay)
            return
        moves = () if untouched or fetched else plan_moves(context.placement.held_by(schedule), state.holds)
        self._orders.train(schedule, moves, join)

    def saved_for_leaving(self) -> bool:
        """The last order was to save layers that would be lost with members that are to end: let these go.

        The others go back to what was saved. Whether it was that; else the run is over.
        """
        context, state = self._context, self._context.state
        if not state.leaving or state.stopping or context.log.next_iteration >= context.iterations.stop:
            return False
        state.phase, state.ended, state.paused = "training", True, set(state.members)
        self._let_go()
        return True

    def _release(self, untouched: bool) -> bool:
        """Let members go that are to end. Where nobody would be left, end the run instead.

        Whether that is done: a schedule without them may have to be planned first, or layers to be saved that only they
        hold.
        """
        context, state = self._context, self._context.state
        staying = state.members - state.leaving
        if state.stopping or not (state.everyone | context.slow.left_out) - state.leaving:
            state.stopping = True
            return True
        if not untouched and context.lost_layers(staying):
            self._orders.finish()
            return False
        try:
            if self._schedule_of(staying, untouched) is None:
                return False
        except (NoScheduleError, RunError):
            state.stopping = True
            return True
        self._let_go()
        return True

    def _let_go(self) -> None:
        context, state = self._context, self._context.state
        for worker in sorted(state.leaving):
            reason = f"worker {worker} has left, as it was told to"
            context.lost.add(worker, reason, state.holds.get(worker, ()))
            self.enter_loss(worker, reason, time.monotonic())
            state.forget(worker)
            context.joins.lost(worker)
            context.send(worker, Leave())

    def _for_speeds(self) -> Schedule | None:
        """The schedule that was decided on for the members' speeds, if they are still the same."""
        decision = self._context.slow.decision
        if decision is None or decision.schedule is None or \
                self._context.state.members != {*decision.schedule.seat_of, *decision.left_out}:
            return None
        return decision.schedule

    def _next_schedule(self, untouched: bool) -> Schedule | None:
        """The schedule of the next order, where no layers have been fetched for it.

        A worker that is ready and lacks its layers is left out, and fetches them while the others train. Before the
        first step there is nothing to fetch. Where the others cannot train without it, all wait until it has them.
        """
        state = self._context.state
        if not untouched and state.members and state.everyone != state.members:
            with contextlib.suppress(NoScheduleError, RunError):
                return self._schedule_of(state.members, untouched)
        try:
            return self._schedule_of(state.everyone, untouched)
        except NoScheduleError as error:
            raise RunError(", and ".join(filter(None, (self._context.lost.reasons(), str(error))))) from None

    def _schedule_of(self, live: Collection[Worker], untouched: bool) -> Schedule | None:
        return self._choice.at_first(live) if untouched else self._choice.at_once(live)
