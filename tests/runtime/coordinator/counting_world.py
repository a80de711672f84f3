"""A run of the real coordinator and commit log with workers that only count.

One thing happens after the other.
"""

import functools
import math
import random

from slipstream.runtime.coordinator.connections.rank_reports import RankReports
from slipstream.runtime.coordinator.decisions.commit_log import CommitLog, CommittedIteration
from slipstream.runtime.coordinator.decisions.effects import (
    GiveUpWorker,
    ScheduleAnswer,
    ScheduleRequest,
    SendMessage,
)
from slipstream.runtime.coordinator.decisions.failover import FailoverResult, RejoiningPhase
from slipstream.runtime.coordinator.decisions.run_state import RunRules, build_initial_state
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedRequest
from slipstream.runtime.coordinator.decisions.transition import TimePassed, WorkerLost, apply_event
from slipstream.runtime.coordinator.planning.schedule_finder import (
    NoScheduleError,
    SchedulePlanners,
    ScheduleService,
    without_idle_workers,
)
from slipstream.runtime.coordinator.records.run_log import RunLog, read_losses
from slipstream.runtime.coordinator.records.writer_thread import Writer
from slipstream.runtime.events import Noted, WentBack
from slipstream.runtime.protocol.to_coordinator import CheckpointSaved, Leaving, Published, Ready
from slipstream.runtime.protocol.to_worker import EndOrder
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator.counting_workers import (
    ITERATIONS,
    PARTITION,
    RANKS,
    Apart,
    Counting,
    Other,
    Rank,
)
from tests.runtime.failing import WIDE, Planning
from tests.runtime.running import schedule_for
from tests.runtime.test_going_back import on_the_spot

WORKERS = [Worker(pipeline, column) for pipeline in range(3) for column in range(2)]
FIRST = schedule_for(WIDE)
ANSWERING = ScheduleService(
    FIRST.grid, SchedulePlanners(on_the_spot(WIDE), None, Planning(WIDE)), lambda _: None
)
RULES = RunRules(
    first=ANSWERING.prepare_schedule(FIRST),
    iterations=range(ITERATIONS),
    partition=PARTITION,
    automatic_checkpoints=True,
)
ACT_SECONDS = 0.05
"""From one thing that happens to the next."""


@functools.cache
def planned(question):
    try:
        return ANSWERING.prepare_schedule(
            without_idle_workers(ANSWERING._choose_planner(question)())
        )
    except NoScheduleError as error:
        return error


class Unwritten(Writer, list):
    """What waits to be written."""

    def __call__(self, work):
        self.append(work)


class World:
    """One run; `out` holds what a new coordinator can read. `deadly` is how often a worker dies."""

    rules = RULES
    grid_workers = WORKERS
    """All workers of the grid."""
    answer = staticmethod(planned)
    """To a question."""
    ends = ("no worker is left", "has no live worker left")
    """Parts of what a run says where nobody can go on.

    All are dead, or have come too late for a new coordinator.
    """

    def __init__(self, rng, out, deadly) -> None:
        self.rng, self.out, self.deadly = rng, out, deadly
        self.workers = {worker: self.fresh(worker) for worker in self.grid_workers}
        self.checkpoints = [0]
        self.restarts = self.went_back = self.deaths = self.told_to_leave = self.saving = (
            self.partial
        ) = self.moved = 0
        self.fewest, self.now, self.refused, self.unfetched = len(self.grid_workers), 0.0, 0.02, 0.5
        self.savers: dict[tuple[int, int], dict[Worker, set[bool]]] = {}
        self.saved = 0
        self.happening, self.unknown, self.notes, self.given_up = [], set(), [], set()
        self.disk, self.unwritten = random.Random(len(self.grid_workers)), Unwritten()
        out.mkdir()
        self.log = RunLog(out, write=self.unwritten)
        self.state = self.started(None)

    def started(self, rejoining):
        return build_initial_state(self.rules, CommitLog(), self.now, rejoining)

    @property
    def taking_over(self):
        """The phase in which another coordinator looks for workers; None: it is over."""
        return self.state.phase if isinstance(self.state.phase, RejoiningPhase) else None

    checkpoint_every = 4
    """Iterations from one checkpoint to the next."""
    may_restart = True
    """Whether node 0 dies at all."""
    leaving = 0.001
    """How often a worker is told to end."""

    def stepped(self, order, iteration, worker, *, saves) -> None:
        """Note whether a worker saves before it steps an iteration.

        A worker that saves waits for all others' parts: all members of an order do so before the
        same step.
        """
        self.savers.setdefault((order, iteration), {}).setdefault(worker, set()).add(saves)

    def go_back(self, iteration) -> None:
        self.went_back += 1
        self.log.drop_iterations_from(iteration)

    def send(self, worker, message) -> None:
        if worker in self.workers:
            self.workers[worker].inbox.append(message)

    def happens(self, event) -> None:
        answers, given_up = [], []
        if (
            isinstance(event, Published)
            and event.order == self.state.order
            and self.state.members.difference(self.state.phase.published) == {event.worker}
        ):
            self.checkpoints.append(self.saving)
        for effect in self.apply(event):
            match effect:
                case SendMessage():
                    for worker in effect.workers:
                        self.send(worker, effect.message)
                case CommittedIteration():
                    self.committed(effect, event)
                    if self.rng.random() < 0.05 and self.may_restart:
                        self.restart()  # between a commit and its acknowledgement
                        return
                case GiveUpWorker():
                    self.given_up.add(effect.worker)
                    given_up.append(effect.worker)
                case Noted():
                    self.notes.append(effect.text)
                case WentBack():
                    self.go_back(self.state.log.next_iteration)
                case FailoverResult():
                    self.took_over(effect)
                case ScheduleRequest() | SpeedRequest():
                    answers += self.find_answers(effect)
        for answer in answers:
            self.happens(answer)
        for worker in given_up:
            if worker in self.workers:
                self.kill(worker)

    def apply(self, event):
        """The effects of an event, after which the state is another one."""
        self.state, effects = apply_event(self.rules, self.state, event, self.now)
        return effects

    def find_answers(self, question):
        """What the planner says at once."""
        return [ScheduleAnswer(question, self.answer(question))]

    def committed(self, commit, report) -> None:
        self.log.write_iteration(commit.iteration, commit.loss, 0.1)
        said = set().union(*self.savers.pop((report.order, commit.iteration)).values())
        assert len(said) == 1, "some save, and wait for others that do not"
        if said == {True}:
            self.saved += 1
            self.happening.append(CheckpointSaved(report.worker, commit.iteration, 0.0))
        if (commit.iteration + 1) % self.checkpoint_every == 0:
            self.checkpoints.append(commit.iteration + 1)

    def kill(self, worker) -> None:
        gone = self.workers.pop(worker)
        self.deaths += 1
        for message in gone.said:
            self.happens(message)
        self.happens(WorkerLost(worker, f"{worker} was killed", self.now))

    def restart(self, written=None) -> None:
        """Replace the coordinator by another one, which looks for the workers.

        What it had not written is gone.
        """
        self.restarts += 1
        self.write(self.disk.randint(0, len(self.unwritten)) if written is None else written)
        self.unwritten.clear()
        self.savers.clear()  # where nobody is left of a run, orders are numbered anew
        self.happening.clear()
        everyone = frozenset(self.grid_workers)
        self.state = self.started(
            RejoiningPhase(
                losses=read_losses(self.out, 0),
                first=0,
                expected=everyone,
                grid=everyone,
                began=self.now,
            )
        )
        self.lose_coordinator()

    def write(self, number) -> None:
        """So much of what waits is written."""
        for _ in range(number):
            self.unwritten.pop(0)()

    def lose_coordinator(self) -> None:
        for process in self.workers.values():
            process.lose_coordinator()

    def took_over(self, found) -> None:
        """With those that have come; the others are too late."""
        self.log.drop_iterations_from(found.unwritten.start)
        for unwritten, loss in zip(
            found.unwritten, found.losses[len(found.losses) - len(found.unwritten) :], strict=True
        ):
            self.log.write_iteration(unwritten, loss)
            if math.isnan(loss):  # whoever was told of it first is dead, or all have gone back
                assert self.deaths or self.went_back
                self.unknown.add(unwritten)
        for worker in list(self.workers):
            if worker not in found.kept:
                self.forget(worker)

    def forget(self, worker) -> None:
        if self.workers[worker].order is not None:
            self.workers[worker] = self.fresh(worker)

    def fresh(self, worker):
        return Counting(worker, self)

    @property
    def there(self):
        """Those that live, and that the coordinator should know of."""
        there = []
        for worker, process in self.workers.items():
            if not any(isinstance(message, Ready) for message in process.said):
                there.append(worker)
        return there

    def process(self, worker):
        """One of a worker's; None where it is dead."""
        return self.workers.get(worker)

    def say(self, process) -> None:
        self.happens(process.said.popleft())

    def act(self) -> None:
        rng, worker = self.rng, self.rng.choice(self.grid_workers)
        process = self.process(worker)
        if process is None:
            if rng.random() < 0.05:
                self.workers[worker] = self.fresh(worker)
        elif rng.random() < self.deadly:
            self.kill(worker)
        elif rng.random() < self.leaving and self.taking_over is None:
            self.told_to_leave += 1
            self.happens(Leaving(worker))
        elif process.said and rng.random() < 0.6:
            self.say(process)
        elif process.inbox:
            process.hear()
        else:
            process.step()
        if rng.random() < 0.002:
            self.restart()
        self.now += ACT_SECONDS
        self.write(len(self.unwritten) * (self.disk.random() < 0.1))
        while self.happening:
            self.happens(self.happening.pop(0))
        if self.taking_over is None or self.taking_over.reports:
            self.look()

    def look(self) -> None:
        self.happens(TimePassed())


class OtherWorld(World):
    """Some workers come back with another job file."""

    def __init__(self, rng, out, deadly) -> None:
        self.refused_others = 0
        super().__init__(rng, out, deadly)

    def fresh(self, worker):
        is_other = (
            worker not in getattr(self, "workers", [worker])
            and self.state.order > 0
            and self.rng.random() < 0.3
        )
        return (Other if is_other else Counting)(worker, self)


class RankedWorld(World):
    """Each worker is a group of processes, whose reports the coordinator gets put together.

    They live and die together; connections break now and then.
    """

    def started(self, rejoining):
        self.reports = RankReports(RANKS, lambda worker, order: self.send(worker, EndOrder(order)))
        return super().started(rejoining)

    def fresh(self, worker):
        return [Rank(worker, rank, self) for rank in range(RANKS)]

    def send(self, worker, message) -> None:
        for rank in self.workers.get(worker, ()):
            rank.inbox.append(message)

    @property
    def there(self):
        there = []
        for worker, ranks in self.workers.items():
            if not any(isinstance(message, Ready) for rank in ranks for message in rank.said):
                there.append(worker)
        return there

    def process(self, worker):
        ranks = self.workers.get(worker)
        return self.rng.choice(ranks) if ranks else None

    def say(self, rank) -> None:
        whole = self.reports.add_message(rank.worker, rank.rank, rank.said.popleft())
        if whole is not None:
            self.happens(whole)

    def kill(self, worker) -> None:
        ranks = self.workers.pop(worker)
        self.deaths += 1
        while any(rank.said for rank in ranks):
            self.say(self.rng.choice([rank for rank in ranks if rank.said]))
        self.reports.drop_worker(worker)
        self.happens(WorkerLost(worker, f"{worker} was killed", self.now))

    def lose_coordinator(self) -> None:
        for ranks in self.workers.values():
            for rank in ranks:
                rank.lose_coordinator()

    def look(self) -> None:
        if self.taking_over is not None and self.taking_over.is_complete(self.now):
            for worker in self.reports.incomplete_workers:
                self.kill(worker)
        if self.taking_over is None or self.taking_over.reports:
            super().look()

    def forget(self, worker) -> None:
        if any(rank.order is not None for rank in self.workers[worker]):
            self.reports.drop_worker(worker)
            self.workers[worker] = self.fresh(worker)

    def act(self) -> None:
        ranks = self.workers.get(self.rng.choice(WORKERS))
        rank = None if ranks is None else self.rng.choice(ranks)
        if rank is not None and self.rng.random() < 0.002:
            rank.pause("a connection broke")
        super().act()


class CutWorld(World):
    """One worker never reaches one or more others.

    That is from the start, or after it has died. Nothing else fails.
    """

    may_restart, leaving = False, 0.0

    def __init__(self, rng, out, deadly) -> None:
        self.cut_from, self.lone = rng.choice([0.0, rng.uniform(1.0, 20.0)]), rng.choice(WORKERS)
        others = [worker for worker in WORKERS if worker != self.lone]
        self.unreached = frozenset(rng.sample(others, rng.randint(1, len(others))))
        super().__init__(rng, out, 0.0)
        self.unfetched = 0.0

    def restart(self) -> None:
        pass

    def act(self) -> None:
        if self.now >= self.cut_from > 0.0 and self.lone in self.workers and not self.deaths:
            self.kill(self.lone)
        super().act()

    def is_cut(self, worker, other) -> bool:
        return self.now >= self.cut_from and (
            (worker == self.lone and other in self.unreached)
            or (other == self.lone and worker in self.unreached)
        )

    def fresh(self, worker):
        return Apart(worker, self)
