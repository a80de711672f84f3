"""Workers as threads of this process, for runs in which nobody dies."""

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slipstream.runtime.replay.sockets import Sockets, identify_sockets
from slipstream.runtime.replay.torch_groups import HashStore
from slipstream.runtime.torch_pipelining import Place, ReroutedSchedule, ReroutedStage, Routes
from slipstream.runtime.torch_pipelining.routes import Source
from slipstream.runtime.torch_pipelining.watch import Watch, connect
from slipstream.schedules.schedule import Schedule, Worker

WIDTH = 6
BATCH = 2
TIMEOUT_SECONDS = 240
T = TypeVar("T")


class AllWatches:
    """The watches of all workers of this process, and connections by which they look at others.

    An abort shuts all sockets that its process has opened meanwhile, except its own watch's. Where
    workers are threads of one process, it has to spare the others' as well, or they seem dead.
    """

    def __init__(self) -> None:
        self._watches: list[Watch] = []
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()

    def make(self, host: str, check: Callable[[], None]) -> Watch:
        watch = Watch(host, check)
        with self._lock:
            self._watches.append(watch)
        watch.sockets = self.sockets  # type: ignore[method-assign]
        return watch

    def connect(self, address: str) -> socket.socket | None:
        # With the lock, no abort finds a connection that is not listed yet.
        with self._lock:
            connection = connect(address)
            if connection is not None:
                self._connections.append(connection)
        return connection

    def sockets(self) -> Sockets:
        with self._lock:
            watches, connections = [*self._watches], [*self._connections]
        found = identify_sockets(connections)
        for watch in watches:
            found |= Watch.sockets(watch)
        return found


def take_turns(functions: Iterable[Callable[..., T]]) -> list[Callable[..., T]]:
    """Return functions that call these, of which at most one runs at a time.

    Torch's schedules save and restore the state of the process's generator. While torch holds the
    generator's lock, Python's collector may run, and wait for the GIL. A thread that has the GIL
    meanwhile and waits for that lock never gets it.
    """
    lock = threading.Lock()

    def in_turn(function: Callable[..., T]) -> Callable[..., T]:
        def call(*arguments: Any) -> T:
            with lock:
                return function(*arguments)

        return call

    return [in_turn(function) for function in functions]


def draw_parameters(module: nn.Module, seed: int) -> None:
    """Draw parameters from numbers of their own.

    Torch's are those of the process, and threads would share them.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                0.4 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
            )


def build_stage(stage: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    draw_parameters(module, stage)
    return module


def read_microbatch(pipeline: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * pipeline + index)
    value = torch.randn(2, BATCH, WIDTH, dtype=torch.float64, generator=generator)
    return value[0], value[1]


def gradients_alone(
    build: Callable[[int], nn.Module], stages: int, microbatches: Sequence[int]
) -> list[list[Tensor]]:
    """Gradients by stage, by one process; None where there are none."""
    model = nn.Sequential(*map(build, range(stages)))
    for pipeline, count in enumerate(microbatches):
        for index in range(count):
            value, target = read_microbatch(pipeline, index)
            (nn.functional.mse_loss(model(value), target) / sum(microbatches)).backward()
    gradients = []
    for stage in model:
        gradients.append([parameter.grad for parameter in stage.parameters()])
    return gradients


def with_workers(
    schedule: Source, run: Callable[[Place], T], failed: Iterable[Worker] = ()
) -> dict[Worker, T]:
    """Run a function on the place of each live worker, in a thread.

    It may close its place.
    """
    failed = schedule.failed if isinstance(schedule, Schedule) else failed
    routes, store = Routes.read(schedule, failed), HashStore()

    def run_worker(worker: Worker) -> T:
        place = Place.take(routes, worker, store=store, patience=TIMEOUT_SECONDS)
        try:
            return run(place)
        finally:
            place.close()

    with ThreadPoolExecutor(len(routes.workers)) as pool:
        futures = {worker: pool.submit(run_worker, worker) for worker in routes.workers}
        return {worker: future.result(TIMEOUT_SECONDS) for worker, future in futures.items()}


def make_schedule(place: Place, modules: dict[int, nn.Module]) -> ReroutedSchedule:
    return ReroutedSchedule(
        [ReroutedStage(module, stage, place) for stage, module in modules.items()],
        nn.functional.mse_loss,
    )


def run_step(schedule: ReroutedSchedule) -> list[Tensor]:
    losses: list[Tensor] = []
    schedule.step_samples(read_microbatch, losses)
    return losses
