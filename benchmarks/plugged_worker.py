"""Run plans, be measured, or train and be killed: a worker of `benchmarks.plugged`.

What it reports are JSON objects, one after the other.
"""

import importlib
import json
import random
import time
from collections.abc import Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from slipstream.runtime.replay.torch_groups import PrefixStore, TCPStore
from slipstream.runtime.replay.transport import TransportName
from slipstream.runtime.torch_pipelining import (
    CommunicationError,
    Place,
    ReroutedSchedule,
    ReroutedStage,
    Routes,
)
from slipstream.schedules.codec import read
from slipstream.schedules.schedule import Worker

WIDTH = 8
BATCH = 2
LEARNING_RATE = 0.001
LAST = "last"
"""Key of the store: how many iterations to train."""
LONGEST_SLEEP_SECONDS = 0.04
WARM_UP_STEPS = 5
REPORTS: list[Connection] = []
"""Connection to the benchmark's process."""


def build_stage(stage: int) -> nn.Module:
    """Build a stage, the same whoever builds it."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def read_microbatch(iteration: int, pipeline: int, index: int) -> tuple[Tensor, Tensor]:
    """Return input and target of a micro-batch."""
    made = torch.Generator().manual_seed(10_000 * iteration + 100 * pipeline + index)
    value = torch.randn(2, BATCH, WIDTH, dtype=torch.float64, generator=made)
    return value[0], value[1]


class Alone(NamedTuple):
    """What one process gets."""

    losses: list[float]
    gradients: list[list[Tensor]]
    """Gradients of the last iteration, by stage."""
    parameters: list[list[float]]
    """Sum of each parameter, by stage."""


def train_alone(stages: int, microbatches: Sequence[int], iterations: int) -> Alone:
    """Train in one process."""
    torch.set_num_threads(1)
    model = nn.Sequential(*map(build_stage, range(stages)))
    optimizer = make_optimizer([*model])
    losses = [0.0] * iterations
    for iteration in range(iterations):
        optimizer.zero_grad()
        for pipeline, count in enumerate(microbatches):
            for index in range(count):
                value, target = read_microbatch(iteration, pipeline, index)
                loss = nn.functional.mse_loss(model(value), target) / sum(microbatches)
                loss.backward()
                losses[iteration] += loss.item()
        optimizer.step()
    gradients = []
    for stage in model:
        gradients.append([parameter.grad for parameter in stage.parameters()])
    return Alone(losses, gradients, [sum_parameters(stage) for stage in model])


def make_optimizer(modules: Iterable[nn.Module]) -> torch.optim.Optimizer:
    """Make the optimizer of these stages."""
    return torch.optim.AdamW(
        [parameter for module in modules for parameter in module.parameters()], lr=LEARNING_RATE
    )


def sum_parameters(module: nn.Module) -> list[float]:
    """Return the sum of each parameter."""
    return [parameter.sum().item() for parameter in module.parameters()]


def make_schedule(place: Place, modules: dict[int, nn.Module]) -> ReroutedSchedule:
    """Make stages and schedule around the modules."""
    return ReroutedSchedule(
        [ReroutedStage(module, stage, place) for stage, module in modules.items()],
        nn.functional.mse_loss,
    )


def run_step(schedule: ReroutedSchedule, iteration: int) -> list[Tensor]:
    """Run an iteration; return the losses that this worker has computed."""
    losses: list[Tensor] = []
    schedule.step_samples(partial(read_microbatch, iteration), losses)
    return losses


def run_plan(path: Path, worker: Worker, store: TCPStore) -> dict[str, object] | None:
    """Run one plan, and return how far gradients are from those of one process.

    None if the worker is dead.
    """
    schedule = read(path)
    routes = Routes.read(schedule, schedule.failed)
    if worker not in routes.workers:
        return None
    place = Place.take(routes, worker, store=PrefixStore(path.stem, store))
    modules = {stage: build_stage(stage) for stage in routes.stages_of(worker)}
    made = make_schedule(place, modules)
    losses = run_step(made, 0)
    norm = made.grad_norm()
    total = place.commit(sum((loss.item() for loss in losses), 0.0) / routes.microbatches)
    alone = train_alone(routes.stages, schedule.grid.microbatches, 1)
    found = [parameter.grad for module in modules.values() for parameter in module.parameters()]
    wanted = [gradient for stage in modules for gradient in alone.gradients[stage]]
    norm_alone = (
        torch.cat([gradient.flatten() for stage in alone.gradients for gradient in stage])
        .norm()
        .item()
    )
    deviation = max(
        (gradient - other).abs().max().item() for gradient, other in zip(found, wanted, strict=True)
    )
    place.close()
    return {
        "plan": path.stem,
        "gradients": deviation,
        "loss": abs(total - alone.losses[0]),
        "norm": abs(norm - norm_alone),
    }


def train(table: Path, worker: Worker, store: TCPStore, transport: TransportName) -> None:
    """Train until the store has the last iteration, whoever dies.

    Prints losses, pauses and parameters.
    """
    place = Place.take(Routes.read(table), worker, store=store, transport=transport)
    modules = {stage: build_stage(stage) for stage in place.routes.stages_of(worker)}
    optimizer, schedule, chance = make_optimizer(modules.values()), None, random.Random(str(worker))
    while not (store.check([LAST]) and place.committed >= int(store.get(LAST))):
        optimizer.zero_grad()
        try:
            schedule = schedule or make_schedule(place, modules)
            place.share_state(modules, optimizer)
            losses = run_step(schedule, place.committed)
            # So that workers are killed at all points.
            time.sleep(LONGEST_SLEEP_SECONDS * chance.random())
            place.commit(sum(loss.item() for loss in losses) / place.routes.microbatches)
            optimizer.step()
            report(committed=place.committed, loss=place.last_sum)
            if not place.has_returned:
                continue
            place.recover()
        except CommunicationError as error:
            begun = time.perf_counter()
            if place.recover():
                optimizer.step()
                report(committed=place.committed, loss=place.last_sum, owed=True)
            report(
                pause=time.perf_counter() - begun, live=len(place.routes.workers), error=str(error)
            )
        schedule = None
    report(parameters={stage: sum_parameters(module) for stage, module in modules.items()})
    place.close()


def measure(folder: Path, worker: Worker, store: TCPStore, steps: int) -> None:
    """Print the host seconds of steps of our schedule and torch's, in turns."""
    schedule = read(folder / "plan.json")
    count, stages = schedule.grid.total_microbatches, len(schedule.grid.stages)
    dist.init_process_group(
        "gloo", store=PrefixStore("torch", store), rank=worker.column, world_size=stages
    )
    place = Place.take(Routes.read(schedule), worker, store=store)
    ours = make_schedule(place, {worker.column: build_stage(worker.column)})
    value = torch.zeros(BATCH, WIDTH, dtype=torch.float64, requires_grad=True)

    def make_stage() -> PipelineStage:
        return PipelineStage(
            build_stage(worker.column),
            worker.column,
            stages,
            torch.device("cpu"),
            input_args=value,
            output_args=value,
        )

    rows = _PipelineScheduleRuntime([make_stage()], count, loss_fn=nn.functional.mse_loss)
    rows._load_csv(str(folder / "order.csv"), format="compute_comms")
    usual = Schedule1F1B(make_stage(), count, loss_fn=nn.functional.mse_loss)
    data = [read_microbatch(0, *sample) for sample in ours.samples]
    inputs, targets = (torch.cat(values) for values in zip(*data, strict=True))

    def run_torch(runtime: Any) -> None:
        runtime.step(
            *([inputs] if worker.column == 0 else []), target=targets, return_outputs=False
        )

    runs = {
        "_PipelineScheduleRuntime": partial(run_torch, rows),
        "Schedule1F1B": partial(run_torch, usual),
        "ReroutedSchedule": lambda: run_step(ours, 0),
    }
    seconds = dict.fromkeys(runs, 0.0)
    for turn in range(-WARM_UP_STEPS, steps):
        for name, run in runs.items():
            dist.barrier()
            begun = time.process_time()
            run()
            seconds[name] += time.process_time() - begun if turn >= 0 else 0.0
    report(**seconds)
    place.close()


def report(**values: object) -> None:
    """Tell the benchmark's process some values."""
    REPORTS[0].send_bytes(json.dumps(values).encode())


def main(reports: Connection, mode: str, port: int, worker: Worker, path: Path, steps: int) -> None:
    """Be a worker: run plans, take some steps to be measured, or train."""
    torch.set_num_threads(1)
    REPORTS.append(reports)
    store = TCPStore("127.0.0.1", port, is_master=False)
    if mode == "train over the double of NCCL":
        importlib.import_module("benchmarks.chaos_double")
        train(path, worker, store, "nccl")
    elif mode == "train":
        train(path, worker, store, "gloo")
    elif mode == "steps":
        measure(path, worker, store, steps)
    else:
        for plan in sorted(path.glob("*.json")):
            found = run_plan(plan, worker, store)
            if found is not None:
                report(**found)
