"""The real coordinator and commit log, with workers that only count: these die and come back at random, and so does it.

Messages are delivered in any order that connections allow. Whatever happens, a worker is never told to go on from where
it cannot be, and each iteration is in the file of losses once, in order, when the run ends.
"""

import functools
import json
import random
from collections import deque

import pytest

from runtime.coordinator import join_planning
from runtime.coordinator.commit_log import CommitLog
from runtime.coordinator.context import Listeners
from runtime.coordinator.coordinator import Coordinator
from runtime.coordinator.loss_file import LossFile, read_losses
from runtime.coordinator.planning import NoScheduleError, ScheduleService
from runtime.coordinator.rank_reports import RankReports
from runtime.coordinator.take_over import TakeOver
from runtime.errors import RunError
from runtime.protocol.to_coordinator import (
    Checkpoints,
    FetchUpToDate,
    Finished,
    Known,
    Paused,
    Ran,
    Ready,
    Started,
)
from runtime.protocol.to_worker import Acknowledged, EndOrder, Fetch, Finish, Leave, ReportCheckpoints, Train
from runtime.replay.placement import Placement
from schedules.codec import decode
from schedules.schedule import Worker
from tests.runtime.failing import WIDE, Planning
from tests.runtime.running import schedule_for
from tests.runtime.test_going_back import on_the_spot

WORKERS = [Worker(pipeline, column) for pipeline in range(3) for column in range(2)]
PLACEMENT = Placement([0, 2, 4])
ITERATIONS = 12
RANKS = 2
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


class Counting:
    """A worker whose layers are numbers: how many iterations each has seen."""

    def __init__(self, worker, world) -> None:
        self.worker, self.world = worker, world
        self.said, self.inbox = deque([self.ready(None)]), deque()
        self.layers: dict[int, int] = {}
        self.order: Train | None = None
        self.members: tuple[Worker, ...] = ()
        self.reached = self.begun = -1
        self.paused = True

    def ready(self, known):
        return Ready(self.worker, "corpus", (("127.0.0.1", 1),), None, known)

    def go_back(self, committed) -> None:
        """By one step at most."""
        assert committed in (self.reached, self.reached - 1), (self.worker, committed, self.reached)
        self.layers = dict.fromkeys(self.layers, committed + 1)
        self.reached = committed

    def ranges(self):
        return tuple((layer, layer + 1) for layer in sorted(self.layers))  # touching ones do no harm here

    def hear(self) -> None:
        message = self.inbox.popleft()
        match message:
            case Train():
                self.train(message)
            case EndOrder() if self.order is not None and self.order.number == message.order:
                self.pause()
            case Acknowledged() if self.order is not None and not self.paused and self.order.number == message.order:
                assert message.iteration == self.reached
                self.begun = message.iteration + 1
                if message.stop or self.begun == ITERATIONS:
                    self.pause()
            case Fetch() if any(move.target == self.worker for move in message.moves):
                self.said.append(FetchUpToDate(self.worker, message.number))
            case ReportCheckpoints():
                self.said.append(Checkpoints(self.worker, tuple(self.world.checkpoints)))
            case Finish():
                self.go_back(message.first_iteration - 1)
                self.world.saving = message.first_iteration
                self.said.append(Finished(self.worker, message.number, {}))
            case Leave():
                self.leave()

    def leave(self) -> None:
        self.world.workers.pop(self.worker)

    def met(self):
        """Those it cannot step without."""
        return [self.world.workers.get(worker) for worker in self.members]

    def train(self, order) -> None:
        schedule = decode(bytes(order.schedule))
        if self.worker not in schedule.seat_of:
            return  # it came too late for this one
        assert self.paused
        committed = order.first_iteration - 1
        if order.restore is not None or order.first_iteration == 0:
            assert order.restore is None or committed + 1 in self.world.checkpoints
            self.layers, self.reached = {}, committed
        elif self.layers:
            self.go_back(committed)
        moved = {move.layer for move in order.moves if move.target == self.worker}
        read = {layer for worker, layers in order.restore or () if worker == self.worker for layer in layers}
        needs = PLACEMENT.held(schedule, self.worker)
        if not order.fetch and order.first_iteration and order.restore is None:
            assert needs <= self.layers.keys() | moved, "nobody gives what it lacks"
        if order.restore is not None:
            assert needs <= read | moved
        self.layers = dict.fromkeys(needs, committed + 1)
        self.world.fewest = min(self.world.fewest, len(schedule.seats))
        self.order, self.members, self.paused = order, tuple(seat.worker for seat in schedule.seats), False
        self.reached, self.begun = committed, committed + 1
        self.said.append(Started(self.worker, order.number))
        if self.begun == ITERATIONS:
            self.pause()

    def pause(self, reason=None) -> None:
        if not self.paused and self.order is not None:
            self.paused = True
            self.said.append(Paused(self.worker, self.order.number, self.ranges(), None, reason))

    def step(self) -> None:
        """It can, once all members have begun the same iteration."""
        if self.paused or self.reached >= self.begun or self.order is None or not all(
                other is not None and other.order is not None and other.order.number == self.order.number
                and other.begun >= self.begun for other in self.met()):
            return
        self.reached = self.begun
        self.layers = dict.fromkeys(self.layers, self.reached + 1)
        self.said.append(Ran(self.worker, self.order.number, self.reached,
                             float(self.reached) if self.worker == self.members[0] else 0.0, 0.1))

    def lose_coordinator(self) -> None:
        self.inbox.clear()
        self.said.clear()
        self.paused = True
        self.said.append(self.ready(self.known()))

    def known(self):
        if self.order is None:
            return Known(0, (), -1, (), None, False)
        return Known(self.order.number, self.members, self.reached, self.ranges(), None, False,
                     self.order.first_iteration - 1)


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
        self.losses = LossFile(out, 0, None)
        self.coordinator, self.log = self.started([])

    def started(self, losses):
        log = CommitLog("job")
        return Coordinator(Planner(), self.send, log, iterations=range(ITERATIONS), placement=PLACEMENT,
                           listeners=Listeners(went_back=self.go_back)), log

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
        losses = read_losses(self.out, 0)
        self.coordinator, self.log = self.started(losses)
        self.coordinator.await_workers_of_another()
        self.taking_over = TakeOver(len(losses) - 1, 0, (), WORKERS)
        self.lose_coordinator()

    def lose_coordinator(self) -> None:
        for one in self.workers.values():
            one.lose_coordinator()

    def take_over(self) -> None:
        """With those that have come; the others are too late."""
        found, self.taking_over = self.taking_over.found(), None
        losses = read_losses(self.out, 0)[:found.committed + 1]
        assert len(losses) == found.committed + 1
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


class Rank(Counting):
    """One of the processes of a worker: it steps once all of all members have begun."""

    def __init__(self, worker, rank, world) -> None:
        self.rank = rank
        super().__init__(worker, world)

    def leave(self) -> None:
        mine = self.world.workers[self.worker]
        mine.remove(self)
        if not mine:
            del self.world.workers[self.worker]

    def met(self):
        return [one for worker in self.members
                for one in (self.world.workers.get(worker, ()) if self.whole(worker) else (None,))]

    def whole(self, worker) -> bool:
        return len(self.world.workers.get(worker, ())) == RANKS


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


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(join_planning, "PAUSE_SECONDS", 0.0)


class Played:
    """What has happened in some runs, all of which have ended as they may."""

    def __init__(self, kind, seeds, folder) -> None:
        self.restarts = self.back = self.deaths = self.ended = self.told = 0
        self.fewest = set()
        for seed in seeds:
            self._play(seed, kind(random.Random(seed), folder / f"{seed}.jsonl", deadly=0.004 if seed % 5 else 0.016))

    def _play(self, seed, world) -> None:
        try:
            for _ in range(100_000 * len(world.workers)):
                world.act()
                if world.coordinator.left:
                    break
            else:
                pytest.fail(f"seed {seed}: the run hangs")
        except RunError as error:
            self.ended += 1
            assert not world.there and any(reason in str(error) for reason in world.ends), (seed, error)
            return
        self.fewest.add(world.fewest)
        if world.coordinator.stopped:
            self.ended += 1
            assert world.told_to_leave, (seed, "it has ended early")
            return
        lines = [json.loads(line) for line in world.out.read_text().splitlines()]
        assert [(line["iteration"], line["loss"]) for line in lines] == [(one, one) for one in range(ITERATIONS)], seed
        self.told += world.told_to_leave
        self.restarts, self.back = self.restarts + world.restarts, self.back + world.went_back
        self.deaths += world.deaths


def test_whoever_dies_the_numbers_are_whole(tmp_path):
    played = Played(World, range(50), tmp_path)
    assert played.restarts > 30 and played.back > 1 and played.deaths > 60 and played.told > 20 and played.ended < 25, \
        vars(played)
    assert min(played.fewest) == 1


def test_whichever_rank_of_a_worker_stops_first_the_numbers_are_whole(tmp_path):
    played = Played(RankedWorld, range(30), tmp_path)
    assert played.restarts > 15 and played.deaths > 30 and played.told > 5 and played.ended < 15, vars(played)
