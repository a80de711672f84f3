"""One worker's process of `benchmarks.plugged`: it runs plans, or trains and may be killed.

    python -m benchmarks.plugged_worker plans PORT WORKER FOLDER
    python -m benchmarks.plugged_worker train PORT WORKER TABLE ITERATIONS

It prints one JSON object a line.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.runtime.torch_pipelining import CommunicationError, Place, ReroutedSchedule, ReroutedStage, Routes
from slipstream.runtime.torch_private import PrefixStore, TCPStore
from slipstream.schedules.codec import read
from slipstream.schedules.schedule import Worker

WIDTH, BATCH = 8, 2
LEARNING_RATE = 0.01


def build_stage(stage: int) -> nn.Module:
    """Build a stage, the same whoever builds it."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def read_microbatch(iteration: int, pipeline: int, index: int) -> tuple[Tensor, Tensor]:
    """Return input and target of a micro-batch."""
    made = torch.Generator().manual_seed(10_000 * iteration + 100 * pipeline + index)
    value = torch.randn(2, BATCH, WIDTH, dtype=torch.float64, generator=made)
    return value[0], value[1]


def train_alone(stages: int, microbatches: Sequence[int], iterations: int) -> list[tuple[float, list[list[Tensor]]]]:
    """Train in one process; return loss, and gradients by stage, of each iteration."""
    model = nn.Sequential(*map(build_stage, range(stages)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    done = []
    for iteration in range(iterations):
        optimizer.zero_grad()
        total = 0.0
        for pipeline, count in enumerate(microbatches):
            for index in range(count):
                value, target = read_microbatch(iteration, pipeline, index)
                loss = nn.functional.mse_loss(model(value), target) / sum(microbatches)
                loss.backward()
                total += loss.item()
        done.append((total, [[parameter.grad.clone() for parameter in stage.parameters()] for stage in model]))
        optimizer.step()
    return done


def make_schedule(place: Place, modules: dict[int, nn.Module]) -> ReroutedSchedule:
    """Make stages and schedule around the modules."""
    return ReroutedSchedule([ReroutedStage(module, stage, place) for stage, module in modules.items()],
                            nn.functional.mse_loss)


def run_step(schedule: ReroutedSchedule, iteration: int) -> list[Tensor]:
    """Run an iteration; return the losses that this worker has computed."""
    losses: list[Tensor] = []
    data = [read_microbatch(iteration, *sample) for sample in schedule.samples]
    schedule.step(arg_mbs=[value for value, _ in data], target_mbs=[target for _, target in data], losses=losses)
    return losses


def run_plan(path: Path, worker: Worker, store: TCPStore) -> dict[str, object] | None:
    """Run one plan; return how far gradients are from those of one process, None if the worker is dead."""
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
    loss, gradients = train_alone(routes.stages, schedule.grid.microbatches, 1)[0]
    found = [parameter.grad for module in modules.values() for parameter in module.parameters()]
    wanted = [gradient for stage in modules for gradient in gradients[stage]]
    norm_alone = torch.cat([gradient.flatten() for stage in gradients for gradient in stage]).norm().item()
    deviation = max((one - other).abs().max().item() for one, other in zip(found, wanted, strict=True))
    place.close()
    return {"plan": path.stem, "gradients": deviation, "loss": abs(total - loss), "norm": abs(norm - norm_alone)}


def train(table: Path, worker: Worker, store: TCPStore, iterations: int) -> None:
    """Train, whoever dies, and print each loss, each pause, and how far the parameters are from one process's."""
    routes = Routes.read(table)
    place = Place.take(routes, worker, store=store, patience=120)
    modules = {stage: build_stage(stage) for stage in routes.stages_of(worker)}
    optimizer = torch.optim.AdamW([one for module in modules.values() for one in module.parameters()],
                                  lr=LEARNING_RATE)
    schedule = None
    while place.committed < iterations:
        optimizer.zero_grad()
        try:
            place.share_state(modules, optimizer)
            schedule = schedule or make_schedule(place, modules)
            losses = run_step(schedule, place.committed)
            place.commit(sum((loss.item() for loss in losses), 0.0) / place.routes.microbatches)
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
            report(pause=time.perf_counter() - begun, live=len(place.routes.workers), error=str(error))
        schedule = None
    report(digest={str(stage): [parameter.sum().item() for parameter in module.parameters()]
                   for stage, module in modules.items()})
    place.close()


def report(**values: object) -> None:
    """Print a line."""
    print(json.dumps(values), flush=True)


def main() -> None:
    """Run what the command line says."""
    torch.set_num_threads(1)
    mode, port, name, path = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    store = TCPStore("127.0.0.1", port, is_master=False)
    if mode == "train":
        train(path, Worker.parse(name), store, int(sys.argv[5]))
        return
    for plan in sorted(path.glob("*.json")):
        found = run_plan(plan, Worker.parse(name), store)
        if found is not None:
            report(**found)


if __name__ == "__main__":
    main()
