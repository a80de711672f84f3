"""Getting layers while training goes on: for a worker that comes in, and for one whose role will move.

The layers come from several live workers side by side, each with its optimizer's state as it was before some step; then
come the gradients of that step and of each one after it, and the follower makes the same steps with an optimizer of its
own for each layer: elementwise as they are, they end in the same bits. At the order that takes the follower in, every
source says at which committed iteration it is, and a follower that was one step further goes back as all do.
"""

import contextlib
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.config import TrainingConfig
from runtime.model.optimizer import StageOptimizer, build_optimizer
from runtime.model.stage import Stage
from runtime.protocol.failure_injection import InjectedError, Injector
from runtime.protocol.rendezvous import RendezvousError
from runtime.protocol.to_coordinator import Followed, Unfollowed
from runtime.protocol.to_worker import Fetch, Train
from runtime.replay.communication import TIMEOUT, CommunicationError
from runtime.worker.layer_frames import Ask, Even, FrameError, Mark, State, Step, Subject, read_frame, write_frame
from runtime.worker.sockets import Sockets, sockets_of
from schedules.schedule import Worker

CONNECT_SECONDS = 10.0
LOOK_SECONDS = 0.005
Build = Callable[[int], tuple[Stage, StageOptimizer]]
Tell = Callable[[Followed | Unfollowed], None]


class Fetched(NamedTuple):
    """A stage whose layers have come, all or those that were lacked."""

    stage: Stage
    optimizer: StageOptimizer
    layers: frozenset[int]


class Follower:
    """One worker's; follows what the last `Fetch` says that concerns it.

    Parameters
    ----------
    build
        Makes a stage, while training goes on.
    tell
        Called from other threads.
    """

    def __init__(self, worker: Worker, build: Build, tell: Tell, injector: Injector,
                 training: TrainingConfig, device: torch.device) -> None:
        self._worker = worker
        self._follow = partial(_Following, worker=worker, build=build, tell=tell, injector=injector, training=training,
                               device=device)
        self._lock = threading.Lock()
        self._followings: dict[int, _Following] = {}
        """By the order during which they are: who has not begun an order may hear of a fetch in it already."""

    def begin(self, fetch: Fetch) -> None:
        """Drop what is being fetched in the same order, and fetch this."""
        with self._lock:
            if fetch.order in self._followings:
                self._followings.pop(fetch.order).close()
            if any(move.target == self._worker for move in fetch.moves):
                self._followings[fetch.order] = self._follow(fetch)

    def take(self, order: Train, require: Callable[[], None]) -> dict[int, Fetched]:
        """The stages that were fetched for an order, as they are when it begins; nothing where none were.

        Waits until all sources are in the order, too; `require` is called meanwhile and may raise. Raises
        CommunicationError when a source is gone. What was fetched for anything else is dropped.
        """
        fetched: dict[int, Fetched] = {}
        for following in self._before(order):
            try:
                if following.fetch.number == order.fetch:
                    fetched = following.take(order.number, require)
            finally:
                following.close()
        return fetched

    def drop(self, order: Train) -> None:
        """An order begins without this worker: what was fetched for it is of no use."""
        for following in self._before(order):
            following.close()

    def sockets(self) -> Sockets:
        """Those that are open."""
        with self._lock:
            followings = list(self._followings.values())
        return frozenset().union(*(following.sockets() for following in followings))

    def _before(self, order: Train) -> list["_Following"]:
        with self._lock:
            return [self._followings.pop(number) for number in sorted(self._followings) if number < order.number]


class _Following:
    """One fetch: a thread builds the stages, then one for each source applies what that says."""

    def __init__(self, fetch: Fetch, worker: Worker, build: Build, tell: Tell, injector: Injector,
                 training: TrainingConfig, device: torch.device) -> None:
        self.fetch = fetch
        self._worker = worker
        self._build = build
        self._tell = tell
        self._injector = injector
        self._training = training
        self._device = device
        self._wanted: dict[Worker, list[int]] = defaultdict(list)
        for move in fetch.moves:
            if move.target == worker:
                self._wanted[move.source].append(move.layer)
        self._stages: dict[int, tuple[Stage, StageOptimizer]] = {}
        self._own: dict[int, StageOptimizer] = {}
        """Of each layer."""
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._even: set[Worker] = set()
        self._marks: dict[Worker, int] = {}
        self._broken: str | None = None
        self._over = False
        threading.Thread(target=self._start, daemon=True, name="following").start()

    def take(self, order: int, require: Callable[[], None]) -> dict[int, Fetched]:
        """See `Follower.take`."""
        with self._changed:
            while any(self._marks.get(source) != order for source in self._wanted):
                if self._broken is not None:
                    raise CommunicationError(self._broken)
                require()
                self._changed.wait(LOOK_SECONDS)
            self._over = True
        fetched = {}
        for index, (stage, optimizer) in self._stages.items():
            layers = frozenset(layer for layer in stage.modules if self._stage_of(layer) is stage)
            for layer in layers:
                optimizer.take_over(self._own[layer])
            stage.discard()
            fetched[index] = Fetched(stage, optimizer, layers)
        return fetched

    def close(self) -> None:
        """Let go of the sources."""
        with self._changed:
            self._over = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def sockets(self) -> Sockets:
        """Those that are open."""
        with self._changed:
            return sockets_of(self._connections)

    def _start(self) -> None:
        try:
            (mine,) = [stages for worker, stages in self.fetch.needs if worker == self._worker]
            for index in mine:
                if self._over:
                    return
                self._stages[index] = self._build(index)
            for layer in (layer for layers in self._wanted.values() for layer in layers):
                self._own[layer] = build_optimizer({layer: self._stage_of(layer).modules[layer]}, self._training)
        except Exception as error:
            self._break(f"building its stages failed: {type(error).__name__}: {error}")
            return
        for source, layers in self._wanted.items():
            threading.Thread(target=self._follow, args=(source, tuple(layers)), daemon=True,
                             name=f"following {source}").start()

    def _follow(self, source: Worker, layers: tuple[int, ...]) -> None:
        """All that one source says, until the end."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            address = next(address for worker, address in self.fetch.addresses if worker == source)
            with socket.create_connection(address, CONNECT_SECONDS) as connection:
                if not self._enter(connection):
                    return
                try:
                    connection.settimeout(TIMEOUT.total_seconds())
                    write_frame(connection, Ask(layers))
                    while not self._over:
                        self._apply(source, *read_frame(connection))
                finally:
                    with self._changed:
                        self._connections.remove(connection)
        except (InjectedError, OSError, RuntimeError, ValueError) as error:
            self._break(f"fetching layers from worker {source} failed: {' '.join(str(error).split())}")

    def _enter(self, connection: socket.socket) -> bool:
        with self._changed:
            if not self._over:
                self._connections.append(connection)
            return not self._over

    def _apply(self, source: Worker, subject: Subject, tensors: Mapping[str, Tensor]) -> None:
        match subject:
            case State():
                self._mine(source, subject.layer).load_layer_state(subject.layer, tensors)
                self._injector.at(subject.iteration, "loaded")
            case Step():
                self._step(self._mine(source, subject.layer), subject, tensors)
            case Mark():
                self._go_back(source, subject)
            case Even():
                self._be_even(source)
            case Ask():
                raise FrameError("it asks, where it was asked")

    def _mine(self, source: Worker, layer: int) -> StageOptimizer:
        if layer not in self._wanted[source]:
            raise FrameError(f"it sent layer {layer}, for which it was not asked")
        return self._own[layer]

    def _step(self, optimizer: StageOptimizer, step: Step, gradients: Mapping[str, Tensor]) -> None:
        mine = optimizer.layer_gradients(step.layer)
        if {name: one.shape for name, one in mine.items()} != {name: one.shape for name, one in gradients.items()}:
            raise FrameError(f"it sent gradients of layer {step.layer} that do not fit")
        for name, gradient in mine.items():
            gradient.copy_(gradients[name])
        optimizer.step(step.iteration)

    def _go_back(self, source: Worker, mark: Mark) -> None:
        for layer in self._wanted[source]:
            optimizer = self._own[layer]
            if optimizer.open_iteration is not None and optimizer.open_iteration > mark.iteration:
                optimizer.undo()
            optimizer.commit()
        with self._changed:
            self._marks[source] = mark.order
            self._changed.notify_all()

    def _be_even(self, source: Worker) -> None:
        with self._changed:
            before = len(self._even)
            self._even.add(source)
            done = before < len(self._even) == len(self._wanted) and not self._over
        if done:
            self._injector.at(self.fetch.order, "followed")
            self._tell(Followed(self._worker, self.fetch.number))

    def _break(self, reason: str) -> None:
        with self._changed:
            first = self._broken is None and not self._over
            self._broken = self._broken or reason
            self._changed.notify_all()
        if first:
            print(f"worker {self._worker}, order {self.fetch.order}: {reason}", file=sys.stderr, flush=True)
            # When node 0 is gone, the main thread finds out by itself.
            with contextlib.suppress(RendezvousError):
                self._tell(Unfollowed(self._worker, self.fetch.number))

    def _stage_of(self, layer: int) -> Stage:
        """Where copies of a stage are needed, one is fetched, and the others are copied from it."""
        return next(stage for stage, _ in self._stages.values() if layer in stage.modules)
