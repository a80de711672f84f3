"""Workers that only count: what a coordinator tells them, they must be able to do."""

from collections import deque

from msgspec.structs import replace

from slipstream.runtime.protocol.to_coordinator import (
    FetchFailed,
    FetchUpToDate,
    Finished,
    IterationReport,
    Paused,
    Published,
    ReadableCheckpoints,
    Ready,
    RecoveryReport,
    TrainingStarted,
)
from slipstream.runtime.protocol.to_worker import (
    Acknowledged,
    EndOrder,
    Fetch,
    Finish,
    Leave,
    Publish,
    ReportCheckpoints,
    Train,
)
from slipstream.runtime.run_identity import RunIdentity
from slipstream.schedules.codec import decode
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator.holding import holding, partition

PARTITION = partition([0, 2, 4])
PLACEMENT = PARTITION.placement
ITERATIONS = 12
RANKS = 2
"""Processes of a worker that has several."""


class Counting:
    """A worker whose layers are numbers: how many iterations each has seen."""

    def __init__(self, worker, world) -> None:
        self.worker, self.world = worker, world
        self.said, self.inbox = deque([self.ready(None)]), deque()
        self.layers: dict[int, int] = {}
        self.order: Train | None = None
        self.members: tuple[Worker, ...] = ()
        self.failed: tuple[Worker, ...] = ()
        self.reached = self.begun = self.saves = -1
        self.needs: frozenset[int] = frozenset()
        self.lacking: dict[int, Worker] = {}
        """Layers that it needs and has not got, with who sends them."""
        self.paused = True
        self.losses: dict[int, float] = {}

    def ready(self, report):
        return Ready(self.worker, (("127.0.0.1", 1),), None, report)

    def go_back(self, committed) -> None:
        """By one step at most."""
        assert committed in (self.reached, self.reached - 1), (self.worker, committed, self.reached)
        self.layers = dict.fromkeys(self.layers, committed + 1)
        self.reached = committed

    def holding(self):
        # Touching ones do no harm here.
        return holding(*((layer, layer + 1) for layer in sorted(self.layers)))

    def hear(self) -> None:
        message = self.inbox.popleft()
        match message:
            case Train():
                self.train(message)
            case EndOrder() if self.order is not None and self.order.order == message.order:
                self.pause()
            case Acknowledged() if (
                self.order is not None and not self.paused and self.order.order == message.order
            ):
                assert message.iteration == self.reached
                if message.committed is not None:
                    self.losses.update([message.committed])
                self.begun = message.iteration + 1
                if message.save:
                    self.saves = self.begun
                if message.stop or self.begun == self.last:
                    self.pause()
            case Fetch() if any(move.target == self.worker for move in message.moves):
                self.said.append(self.fetched(message))
            case ReportCheckpoints():
                self.said.append(ReadableCheckpoints(self.worker, self.readable()))
            case Finish():
                # Else a rank that node 0 was lost before it could tell: it holds nothing.
                if self.order is not None:
                    self.go_back(message.first_iteration - 1)
                self.world.saving = message.first_iteration
                self.said.append(self.finished(message))
            case Publish():
                self.said.append(Published(self.worker, message.order))
            case Leave():
                self.leave()

    def fetched(self, message):
        """What it says once it has tried to fetch layers."""
        failed = self.world.rng.random() < self.world.unfetched
        return (FetchFailed if failed else FetchUpToDate)(self.worker, message.number)

    def finished(self, message):
        """What it says once it has written drafts."""
        return Finished(self.worker, message.order, {})

    def readable(self):
        """The checkpoints that it can read."""
        return tuple(
            iteration
            for iteration in self.world.checkpoints
            if not iteration or self.world.rng.random() < 0.7
        )

    @property
    def last(self) -> int:
        """The number of iterations of the run."""
        return self.world.rules.iterations.stop

    def leave(self) -> None:
        self.world.workers.pop(self.worker)

    def met(self):
        """Those it cannot step without."""
        return [self.world.workers.get(worker) for worker in self.members]

    def train(self, order) -> None:
        schedule = decode(bytes(order.schedule))
        if self.worker not in schedule.seat_of:
            # It came too late for this one, or has nothing to do; others may take layers from it.
            self.order = None
            return
        assert self.paused
        if self.order is None:
            self.layers = {}
        committed = order.first_iteration - 1
        if order.restore is not None or order.first_iteration == 0:
            assert order.restore is None or committed + 1 in self.world.checkpoints
            self.layers, self.reached = {}, committed
        elif (
            self.layers
            and self.world.went_back
            and committed not in (self.reached, self.reached - 1)
        ):
            # it has not heard that all went back: what it holds fits nothing
            # (`GenerationRunner.fits`)
            self.layers = {}
        elif self.layers:
            self.go_back(committed)
        moved = {move.layer for move in order.moves if move.target == self.worker}
        read = {
            layer
            for worker, layers in order.restore or ()
            if worker == self.worker
            for layer in layers
        }
        needs = self.world.rules.placement.held_layers(schedule, self.worker)
        if not order.fetch and order.first_iteration and order.restore is None:
            assert needs <= self.layers.keys() | moved, "nobody gives what it lacks"
        if order.restore is not None:
            assert needs <= read | moved
        if order.fetch or (not order.first_iteration and order.restore is None):
            there = needs
        elif order.restore is not None:
            there = read
        else:
            there = needs & self.layers.keys()
        # What others lack stays until all have begun.
        self.layers |= dict.fromkeys(there, committed + 1)
        self.needs = needs
        self.lacking = {
            move.layer: move.source for move in order.moves if move.target == self.worker
        }
        self.world.fewest = min(self.world.fewest, len(schedule.seats))
        self.saves = -1
        self.order, self.members, self.failed, self.paused = (
            order,
            schedule.members,
            order.failed,
            False,
        )
        self.reached, self.begun = committed, committed + 1
        if self.world.rng.random() < self.world.refused:
            self.world.partial += 1
            self.pause("a connection was refused")
        elif not self.lacking:
            self.begin()

    def begin(self) -> None:
        """It has all that it needs."""
        self.said.append(TrainingStarted(self.worker, self.order.order))
        if self.begun == self.last:
            self.pause()  # and keeps what others may still lack

    def source(self, worker):
        """The process of a worker that sends it layers; None: it is gone."""
        return self.world.workers.get(worker)

    def fetch(self) -> None:
        """Get a layer that it lacks, once its source follows the same order."""
        layer, worker = next(iter(self.lacking.items()))
        source = self.source(worker)
        if source is None:
            self.pause("the source of a layer is gone")
        elif worker not in self.members or (
            source.order is not None and source.order.order == self.order.order
        ):
            assert layer in source.layers
            self.layers[layer] = self.order.first_iteration
            del self.lacking[layer]
            self.world.moved += 1
            if not self.lacking:
                self.begin()

    def pause(self, reason=None, named=()) -> None:
        if not self.paused and self.order is not None:
            self.paused = True
            self.said.append(
                Paused(self.worker, self.order.order, self.holding(), None, reason, named)
            )

    def step(self) -> None:
        """It can, once all members have begun the same iteration."""
        if self.paused or self.order is None:
            return
        if self.lacking:
            self.fetch()
            return
        if self.reached >= self.begun or not all(
            other is not None
            and other.order is not None
            and other.order.order == self.order.order
            and other.begun >= self.begun
            and not other.lacking
            for other in self.met()
        ):
            return
        self.layers = {layer: seen for layer, seen in self.layers.items() if layer in self.needs}
        self.reached = self.begun
        self.world.stepped(
            self.order.order, self.reached, self.worker, saves=self.saves == self.reached
        )
        self.layers = dict.fromkeys(self.layers, self.reached + 1)
        self.report()

    def report(self) -> None:
        """Say that it has stepped."""
        self.said.append(
            IterationReport(
                self.worker,
                self.order.order,
                self.reached,
                float(self.reached) if self.worker == self.members[0] else 0.0,
                0.1,
            )
        )

    def lose_coordinator(self) -> None:
        self.inbox.clear()
        self.said.clear()
        self.paused = True
        self.said.append(self.ready(self.known()))

    def known(self):
        if self.order is None:
            return RecoveryReport(0, (), -1, holding(), None, False)
        return RecoveryReport(
            self.order.order,
            self.failed,
            self.reached,
            self.holding(),
            None,
            False,
            self.order.first_iteration - 1,
            self.losses,
        )


class Other(Counting):
    """A worker whose node has another job file."""

    def ready(self, report):
        return replace(
            super().ready(report), identity=RunIdentity(training={"learning_rate": "0.002"})
        )

    def train(self, order) -> None:
        assert self.worker not in decode(bytes(order.schedule)).seat_of, (
            "it would train something else"
        )

    def leave(self) -> None:
        self.world.refused_others += 1
        super().leave()


class Rank(Counting):
    """A process of a worker that steps once all of all members have begun."""

    def __init__(self, worker, rank, world) -> None:
        self.rank = rank
        super().__init__(worker, world)

    def leave(self) -> None:
        mine = self.world.workers[self.worker]
        mine.remove(self)
        if not mine:
            del self.world.workers[self.worker]

    def met(self):
        ranks = []
        for worker in self.members:
            ranks += self.world.workers.get(worker, ()) if self.whole(worker) else (None,)
        return ranks

    def source(self, worker):
        return next(
            (rank for rank in self.world.workers.get(worker, ()) if rank.rank == self.rank), None
        )

    def whole(self, worker) -> bool:
        return len(self.world.workers.get(worker, ())) == RANKS


class Apart(Counting):
    """A worker that never reaches some others (`CutWorld.cut`).

    It does so neither to train, nor to get their layers.
    """

    def hear(self) -> None:
        match self.inbox[0]:
            case Fetch(number=number, moves=moves) if any(
                move.target == self.worker and self.world.is_cut(self.worker, move.source)
                for move in moves
            ):
                self.inbox.popleft()
                self.said.append(FetchFailed(self.worker, number, "timed out", unreachable=True))
            case _:
                super().hear()

    def train(self, order) -> None:
        super().train(order)
        for other in self.members if not self.paused else ():
            if self.world.is_cut(self.worker, other):
                self.pause(f"receiving from worker {other} failed", (self.worker, other))
