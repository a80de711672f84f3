"""Workers as threads of this process, for runs in which nobody dies."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor, nn

from slipstream.runtime.replay.torch_groups import HashStore
from slipstream.runtime.torch_pipelining import Place, ReroutedSchedule, ReroutedStage, Routes
from slipstream.runtime.torch_pipelining.routes import Source
from slipstream.schedules.schedule import Schedule, Worker

WIDTH, BATCH = 6, 2
TIMEOUT_SECONDS = 120
T = TypeVar("T")


def draw_parameters(module: nn.Module, seed: int) -> None:
    """Draw parameters from numbers of their own: torch's are those of the process, and threads would share them."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=made))


def build_stage(stage: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    draw_parameters(module, stage)
    return module


def read_microbatch(pipeline: int, index: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 * pipeline + index)
    value = torch.randn(2, BATCH, WIDTH, dtype=torch.float64, generator=made)
    return value[0], value[1]


def gradients_alone(build: Callable[[int], nn.Module], stages: int, microbatches: Sequence[int]) -> list[list[Tensor]]:
    """Gradients by stage, by one process; None where there are none."""
    model = nn.Sequential(*map(build, range(stages)))
    for pipeline, count in enumerate(microbatches):
        for index in range(count):
            value, target = read_microbatch(pipeline, index)
            (nn.functional.mse_loss(model(value), target) / sum(microbatches)).backward()
    return [[parameter.grad for parameter in stage.parameters()] for stage in model]


def with_workers(schedule: Source, run: Callable[[Place], T], failed: Iterable[Worker] = ()) -> dict[Worker, T]:
    """Run a function on the place of each live worker, in a thread of its own; it may close its place."""
    failed = schedule.failed if isinstance(schedule, Schedule) else failed
    routes, store = Routes.read(schedule, failed), HashStore()

    def run_worker(worker: Worker) -> T:
        place = Place.take(routes, worker, store=store, patience=TIMEOUT_SECONDS)
        try:
            return run(place)
        finally:
            place.close()

    with ThreadPoolExecutor(len(routes.workers)) as pool:
        begun = {worker: pool.submit(run_worker, worker) for worker in routes.workers}
        return {worker: future.result(TIMEOUT_SECONDS) for worker, future in begun.items()}


def make_schedule(place: Place, modules: dict[int, nn.Module]) -> ReroutedSchedule:
    return ReroutedSchedule([ReroutedStage(module, stage, place) for stage, module in modules.items()],
                            nn.functional.mse_loss)


def run_step(schedule: ReroutedSchedule) -> list[Tensor]:
    losses: list[Tensor] = []
    schedule.step_samples(read_microbatch, losses)
    return losses
