"""A run of the real coordinator and commit log with workers that only count: one thing happens after the other."""

import functools
import math

from slipstream.runtime.coordinator.checkpoint_timer import CheckpointTimer
from slipstream.runtime.coordinator.commit_log import CommitLog
from slipstream.runtime.coordinator.context import Listeners
from slipstream.runtime.coordinator.coordinator import Coordinator
from slipstream.runtime.coordinator.loss_file import LossFile, read_losses
from slipstream.runtime.coordinator.planning import NoScheduleError, ScheduleService
from slipstream.runtime.coordinator.rank_reports import RankReports
from slipstream.runtime.coordinator.take_over import TakeOver
from slipstream.runtime.protocol.to_coordinator import Checkpoints, FetchUpToDate, Finished, Paused, Ran, Ready, Started
from slipstream.runtime.protocol.to_worker import EndOrder
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator.counting_workers import ITERATIONS, PLACEMENT, RANKS, Counting, Rank
from tests.runtime.failing import WIDE, Planning
from tests.runtime.running import schedule_for
from tests.runtime.test_going_back import on_the_spot

WORKERS = [Worker(pipeline, column) for pipeline in range(3) for column in range(2)]
FIRST = schedule_for(WIDE)
FINDERS = ScheduleService(FIRST, on_the_spot(WIDE), lambda: None, rebalancer=Planning(WIDE))


@functools.cache
def planned(question):
    try:
        return FINDERS._finder(question)()
    except NoScheduleError as error:
        return error


class Planner(ScheduleService):
    """Answers at once."""

    def __init__(self) -> None:
        super().__init__(FIRST, None, lambda: None)

    def _find(self, question):
        answer = planned(question)
        if isinstance(answer, Exception):
            raise answer
        return answer


class World:
    """One run; `out` holds what a new coordinator can read. `deadly` is how often a worker dies."""

    ends = ("no worker is left",)
    """Of what a run says where all are dead."""

    def __init__(self, rng, out, deadly) -> None:
        self.rng, self.out, self.deadly = rng, out, deadly
        self.workers = {worker: Counting(worker, self) for worker in WORKERS}
        self.checkpoints = [0]
        self.restarts = self.went_back = self.deaths = self.told_to_leave = self.saving = 0
        self.taking_over, self.fewest = None, len(WORKERS)
        self.savers: dict[tuple[int, int], dict[Worker, set[bool]]] = {}
        self.saved = 0
        self.losses = LossFile(out, 0, None)
        self.coordinator, self.log = self.started([])

    def started(self, losses):
        log = CommitLog("job")
        return Coordinator(Planner(), self.send, log, iterations=range(ITERATIONS), placement=PLACEMENT,
                           checkpoints=CheckpointTimer(automatic=True),
                           listeners=Listeners(went_back=self.go_back)), log

    def stepped(self, order, iteration, worker, *, saves) -> None:
        """A worker that saves waits for all others' parts: all members of an order do so before the same step."""
        self.savers.setdefault((order, iteration), {}).setdefault(worker, set()).add(saves)

    def go_back(self, iteration) -> None:
        self.went_back += 1
        self.losses.go_back(iteration)

    def send(self, worker, message) -> None:
        if worker in self.workers:
            self.workers[worker].inbox.append(message)

    def handle(self, message) -> None:
        coordinator, worker = self.coordinator, getattr(message, "worker", None)
        match message:
            case Ready():
                coordinator.ready(message)
                if self.taking_over is not None and message.known is not None:
                    self.taking_over.ready(worker, message.known)
            case Ran():
                for iteration, loss in self.log.ran(message):
                    self.losses.write(iteration, loss, 0.1, 0.0)
                    said = set().union(*self.savers.pop((message.order, iteration)).values())
                    assert len(said) == 1, "some save, and wait for others that do not"
                    if said == {True}:
                        self.saved += 1
                        self.coordinator._context.checkpoints.saved(iteration, 0.0)
                    if iteration % 4 == 3:
                        self.checkpoints.append(iteration + 1)
                    if self.rng.random() < 0.05:
                        self.restart()  # between a commit and its acknowledgement
                        return
                coordinator.ran(message)
            case Started():
                coordinator.started(message)
            case Paused():
                coordinator.paused(message)
            case FetchUpToDate():
                coordinator.fetch_up_to_date(message)
            case Checkpoints():
                coordinator.can_read(message)
            case Finished():
                state = coordinator._context.state
                if message.order == state.number and state.members - state.finished == {worker}:
                    self.checkpoints.append(self.saving)
                coordinator.finished(message)

    def kill(self, worker) -> None:
        gone = self.workers.pop(worker)
        self.deaths += 1
        for message in gone.said:
            self.handle(message)
        if self.taking_over is not None:
            self.taking_over.lost(worker)
        self.coordinator.lost(worker, f"{worker} was killed", 1.0)

    def restart(self) -> None:
        """The coordinator is gone, and another one looks for the workers."""
        self.restarts += 1
        self.savers.clear()  # where nobody is left of a run, orders are numbered anew
        losses = read_losses(self.out, 0)
        self.coordinator, self.log = self.started(losses)
        self.coordinator.await_workers_of_another()
        self.taking_over = TakeOver(len(losses) - 1, 0, (), WORKERS, WORKERS)
        self.lose_coordinator()

    def lose_coordinator(self) -> None:
        for one in self.workers.values():
            one.lose_coordinator()

    def take_over(self) -> None:
        """With those that have come; the others are too late."""
        found, self.taking_over = self.taking_over.found(), None
        losses = read_losses(self.out, 0)[:found.committed + 1]
        for unwritten in range(len(losses), found.committed + 1):
            # The coordinator that is gone has decided to go back, and told nobody: so does this one (see `Commits`).
            assert self.went_back
            self.losses.write(unwritten, math.nan, None, 0.0)
            losses.append(math.nan)
        self.log.take_over(losses, found.factor)
        self.coordinator.take_over(found)
        for worker in list(self.workers):
            if worker not in found.holds:
                self.forget(worker)

    def forget(self, worker) -> None:
        if self.workers[worker].order is not None:
            self.workers[worker] = self.fresh(worker)

    def fresh(self, worker):
        return Counting(worker, self)

    @property
    def there(self):
        """Those that live, and that the coordinator should know of."""
        return self.workers

    def process(self, worker):
        """One of a worker's; None where it is dead."""
        return self.workers.get(worker)

    def say(self, one) -> None:
        self.handle(one.said.popleft())

    def act(self) -> None:
        rng, worker = self.rng, self.rng.choice(WORKERS)
        one = self.process(worker)
        if one is None:
            if rng.random() < 0.05:
                self.workers[worker] = self.fresh(worker)
        elif rng.random() < self.deadly:
            self.kill(worker)
        elif rng.random() < 0.001 and self.taking_over is None:
            self.told_to_leave += 1
            self.coordinator.leaving(worker)
        elif one.said and rng.random() < 0.6:
            self.say(one)
        elif one.inbox:
            one.hear()
        else:
            one.step()
        if rng.random() < 0.002:
            self.restart()
        if self.taking_over is not None:
            if self.taking_over._known and rng.random() < (0.003 if self.taking_over.missing else 0.5):
                self.take_over()
        else:
            self.coordinator.advance()


class RankedWorld(World):
    """Each worker is a group of processes, whose reports the coordinator gets put together. They live and die together;
    connections break now and then."""

    ends = (*World.ends, "has no live worker left")  # others live, that have not come to a new coordinator in time

    def started(self, losses):
        self.reports = RankReports(lambda _: RANKS, lambda worker, order: self.send(worker, EndOrder(order)))
        if not self.restarts:
            self.workers = {worker: self.fresh(worker) for worker in WORKERS}
        return super().started(losses)

    def fresh(self, worker):
        return [Rank(worker, rank, self) for rank in range(RANKS)]

    def send(self, worker, message) -> None:
        for one in self.workers.get(worker, ()):
            one.inbox.append(message)

    @property
    def there(self):
        return [worker for worker, ranks in self.workers.items()
                if not any(isinstance(message, Ready) for one in ranks for message in one.said)]

    def process(self, worker):
        ranks = self.workers.get(worker)
        return self.rng.choice(ranks) if ranks else None

    def say(self, one) -> None:
        whole = self.reports.take(one.worker, one.rank, one.said.popleft())
        if whole is not None:
            self.handle(whole)

    def kill(self, worker) -> None:
        ranks = self.workers.pop(worker)
        self.deaths += 1
        while any(one.said for one in ranks):
            self.say(self.rng.choice([one for one in ranks if one.said]))
        self.reports.forget(worker)
        if self.taking_over is not None:
            self.taking_over.lost(worker)
        self.coordinator.lost(worker, f"{worker} was killed", 1.0)

    def lose_coordinator(self) -> None:
        for ranks in self.workers.values():
            for one in ranks:
                one.lose_coordinator()

    def take_over(self) -> None:
        for worker in self.reports.incomplete:
            self.kill(worker)
        if self.taking_over._known:
            super().take_over()

    def forget(self, worker) -> None:
        if any(one.order is not None for one in self.workers[worker]):
            self.reports.forget(worker)
            self.workers[worker] = self.fresh(worker)

    def act(self) -> None:
        ranks = self.workers.get(self.rng.choice(WORKERS))
        one = None if ranks is None else self.rng.choice(ranks)
        if one is not None and self.rng.random() < 0.002:
            one.pause("a connection broke")
        super().act()
