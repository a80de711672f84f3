"""The coordinator's decisions: which workers train, by which schedule, and from which iteration on.

The event loop calls a method for each event; the coordinator answers with orders (`runtime.protocol.to_worker`). An
order for training ends when a member is lost or reports an error, or before an iteration that is chosen for all to stop
at (`boundary`). When all members that are left have paused, and there is a schedule for them, the next order is given
(`next_order`). It begins at the first iteration that is not committed. An event that comes while a schedule is being
planned only changes what is waited for.
"""

import time
from collections.abc import Mapping, Sequence

from slipstream.runtime.coordinator.boundary import BoundaryPlanner
from slipstream.runtime.coordinator.checkpoint_timer import CheckpointTimer
from slipstream.runtime.coordinator.commit_log import CommitLog
from slipstream.runtime.coordinator.context import CoordinatorContext, Listeners, RunState, Send
from slipstream.runtime.coordinator.cost_fit import LEAD, CostFit
from slipstream.runtime.coordinator.going_back import GoingBack
from slipstream.runtime.coordinator.join_planning import JoinPlanner
from slipstream.runtime.coordinator.lost_workers import LostWorkers
from slipstream.runtime.coordinator.next_order import NextOrder
from slipstream.runtime.coordinator.orders import Orders
from slipstream.runtime.coordinator.part_moves import Partition
from slipstream.runtime.coordinator.planning import ScheduleService
from slipstream.runtime.coordinator.recovery import Recovery, RecoveryClock
from slipstream.runtime.coordinator.schedule_choice import ScheduleChoice
from slipstream.runtime.coordinator.settling import Settler
from slipstream.runtime.coordinator.slow_workers import SlowWorkers, SpeedEvent
from slipstream.runtime.coordinator.take_over import Found
from slipstream.runtime.events import CoordinatorRestarted, Resumed
from slipstream.runtime.failure_domains import ALONE, FailureDomains
from slipstream.runtime.protocol.to_coordinator import (
    Checkpoints,
    FetchFailed,
    FetchUpToDate,
    Finished,
    Paused,
    Ran,
    Ready,
    SpeedMeasured,
    Started,
)
from slipstream.runtime.protocol.to_worker import Acknowledged, Leave, MeasureSpeed
from slipstream.runtime.replay.placement import Placement
from slipstream.schedules.layers import layers_in
from slipstream.schedules.schedule import Worker


class Coordinator:
    """Gives all orders of one run.

    Parameters
    ----------
    schedules
        Has the schedule for the workers that are there from the start, and finds those for others.
    placement
        Where the schedules' layers lie in the model.
    checkpoints
        Says when one is due that the workers do not know of; None: never.
    settler
        Decides whether layers move to a better schedule; None: they stay where they are.
    domains
        Which workers fail together.
    partition
        How optimizer states are cut, where workers keep parts of them.
    costs
        Follows what samples cost; None: they are not dealt by coefficients.
    whole_schedules
        Whether workers are sent the whole of each schedule besides.
    """

    def __init__(self, schedules: ScheduleService, send: Send, log: CommitLog, *, iterations: range,
                 placement: Placement, checkpoints: CheckpointTimer | None = None, settler: Settler | None = None,
                 listeners: Listeners | None = None, domains: FailureDomains = ALONE,
                 partition: Partition | None = None, costs: CostFit | None = None,
                 whole_schedules: bool = True) -> None:
        listeners = listeners or Listeners()
        first = schedules.first
        self._log = log
        self._state = state = RunState(first, {seat.worker for seat in first.seats})
        schedules.stand_for = state.stand_for
        self._slow = SlowWorkers(schedules, self._tell_speed, self._measure_speed)
        self._recovery = RecoveryClock()
        self._lost = LostWorkers(state.grid, placement)
        self._events = listeners.events
        self._joins = JoinPlanner(lambda fetch: self._context.tell_all(fetch), listeners.events)
        self._context = CoordinatorContext(
            state=state, iterations=iterations, placement=placement, send=send, log=log, schedules=schedules,
            joins=self._joins, slow=self._slow, settler=settler, recovery=self._recovery, lost=self._lost,
            checkpoints=checkpoints or CheckpointTimer(automatic=False), listeners=listeners, domains=domains,
            partition=partition, costs=costs, whole_schedules=whole_schedules)
        choice = ScheduleChoice(self._context)
        self._orders = Orders(self._context)
        self._boundary = BoundaryPlanner(self._context, choice)
        self._going_back = GoingBack(self._context, self._orders, choice)
        self._next_order = NextOrder(self._context, self._orders, choice, self._going_back)

    @property
    def left(self) -> bool:
        """Whether everything is done, and the workers may go."""
        return self._state.phase == "left"

    @property
    def stopped(self) -> bool:
        """Whether the run has ended before its last iteration, as it was told to."""
        return self.left and self._log.next_iteration < self._context.iterations.stop

    @property
    def awaited(self) -> list[Worker]:
        """Those without whom the first order cannot be given."""
        state = self._state
        return sorted(state.members - state.ready) if state.phase == "gathering" else []

    @property
    def held(self) -> Mapping[Worker, frozenset[int]]:
        """The layers that each member needs, once there is an order that is not done."""
        return {} if self._state.phase in ("rejoining", "gathering", "left") else self._context.held_now()

    @property
    def planning(self) -> bool:
        """Whether all members wait for a schedule."""
        state = self._state
        return state.phase == "training" and bool(state.members) and state.all_paused

    @property
    def number(self) -> int:
        """Of the last order."""
        return self._state.number

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """All changes of the workers that take part."""
        return self._recovery.recoveries

    @property
    def rejoining(self) -> bool:
        """Whether the workers of another coordinator, which is gone, are looked for."""
        return self._state.phase == "rejoining"

    def await_workers_of_another(self) -> None:
        """Give no order before `take_over`."""
        self._state.phase, self._state.members = "rejoining", set()

    def take_over(self, found: Found) -> None:
        """Go on with the workers of another coordinator, as if they had paused; the log must have what is committed."""
        self._recovery.took_over(len(found.holds))
        self._events.write(CoordinatorRestarted(live=len(found.holds)))
        state, members = self._state, set(found.holds)
        state.phase, state.number, state.ended = "training", found.number, True
        state.members, state.paused, state.ready = members, set(members), state.ready - members
        state.holds, state.kept = dict(found.holds), dict(found.kept)
        for worker in found.missing:
            reason = f"worker {worker} was not found by the new node 0"
            self._lost.add(worker, reason, ())
            self._next_order.enter_loss(worker, reason, time.monotonic())
        self._next_order.enter_nodes(found.missing)

    def ready(self, report: Ready) -> None:
        """A worker waits for an order."""
        self._lost.back(report.worker)
        self._state.ready.add(report.worker)
        self._state.addresses[report.worker] = report.addresses
        self._state.stand_for[report.worker] = report.stands_for
        self._state.contents.pop(report.worker, None)

    def ran(self, report: Ran) -> None:
        """Acknowledge a report that the commit log has: the worker goes on, or stops where all members will.

        Whoever runs no micro-batch passes nothing on that the others would wait for, so that these are not acknowledged
        before it has reported, too: nobody is more than one step ahead of the last committed iteration.
        """
        state = self._state
        if report.order == state.number and report.worker in state.members:
            self._slow.ran(report)
            if self._context.costs is not None:
                self._context.costs.ran(report, state.current)
            state.unanswered.append(report)
            if not self._log.have_reported(state.without_microbatches, report.iteration):
                return
            reports, state.unanswered = state.unanswered, []
        else:
            reports = [report]
        for one in reports:
            following = one.iteration + 1 if one.order == state.number else None
            costs = state.new_costs if following is not None else None
            self._context.send(one.worker, Acknowledged(
                one.order, one.iteration, stop=following is not None and following == state.stop_before,
                save=following is not None and following == state.save_before,
                costs=costs if costs is not None and one.iteration == costs.first - LEAD else None))

    def committed(self) -> None:
        """An iteration was committed."""
        self._recovery.committed()

    def speed_measured(self, report: SpeedMeasured) -> None:
        """A worker that is left out has measured itself."""
        self._slow.measured(report)

    def fetch_up_to_date(self, report: FetchUpToDate) -> None:
        """A worker has the layers of a fetch."""
        self._joins.fetch_up_to_date(report.worker, report.fetch)

    def fetch_failed(self, report: FetchFailed) -> None:
        """A worker could not get the layers of a fetch."""
        self._joins.fetch_failed(report.fetch)

    def lost(self, worker: Worker, reason: str, since: float) -> bool:
        """A worker is gone, since a time by time.monotonic; whether it was a member, whose loss is a recovery's."""
        state = self._state
        was_member = worker in state.members
        self._lost.add(worker, reason, self._context.placement.held(state.current, worker)
                       if worker in state.current.seat_of else ())
        state.forget(worker)
        self._joins.lost(worker)
        self._slow.lost(worker)
        self._going_back.checkpoints.lost(worker)
        if state.phase == "left" or not was_member:
            return False
        self._next_order.enter_loss(worker, reason, since)
        self._next_order.enter_nodes([worker])
        if state.phase == "training":
            self._orders.end()
        elif state.phase == "finishing":
            state.outdated = True
        return True

    def stop(self) -> None:
        """End the run at the next iteration, with a checkpoint. Raises RunError."""
        self._state.stopping = True
        if self._state.phase in ("rejoining", "gathering"):
            self._orders.leave()
        else:
            self.advance()

    def hurry(self) -> None:
        """Where the run is to end, do not wait for the end of the iteration."""
        if self._state.stopping and self._state.phase == "training":
            self._orders.end()

    def leaving(self, worker: Worker) -> None:
        """A worker was told to end by somebody else. The others go on without it from the next iteration; where nobody
        would be left, the run ends there, with a checkpoint. Raises RunError.
        """
        state = self._state
        if state.phase in ("training", "finishing") and worker in state.members:
            state.leaving.add(worker)
            self.advance()
        elif state.phase in ("rejoining", "gathering", "training"):
            state.forget(worker)  # of an order that has not been given
            self._joins.lost(worker)
            self._slow.lost(worker)
            self._context.send(worker, Leave())
            self.advance()

    def paused(self, report: Paused) -> None:
        """A member has stopped."""
        if report.order != self.number or report.worker not in self._state.members:
            return
        self._state.paused.add(report.worker)
        self._state.holds[report.worker] = layers_in(report.layers)
        if report.kept is not None:
            self._state.kept[report.worker] = report.kept
        if report.reason is not None:
            if not self._state.ended:
                self._recovery.broke(report.worker, report.reason)
            self._orders.end()

    def disconnected(self, worker: Worker) -> None:
        """The connection to a process of a member has ended, so that it will be lost in a moment: no order is given
        before that. Workers that die together are then lost in one recovery, also those that have paused before."""
        self._state.paused.discard(worker)

    def started(self, report: Started) -> Recovery | None:
        """A member begins its first op; the recovery that this ends, for the first of them."""
        if report.order != self.number or self._state.ended:
            return None  # it began late, in an order that another recovery has ended
        recovery = self._recovery.end(self._log.next_iteration, live=len(self._state.members))
        if recovery is not None:
            self._events.write(Resumed(pause=round(recovery.seconds, 3), live=recovery.live))
        return recovery

    def finished(self, report: Finished) -> None:
        """A member has written its parameters."""
        if report.order == self.number and report.worker in self._state.members:
            self._log.finished(report)
            self._state.finished.add(report.worker)
            if self._state.finished == self._state.members and not self._next_order.saved_for_leaving():
                self._orders.leave()

    def can_read(self, report: Checkpoints) -> None:
        """A worker has said which checkpoints it can read."""
        self._going_back.checkpoints.answered(report.worker, report.iterations)

    def advance(self) -> None:
        """Do what has become possible; to be called after every event. Raises RunError."""
        state = self._state
        if state.phase == "gathering" and len(state.ready) >= len(state.members) and state.ready >= state.members:
            self._next_order.give()
        elif state.phase == "training" and state.all_paused:
            if self._slow.decision is None or self._joins.complete:
                self._recovery.begin()
            self._next_order.give()
        elif state.phase == "finishing" and state.outdated:
            self._next_order.give()
        else:
            self._boundary.look()

    def _tell_speed(self, event: SpeedEvent) -> None:
        if self._context.settler is not None and event.changes:
            self._context.settler.speed_changed()
        self._context.listeners.speed(event)

    def _measure_speed(self, worker: Worker) -> None:
        state = self._state
        slices = tuple((stage, state.grid.layers_of(stage)) for stage in state.grid.stages_of(worker.column))
        self._context.send(worker, MeasureSpeed(iteration=self._log.next_iteration, slices=slices,
                                                split=state.current.backward == "split"))
