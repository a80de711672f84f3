"""The coordinator's decisions: which workers train, by which schedule, and from which iteration on.

The event loop calls a method for each event; the coordinator answers with orders (`runtime.protocol.to_worker`). An
order for training ends when a member is lost or reports an error, or before an iteration that is chosen for all to stop
at, because workers that want to join have their layers (`runtime.coordinator.join_planning`). When all members that are
left have paused, and there is a schedule for them, the next order is given. It begins at the first iteration that is
not committed. An event that comes while a schedule is being planned only changes what is waited for.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from runtime.coordinator.checkpoint_timer import CheckpointTimer
from runtime.coordinator.commit_log import CommitLog
from runtime.coordinator.event_log import EventLog
from runtime.coordinator.going_back import GoingBack, who_reads_what
from runtime.coordinator.join_planning import Join, JoinPlanner
from runtime.coordinator.layer_moves import Holders, layers_without_holder, plan_moves
from runtime.coordinator.lost_workers import LostWorkers
from runtime.coordinator.planning import Held, NoScheduleError, ScheduleService
from runtime.coordinator.recovery import Recovery, RecoveryClock
from runtime.coordinator.settling import Settler
from runtime.coordinator.slow_workers import SlowWorkers, SpeedEvent
from runtime.coordinator.take_over import Found
from runtime.errors import RunError
from runtime.events import CoordinatorRestarted, Failed, HandedOver, Joined, OrderGiven, Resumed, WentBack
from runtime.protocol.to_coordinator import (
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
from runtime.protocol.to_worker import (
    Acknowledged,
    EndOrder,
    Fetch,
    Finish,
    LayerMove,
    Leave,
    MeasureSpeed,
    ReportCheckpoints,
    Train,
)
from runtime.replay.placement import Placement
from schedules import codec
from schedules.layers import layers_in
from schedules.schedule import Grid, Schedule, Worker

Message = Train | Finish | Leave | EndOrder | Acknowledged | Fetch | ReportCheckpoints | MeasureSpeed


class Send(Protocol):
    """Sends a message to a worker; nothing happens where that is gone."""

    def __call__(self, worker: Worker, message: Message) -> None:
        """Send."""


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
    tell
        Called with what was found out about the workers' speeds.
    went_back
        Called with an iteration when those from it on are no longer committed, because layers were lost.
    events
        Are told what happens.
    """

    def __init__(self, schedules: ScheduleService, send: Send, log: CommitLog, *, iterations: range,
                 placement: Placement, checkpoints: CheckpointTimer | None = None,
                 events: EventLog | None = None, went_back: Callable[[int], None] = lambda _: None,
                 tell: Callable[[SpeedEvent], None] = lambda _: None) -> None:
        self._current = schedules.first
        self._schedules = schedules
        self._send = send
        self._log = log
        self._iterations = iterations
        self._placement = placement
        self._phase: Literal["rejoining", "gathering", "training", "finishing", "left"] = "gathering"
        self._members = {seat.worker for seat in self._current.seats}
        self._ready: set[Worker] = set()
        """Workers that have sent `Ready` and take part in no order yet."""
        self._paused: set[Worker] = set()
        self._finished: set[Worker] = set()
        self._holds: dict[Worker, frozenset[int]] = {}
        """The layers of each member that has paused."""
        self._ended = False
        """Whether `EndOrder` has been sent."""
        self._outdated = False
        """Whether a member was lost after the order to finish, which names it."""
        self._stop_before: int | None = None
        self._save_before: int | None = None
        self._checkpoints = checkpoints or CheckpointTimer(automatic=False)
        self._stopping = False
        """Whether the run is to end at the next iteration, with a checkpoint."""
        self._leaving: set[Worker] = set()
        """Members that were told to end by somebody else, and stay until the others can go on without them."""
        self._events = events or EventLog(None)
        self._joins = JoinPlanner(self._tell_all, self._events)
        self._slow = SlowWorkers(schedules, tell, self._measure_speed)
        self._going_back = GoingBack(lambda worker: send(worker, ReportCheckpoints()))
        self._went_back = went_back
        self._addresses: dict[Worker, tuple[str, int]] = {}
        self._lost = LostWorkers(self.grid, placement)
        self._recovery = RecoveryClock()
        self._began = 0
        """The first iteration of the present order."""
        self.number = 0
        """Of the last order."""
        self.settler: Settler | None = None
        """Decides whether layers move to a better schedule; None: they stay where they are."""

    @property
    def left(self) -> bool:
        """Whether everything is done, and the workers may go."""
        return self._phase == "left"

    @property
    def stopped(self) -> bool:
        """Whether the run has ended before its last iteration, as it was told to."""
        return self.left and self._log.next_iteration < self._iterations.stop

    @property
    def awaited(self) -> list[Worker]:
        """Those without whom the first order cannot be given."""
        return sorted(self._members - self._ready) if self._phase == "gathering" else []

    @property
    def held(self) -> dict[Worker, frozenset[int]]:
        """The layers that each member needs, once there is an order that is not done."""
        return {} if self._phase in ("rejoining", "gathering", "left") else self._held_now()

    @property
    def planning(self) -> bool:
        """Whether all members wait for a schedule."""
        return self._phase == "training" and bool(self._members) and self._paused >= self._members

    @property
    def grid(self) -> Grid:
        """The job's shape."""
        return self._current.grid

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """All changes of the workers that take part."""
        return self._recovery.recoveries

    @property
    def rejoining(self) -> bool:
        """Whether the workers of another coordinator, which is gone, are looked for."""
        return self._phase == "rejoining"

    def await_workers_of_another(self) -> None:
        """Give no order before `take_over`."""
        self._phase, self._members = "rejoining", set()

    def take_over(self, found: Found) -> None:
        """Go on with the workers of another coordinator, as if they had paused; the log must have what is committed."""
        self._recovery.took_over(len(found.holds))
        self._events.write(CoordinatorRestarted(live=len(found.holds)))
        self._phase, self.number, self._ended = "training", found.number, True
        self._members = set(found.holds)
        self._paused, self._ready = set(found.holds), self._ready - self._members
        self._holds = dict(found.holds)
        for worker in found.missing:
            reason = f"worker {worker} was not found by the new node 0"
            self._lost.add(worker, reason, ())
            self._gone(worker, reason, time.monotonic())

    def ready(self, report: Ready) -> None:
        """A worker waits for an order."""
        self._lost.back(report.worker)
        self._ready.add(report.worker)
        self._addresses[report.worker] = report.address

    def ran(self, report: Ran) -> None:
        """Acknowledge a report that the commit log has: the worker goes on, or stops where all members will."""
        if report.order == self.number and report.worker in self._members:
            self._slow.ran(report)
        following = report.iteration + 1 if report.order == self.number else None
        self._send(report.worker, Acknowledged(
            report.order, report.iteration, stop=following is not None and following == self._stop_before,
            save=following is not None and following == self._save_before))

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
        was_member = worker in self._members
        self._lost.add(worker, reason, self._placement.held(self._current, worker)
                       if worker in self._current.seat_of else ())
        for group in (self._members, self._ready, self._paused, self._finished, self._leaving):
            group.discard(worker)
        self._holds.pop(worker, None)
        self._joins.lost(worker)
        self._slow.lost(worker)
        self._going_back.lost(worker)
        if self._phase == "left" or not was_member:
            return False
        self._gone(worker, reason, since)
        if self._phase == "training":
            self._end_order()
        elif self._phase == "finishing":
            self._outdated = True
        return True

    def stop(self) -> None:
        """End the run at the next iteration, with a checkpoint. Raises RunError."""
        self._stopping = True
        if self._phase in ("rejoining", "gathering"):
            self._leave()
        else:
            self.advance()

    def hurry(self) -> None:
        """Where the run is to end, do not wait for the end of the iteration."""
        if self._stopping and self._phase == "training":
            self._end_order()

    def leaving(self, worker: Worker) -> None:
        """A worker was told to end by somebody else. The others go on without it from the next iteration; where they
        cannot, the run ends there, with a checkpoint. Raises RunError.
        """
        if self._phase == "training" and worker in self._members:
            self._leaving.add(worker)
            self.advance()
        elif self._phase in ("rejoining", "gathering", "training"):
            self._members.discard(worker)  # of an order that has not been given
            self._ready.discard(worker)
            self._joins.lost(worker)
            self._slow.lost(worker)
            self._send(worker, Leave())
            self.advance()

    def paused(self, report: Paused) -> None:
        """A member has stopped."""
        if report.order != self.number or report.worker not in self._members:
            return
        self._paused.add(report.worker)
        self._holds[report.worker] = layers_in(report.layers)
        if report.reason is not None:
            if not self._ended:
                self._recovery.broke(report.worker, report.reason)
            self._end_order()

    def started(self, report: Started) -> Recovery | None:
        """A member begins its first op; the recovery that this ends, for the first of them."""
        if report.order != self.number or self._ended:  # it began late, in an order that another recovery has ended
            return None
        recovery = self._recovery.end(self._log.next_iteration, live=len(self._members))
        if recovery is not None:
            self._events.write(Resumed(pause=round(recovery.seconds, 3), live=recovery.live))
        return recovery

    def finished(self, report: Finished) -> None:
        """A member has written its parameters."""
        if report.order == self.number and report.worker in self._members:
            self._log.finished(report)
            self._finished.add(report.worker)
            if self._finished == self._members:
                self._leave()

    def can_read(self, report: Checkpoints) -> None:
        """A worker has said which checkpoints it can read."""
        self._going_back.answered(report.worker, report.iterations)

    def advance(self) -> None:
        """Do what has become possible; to be called after every event. Raises RunError."""
        if self._phase == "gathering" and self._ready >= self._members:
            self._give_next()
        elif self._phase == "training" and self._paused >= self._members:
            if self._slow.decision is None or self._joins.complete:
                self._recovery.begin()
            self._give_next()
        elif self._phase == "finishing" and self._outdated:
            self._give_next()
        else:
            self._look_for_slow()
            self._plan_join()
            self._plan_settling()
            self._choose_stop()
            self._choose_save()

    def _look_for_slow(self) -> None:
        """Where speeds have changed, have a schedule planned for them; those who are worth their place again, join."""
        if self._phase == "training" and not self._ended:
            self._ready |= self._slow.look(self._current, self._log.next_iteration)

    def _measure_speed(self, worker: Worker) -> None:
        slices = tuple((stage, self.grid.layers_of(stage)) for stage in self.grid.stages_of(worker.column))
        self._send(worker, MeasureSpeed(iteration=self._log.next_iteration, slices=slices,
                                        split=self._current.backward == "split"))

    def _plan_join(self) -> None:
        """Where workers want to join, start a fetch of the layers that this needs, while training goes on.

        Where there is no schedule with them, they wait, and the members train on.
        """
        if not self._ready - self._members:
            return
        self._joins.give_way()
        if not self._joins.open or not self._may_stop():
            return
        schedule = None
        with contextlib.suppress(RunError):
            schedule = self._schedule_to_come_to(self._members | self._ready)
        if schedule is None:
            return
        self._joins.begin(self.number, schedule, plan_moves(self._placement.held_by(schedule), self._held_now()),
                          self._addresses, self._log.next_iteration)

    def _schedule_to_come_to(self, live: set[Worker]) -> Schedule | None:
        """The schedule for workers of which some join; None while it is being planned."""
        if self.settler is not None:
            with contextlib.suppress(NoScheduleError):
                return self._schedules.settled(self._held_in_schedules(live, self._held_now()))
        return self._schedule_of(sorted(live))

    def _plan_settling(self) -> None:
        """Where there is a schedule for the same members that is worth moving layers, start a fetch of these."""
        settler = self.settler
        if settler is None or not settler.open(self.number) or not self._joins.open or not self._may_stop():
            return
        try:
            schedule = self._schedules.settled(self._held_in_schedules(self._members, self._held_now()))
        except (NoScheduleError, RunError):
            settler.close(self.number)
            return
        if schedule is None:
            return
        moves = plan_moves(self._placement.held_by(schedule), self._held_now())
        measured = self._log.period_since(self._began)
        scale = 1.0 if measured is None else measured / self._current.seconds(self._current.period_ticks)
        pays = settler.pays(self._current, schedule, moves, scale=scale, pause=self._recovery.last_seconds)
        if not pays or not self._joins.begin(self.number, schedule, moves, self._addresses, self._log.next_iteration,
                                             settles=True):
            settler.close(self.number)

    def _choose_stop(self) -> None:
        """Where all layers for a join are there, or the run or a member is to end, choose the iteration before which
        all members stop.

        A worker that has reported the furthest iteration has been acknowledged, and runs the one after it. When members
        report that one, the acknowledgement tells them to stop.
        """
        wanted = self._joins.complete or self._stopping or bool(self._leaving) or self._slow.decision is not None
        if wanted and self._may_stop():
            self._stop_before = self._earliest_stop()

    def _choose_save(self) -> None:
        """Where a checkpoint is due, choose the iteration before whose step all members save; told like a stop."""
        if self._checkpoints.due() and self._may_stop():
            self._save_before = self._earliest_stop()
            self._checkpoints.asked(self._save_before)

    def _earliest_stop(self) -> int:
        return self._log.furthest + 2

    def _may_stop(self) -> bool:
        return (self._phase == "training" and not self._ended and self._stop_before is None
                and self._earliest_stop() < self._iterations.stop)

    def _end_order(self) -> None:
        if not self._ended:
            self._ended = True
            for worker in sorted(self._members):
                self._send(worker, EndOrder(self.number))

    def _give_next(self) -> None:
        """Give the next order, if there is a schedule for it; else `advance` will be called when there is one."""
        first = self._log.next_iteration
        untouched = first == self._iterations.start
        missing = [] if untouched else layers_without_holder(self._holds, self._placement.layers)
        if missing or not self._members | self._ready:
            self._ready |= self._slow.take_back()
        if missing:
            self._go_back(missing[0])
            return
        if not self._members | self._ready:
            raise RunError(f"no worker is left: {self._lost.reasons()}")
        if self._leaving and first < self._iterations.stop and not self._release(untouched):
            return
        if self._stopping and untouched:
            self._leave()
            return
        if (first >= self._iterations.stop or self._stopping) and self._phase != "gathering":
            self._finish()
            return
        join = None if untouched else self._joins.current()
        schedule = join.schedule if join is not None else self._for_speeds() or self._next_schedule(untouched)
        if schedule is None:
            return
        fetch = 0 if join is None else join.fetch
        moves = () if untouched or fetch else plan_moves(self._placement.held_by(schedule), self._holds)
        self._order(schedule, moves, join)

    def _order(self, schedule: Schedule, moves: tuple[LayerMove, ...], join: Join | None = None,
               restore: Holders | None = None) -> None:
        """Give an order for training."""
        fetch = 0 if join is None else join.fetch
        live = {seat.worker for seat in schedule.seats}
        joining = live - self._members if self.number else set()
        first = self._log.next_iteration
        settles = join is not None and join.settles
        self._recovery.ordered(live - self._members, settled=settles,
                               meanwhile=first - join.began if join is not None and fetch else 0)
        self._joins.close()
        self._schedules.forget()
        told, self._members = self._members | self._ready, live
        self._ready, self._paused, self._stop_before = self._ready - live, set(), None
        self._phase, self._current, self._ended = "training", schedule, False
        self.number += 1
        if self.settler is not None and join is not None:
            self.settler.close(self.number)
        self._began = first
        self._log.begin(self.number, live)
        self._save_before = None
        self._checkpoints.order_begins()
        self._slow.order_begins(self.number, schedule, first)
        sources = sorted({move.source for move in moves})
        text = codec.encode(schedule)
        self._tell(told, Train(number=self.number, first_iteration=first, moves=moves, fetch=fetch,
                               addresses=tuple((source, self._addresses[source]) for source in sources),
                               schedule=msgspec.Raw(text), factor=self._log.factor,
                               restore=None if restore is None else tuple(
                                   (worker, tuple(layers)) for worker, layers in restore.items())))
        self._record(schedule, text, joining, join)

    def _go_back(self, missing: int) -> None:
        """Nobody holds a layer: go back to the newest checkpoint that a live worker can read, or to the beginning.

        Raises RunError where the run is to end, or there is no schedule for those that live.
        """
        everyone = self._members | self._ready
        reasons = self._lost.reasons_of(missing, self._members, self._ready)
        why = f"stage {self._placement.stage_of(self.grid, missing)} has no live worker left: {reasons}"
        if not everyone or self._stopping:
            raise RunError(why)
        if not self._going_back.all_have_answered(everyone):
            return
        back = self._going_back.newest(everyone, range(self._iterations.start, self._log.next_iteration + 1))
        if back is None:
            raise RunError(f"{why}; no live worker can read a checkpoint, or build what the run began with")
        try:
            schedule = self._schedules.for_workers(sorted(everyone))
        except NoScheduleError as error:
            raise RunError(", and ".join(filter(None, (why, str(error))))) from None
        if schedule is None:
            return
        iteration, readers = back
        self._recovery.begin()
        lost = self._log.next_iteration - iteration
        self._recovery.went_back(iteration, lost)
        self._log.go_back(iteration)
        self._went_back(iteration)
        self._events.write(WentBack(lost=lost, reason=why))
        self._going_back.forget()
        needs = self._placement.held_by(schedule)
        reads = who_reads_what(needs, readers)
        self._order(schedule, plan_moves(needs, reads), restore=reads)

    def _record(self, schedule: Schedule, text: bytes, joining: set[Worker], join: Join | None) -> None:
        """Enter an order that has been given. `joining` are the workers that did not take part before."""
        if join is not None:
            self._events.write(HandedOver(fetch=join.fetch, order=self.number))
        for worker in sorted(joining):
            self._events.write(Joined(worker=worker))
        whole = len(schedule.seats) == schedule.grid.pipelines * schedule.grid.columns
        moved = any(map(schedule.holds_others, schedule.seats))
        self._events.write(OrderGiven(
            order=self.number, schedule=self._events.keep(text), live=len(schedule.seats),
            planned_period=round(schedule.seconds(schedule.period_ticks), 9),
            phase="settled" if moved else "whole" if whole else "at once"))

    def _gone(self, worker: Worker, reason: str, since: float) -> None:
        """Enter that a member is gone, since a time by time.monotonic."""
        self._recovery.lost(worker, reason, since)
        if self.settler is not None:
            self.settler.failed()
        self._events.write(Failed(worker=worker, reason=reason))

    def _release(self, untouched: bool) -> bool:
        """Let members go that are to end. Where the others cannot go on without them, end the run instead.

        Whether that is decided: the schedule without them may have to be planned first.
        """
        staying = self._members - self._leaving
        holds = {worker: layers for worker, layers in self._holds.items() if worker in staying}
        try:
            if self._stopping or not staying or (
                    not untouched and layers_without_holder(holds, self._placement.layers)):
                self._stopping = True
                return True
            if self._schedule_of(sorted(staying)) is None:
                return False
        except RunError:
            self._stopping = True
            return True
        for worker in sorted(self._leaving):
            self._gone(worker, f"worker {worker} has left, as it was told to", time.monotonic())
            self._members.discard(worker)
            self._paused.discard(worker)
            self._holds.pop(worker, None)
            self._joins.lost(worker)
            self._send(worker, Leave())
        self._leaving.clear()
        return True

    def _for_speeds(self) -> Schedule | None:
        """The schedule that was decided on for the members' speeds, if they are still the same."""
        decision = self._slow.decision
        if decision is None or decision.schedule is None or \
                self._members != {*decision.schedule.seat_of, *decision.left_out}:
            return None
        return decision.schedule

    def _next_schedule(self, untouched: bool) -> Schedule | None:
        """The schedule of the next order, where no layers have been fetched for it.

        A worker that is ready and lacks its layers is left out, and fetches them while the others train. Before the
        first step there is nothing to fetch. Where the others cannot train without it, all wait until it has them.
        """
        everyone = sorted(self._members | self._ready)
        if not untouched and self._members and everyone != sorted(self._members):
            with contextlib.suppress(RunError):
                return self._schedule_of(sorted(self._members))
        return self._schedule_of(everyone)

    def _schedule_of(self, live: Sequence[Worker]) -> Schedule | None:
        """The schedule for these workers; None while it is being planned.

        Where all have paused, and some hold other layers than those of their stages, the others wait for none to move.
        """
        try:
            if self.settler is not None and self._displaced(live):
                with contextlib.suppress(NoScheduleError):
                    return self._schedules.at_once(self._held_in_schedules(set(live), self._holds))
            return self._schedules.for_workers(live)
        except NoScheduleError as error:
            raise RunError(", and ".join(filter(None, (self._lost.reasons(), str(error))))) from None

    def _held_now(self) -> dict[Worker, frozenset[int]]:
        """The layers of each member under the present schedule."""
        return {worker: layers for worker, layers in self._placement.held_by(self._current).items()
                if worker in self._members}

    def _displaced(self, live: Sequence[Worker]) -> bool:
        """Whether these workers hold layers, and some of them not those of its own stages."""
        return all(self._holds.get(worker) for worker in live) and any(
            not self._holds[worker] >= self._placement.held_in_column(self.grid, worker.column) for worker in live)

    def _held_in_schedules(self, live: set[Worker], held: Mapping[Worker, frozenset[int]]) -> Held:
        return tuple((worker, self._placement.in_schedules(held.get(worker, frozenset()))) for worker in sorted(live))

    def _finish(self) -> None:
        """All iterations are committed, or the run is to end here; the first holder of each layer writes it."""
        writers = {layer: worker for worker, layers in sorted(self._holds.items(), reverse=True)
                   for layer in sorted(layers)}
        self._phase, self._outdated = "finishing", False
        self._slow.over(self._log.next_iteration)
        self._finished.clear()
        self.number += 1
        self._log.begin(self.number, self._members)
        self._tell(self._members, Finish(number=self.number, first_iteration=self._log.next_iteration,
                                         writers=tuple(writers.items()), factor=self._log.factor,
                                         parameters=self._log.next_iteration >= self._iterations.stop))

    def _leave(self) -> None:
        self._tell_all(Leave())
        self._phase = "left"

    def _tell_all(self, message: Fetch | Leave) -> None:
        self._tell(self._members | self._ready | self._slow.left_out, message)

    def _tell(self, workers: set[Worker], message: Message) -> None:
        for worker in sorted(workers):
            self._send(worker, message)
