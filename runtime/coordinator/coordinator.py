"""Node 0's decisions: who trains by which schedule from where on, whatever has happened.

It is told of everything that happens to workers, and gives orders (`runtime.protocol.orders`). An order for training
ends when a member is lost or stops for a reason of its own, or at a turn that was agreed on because workers want to
come in and have got their layers (`runtime.coordinator.join_planning`); when all members that live have paused, the
next one is given. It begins at the first iteration that is not committed.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from torch._C._distributed_c10d import TCPStore

from runtime.coordinator.commit_log import Ledger
from runtime.coordinator.join_planning import Intake
from runtime.coordinator.layer_moves import orphaned, plan_moves
from runtime.protocol.orders import Finish, Leave, Train, give, over_key, turn_key
from runtime.protocol.reports import Finished, Followed, Paused, Ready, Started, Unfollowed
from schedules import codec
from schedules.schedule import Grid, Schedule, Worker

TURN_AHEAD = 2
"""Iterations from the first uncommitted one to a turn: nobody has run more of them, unless reports came late."""


class RunError(RuntimeError):
    """A run that ended before its last iteration. The message is one line."""


class NoScheduleError(RuntimeError):
    """There is no schedule for these failures. The message is one line."""


Scheduler = Callable[[tuple[Worker, ...]], Schedule]
"""The schedule to use when these workers are down, of the same job as the first one. Raises NoScheduleError."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the workers that take part."""

    iteration: int
    """The first one that ran with the new workers."""
    dead: tuple[Worker, ...]
    returned: tuple[Worker, ...]
    reasons: tuple[str, ...]
    """Of each death."""
    live: int
    """Workers that take part from then on."""
    seconds: float
    """From the first death, or from the turn, until the first worker began its first op."""
    meanwhile: int = 0
    """Iterations that were committed while layers were fetched for it."""

    def __str__(self) -> str:
        back = [f"worker {worker} is back" for worker in self.returned]
        causes = ", ".join([*self.reasons, *back]) or "a connection broke"
        return f"{causes}: iteration {self.iteration} runs on {self.live} workers, {self.seconds:.2f} s later"


class Conductor:
    """Gives all orders of one run.

    Parameters
    ----------
    schedule
        For the workers that are there from the start.
    scheduler
        None: the first failure ends the run.
    ranges
        Half-open range of layers of each stage.
    """

    def __init__(self, schedule: Schedule, scheduler: Scheduler | None, store: TCPStore, ledger: Ledger, *,
                 iterations: range, ranges: Sequence[tuple[int, int]]) -> None:
        self._schedule = self._playing = schedule
        self._scheduler = scheduler
        self._store = store
        self._ledger = ledger
        self._iterations = iterations
        self._ranges = ranges
        self._phase: Literal["gathering", "training", "finishing", "left"] = "gathering"
        self._members = {seat.worker for seat in schedule.seats}
        self._ready: set[Worker] = set()
        self._paused: set[Worker] = set()
        self._finished: set[Worker] = set()
        self._holds: dict[Worker, tuple[int, ...]] = {}
        self._over = False
        self._turn: int | None = None
        self._intake = Intake(store)
        self._addresses: dict[Worker, tuple[str, int]] = {}
        self._meanwhile = 0
        self._lost: dict[Worker, str] = {}
        self._pending: list[tuple[Worker, str]] = []
        self._returning: set[Worker] = set()
        self._began = 0.0
        self._given = 0.0
        self.number = 0
        """Of the last order."""
        self.recoveries: list[Recovery] = []

    @property
    def left(self) -> bool:
        """Whether everything is done, and the workers may go."""
        return self._phase == "left"

    @property
    def grid(self) -> Grid:
        """The job's shape."""
        return self._schedule.grid

    def ready(self, report: Ready) -> None:
        """A worker waits for an order. Raises RunError."""
        self._lost.pop(report.worker, None)
        self._ready.add(report.worker)
        self._addresses[report.worker] = report.address
        self._advance()

    def followed(self, report: Followed) -> None:
        """A worker has got layers while all train."""
        self._intake.followed(report.worker, report.fetch)

    def unfollowed(self, report: Unfollowed) -> None:
        """A worker could not."""
        self._intake.unfollowed(report.fetch)

    def lost(self, worker: Worker, reason: str, since: float) -> None:
        """A worker is gone, since a time by time.monotonic. Raises RunError when there is no way to go on."""
        was_member = worker in self._members
        self._lost.setdefault(worker, reason)
        for group in (self._members, self._ready, self._paused, self._finished, self._returning):
            group.discard(worker)
        self._holds.pop(worker, None)
        self._intake.lost(worker)
        if self._phase == "left" or not was_member:
            return
        self._pending.append((worker, reason))
        since = max(since, self._given)  # what happened to it before held up nobody
        self._began = min(self._began or since, since)
        if self._phase == "training":
            self._end_order()
        elif self._phase == "finishing":
            self._next()
        self._advance()

    def paused(self, report: Paused) -> None:
        """A member has stopped. Raises RunError."""
        if report.order != self.number or report.worker not in self._members:
            return
        self._paused.add(report.worker)
        self._holds[report.worker] = report.stages
        if report.reason is not None:
            self._began = self._began or time.monotonic()
            self._end_order()
        self._advance()

    def started(self, report: Started) -> Recovery | None:
        """A member begins its first op; the recovery that this ends, for the first of them."""
        if report.order != self.number or not self._began:
            return None
        recovery = Recovery(
            iteration=self._ledger.next_iteration, dead=tuple(worker for worker, _ in self._pending),
            returned=tuple(sorted(self._returning)), reasons=tuple(reason for _, reason in self._pending),
            live=len(self._members), seconds=time.monotonic() - self._began, meanwhile=self._meanwhile)
        self.recoveries.append(recovery)
        self._pending, self._returning, self._began = [], set(), 0.0
        return recovery

    def finished(self, report: Finished) -> None:
        """A member has written its parameters."""
        if report.order == self.number and report.worker in self._members:
            self._ledger.finished(report)
            self._finished.add(report.worker)
            if self._finished == self._members:
                self._give(Leave(number=self.number + 1))
                self._phase = "left"

    def invite(self) -> None:
        """Where somebody wants to come in, have the layers fetched that this takes while all train. Raises RunError."""
        if not self._ready - self._members or not self._intake.open or not self._may_turn():
            return
        schedule = self._choose(sorted(self._members | self._ready))
        needs = self._needs(schedule)
        holds = {worker: stages for worker, stages in self._needs(self._playing).items() if worker in self._members}
        self._intake.begin(self.number, schedule, plan_moves(needs, holds, self._ranges), needs, holds,
                           self._addresses, self._ledger.next_iteration)

    def ask_for_turn(self) -> bool:
        """Where all is ready for somebody to come in, tell the members before which iteration to stop; whether it was.

        Only when all that was told has been heard; `check_turn` must follow when all has been heard again.
        """
        if not self._intake.complete or not self._may_turn():
            return False
        self._turn = self._ledger.next_iteration + TURN_AHEAD
        self._store.add(turn_key(self.number), self._turn)
        return True

    def _may_turn(self) -> bool:
        return (self._phase == "training" and not self._over and self._turn is None
                and self._ledger.next_iteration + TURN_AHEAD < self._iterations.stop)

    def check_turn(self) -> None:
        """End the order if a member may have gone past the turn before it was told, for the others wait there for it.

        A member looks for a turn after it has reported an iteration. Had it looked too early, its report of the last
        iteration before the turn would have been heard by now.
        """
        if self._turn is not None and self._ledger.furthest >= self._turn - 1:
            self._end_order()

    def _end_order(self) -> None:
        if not self._over:
            self._over = True
            self._store.set(over_key(self.number), "")

    def _advance(self) -> None:
        """Give the next order when all that is needed for it is known."""
        if self._phase == "gathering" and self._ready >= self._members:
            self._next()
        elif self._phase == "training" and self._paused >= self._members:
            self._began = self._began or time.monotonic()
            self._next()

    def _next(self) -> None:
        first = self._ledger.next_iteration
        untouched = first == self._iterations.start
        self._require_holders(untouched)
        if first >= self._iterations.stop and self._phase != "gathering":
            self._finish()
            return
        plan = self._intake.take()
        plan = None if untouched else plan
        schedule = self._cast(untouched) if plan is None else plan.schedule
        fetch = 0 if plan is None else plan.fetch
        moves = () if untouched or fetch else plan_moves(self._needs(schedule), self._holds, self._ranges)
        self._meanwhile = first - plan.began if plan is not None and fetch else 0
        founding = self.number == 0 and not self._lost
        live = {seat.worker for seat in schedule.seats}
        self._returning |= live - self._members
        self._members, self._ready, self._paused, self._turn = live, self._ready - live, set(), None
        self._phase, self._playing = "training", schedule
        self._ledger.begin(self.number + 1, live)
        self._give(Train(number=self.number + 1, first_iteration=first, schedule=msgspec.Raw(codec.encode(schedule)),
                         moves=moves, fetch=fetch, addresses=tuple(
                             (source, self._addresses[source]) for source in sorted({one.source for one in moves})),
                         factor=self._ledger.factor, founding=founding))

    def _cast(self, untouched: bool) -> Schedule:
        """The schedule for those who take part from here on, where nobody has fetched layers for it.

        Whoever is ready and has no layers stays outside, and fetches them while the others train; before the first
        step, there is nothing to fetch. Where there is no going on without them, all wait until they have their layers.
        """
        everyone = sorted(self._members | self._ready)
        if not untouched and self._members and everyone != sorted(self._members):
            with contextlib.suppress(RunError):
                return self._choose(sorted(self._members))
        return self._choose(everyone)

    def _needs(self, schedule: Schedule) -> dict[Worker, tuple[int, ...]]:
        """The stages of each worker."""
        return {seat.worker: self.grid.stages_of(seat.role.column) for seat in schedule.seats}

    def _finish(self) -> None:
        """All iterations are committed; the first holder of each layer writes it."""
        writers = {layer: worker for worker, stages in sorted(self._holds.items(), reverse=True)
                   for stage in stages for layer in range(*self._ranges[stage])}
        self._phase = "finishing"
        self._finished.clear()
        self._ledger.begin(self.number + 1, self._members)
        self._give(Finish(number=self.number + 1, first_iteration=self._ledger.next_iteration,
                          writers=tuple(writers.items()), factor=self._ledger.factor))

    def _require_holders(self, untouched: bool) -> None:
        """Raises RunError where parameters are lost; before the first step everyone can make any."""
        missing = [] if untouched else orphaned(self._holds, self._ranges)
        if missing:
            raise RunError(f"stage {missing[0]} has no live worker left: {self._why(missing[0])}")
        if not self._members | self._ready:
            raise RunError(f"no worker is left: {self._why()}")

    def _choose(self, live: Sequence[Worker]) -> Schedule:
        if live == [seat.worker for seat in self._schedule.seats]:
            return self._schedule
        if self._scheduler is None:
            raise RunError(self._why())
        down = tuple(sorted(set(self.grid.workers()) - set(live)))
        try:
            schedule = self._scheduler(down)
        except NoScheduleError as error:
            raise RunError(f"{self._why()}, and {error}") from None
        if schedule.grid != self.grid or [seat.worker for seat in schedule.seats] != list(live):
            raise RunError(f"the schedule for the failure of {', '.join(map(str, down))} is one of another job")
        return schedule

    def _why(self, stage: int | None = None) -> str:
        """What happened to those who are gone: to all, or to the workers of a stage."""
        column = None if stage is None else self.grid.stages[stage].column
        told = [reason for worker, reason in self._lost.items() if column in (None, worker.column)]
        return ", ".join(told or self._lost.values()) or "none was there from the start"

    def _give(self, order: Train | Finish | Leave) -> None:
        if self.number:
            self._end_order()
        self.number, self._over, self._given = order.number, False, time.monotonic()
        give(self._store, order)
