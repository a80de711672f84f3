"""Compare the cost of an op with torch.distributed.pipelining.

    python -m benchmarks.per_op [--stages 2] [--microbatches 8] [--width 32] [--iterations 150]
                                [--repeats 5] [--json]

Schedule, model, optimizer and processes are the same. (`benchmarks.devices` runs it on GPUs, also
with large layers.)

The GPT is so small that most of the time is the runtime's own, over gloo, with one process per
stage and one thread each. `table` is torch's runtime for orders of ops, which gets Slipstream's
order as CSV; `1F1B` is torch's own class for that one schedule. Runs take turns, and the quickest
of each counts, because other programs can only delay. The benchmark prints the seconds of an
iteration, with data, optimizer step and, here, reports and undo copies, divided by the number of F,
I, W and B that a worker runs; and likewise the CPU seconds of all workers, which tell more on a
busy machine. Exit status 1 when an op costs more here than in torch's runtime for the same order,
by both measures.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from slipstream.cli.exporters.torch_csv import write_order
from slipstream.planner.job.file import parse_job
from slipstream.planner.plan import plan_job
from slipstream.runtime.config import RunConfig, TrainingConfig, parse_run_config
from slipstream.runtime.data.data import Microbatch, load_data
from slipstream.runtime.launch import RunOptions, run
from slipstream.runtime.models.layered_model import autocast_context, build_model, parameter_dtype
from slipstream.runtime.placement import split_layers
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.schedules.schedule import OpKind, Schedule

LIMIT = 1.0
WARM_UP = 20
Rival = Literal["table", "1F1B", "zero-bubble"]
"""Runtime of torch: the one for orders of ops, or a schedule of its own.

The last one has two stages per worker.
"""


class Comparison(NamedTuple):
    """Settings that all runtimes run."""

    name: str
    schedule: Schedule
    config: RunConfig
    rivals: tuple[Rival, ...]
    warm_up: int = WARM_UP
    """Number of iterations before the measured ones."""

    @property
    def ops(self) -> int:
        """Number of compute ops of the busiest worker."""
        computes = Counter(
            op.worker for op in self.schedule.all_ops() if op.kind not in (OpKind.A, OpKind.O)
        )
        return max(computes.values())


class Cost(NamedTuple):
    """Cost of an iteration: wall-clock seconds, and CPU seconds of all workers."""

    wall: float
    cpu: float


class OpCosts(NamedTuple):
    """Costs of an op."""

    name: str
    rival: Rival
    ours: Cost
    torchs: Cost

    @property
    def ratio(self) -> float:
        """Cost of an op here, relative to torch."""
        return self.ours.wall / self.torchs.wall

    @property
    def cpu_ratio(self) -> float:
        """Cost of an op here, relative to torch, by CPU time.

        Other programs disturb it less.
        """
        return self.ours.cpu / self.torchs.cpu


def settings(
    stages: int,
    microbatches: int,
    width: int,
    iterations: int,
    model: Mapping[str, object] = {},
    training: Mapping[str, object] = {},
    warm_up: int = WARM_UP,
) -> list[Comparison]:
    """Return the settings: 1F1B, and a schedule with split backward.

    `model` and `training` replace keys of these tables.
    """
    zero_first = [0] + [1] * (stages - 1)
    job = parse_job(
        f"pipelines = 1\nstages = {stages}\nmicrobatches = {microbatches}\n[time]\nforward = 1\n"
        f"backward_input = {zero_first}\nbackward_weight = 1\noptimizer = 1\n"
    )
    config = parse_run_config(
        {"blocks": 2 * stages - 2, "width": width, "heads": 2, "context": 8, **model},
        {"batch": 1, "device": "cpu", "iterations": iterations, "backend": "gloo", **training},
    )
    return [
        Comparison(
            "1F1B", plan_job(job, method="1f1b").schedule, config, ("table", "1F1B"), warm_up
        ),
        Comparison(
            "split",
            plan_job(job, optimizer="synchronous", method="greedy").schedule,
            config,
            ("table",),
            warm_up,
        ),
    ]


def ours(setting: Comparison, fork_server: ForkServer) -> Cost:
    """Return the costs of an iteration here."""
    ends: list[tuple[float, float]] = []

    def note(iteration: int, _: float) -> None:
        if iteration in (setting.warm_up, setting.config.training.iterations - 1):
            ends.append((time.perf_counter(), sum(map(cpu_seconds, fork_server.pids.values()))))

    with tempfile.TemporaryDirectory() as folder:
        run(
            setting.schedule,
            setting.config,
            out=Path(folder),
            options=RunOptions(traced=0),
            fork_server=fork_server,
            progress=note,
        )
    (began, ran), (ended, ran_then) = ends
    iterations = setting.config.training.iterations - 1 - setting.warm_up
    return Cost((ended - began) / iterations, (ran_then - ran) / iterations)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process in all of its threads (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def torchs(setting: Comparison, rival: Rival) -> Cost:
    """Return the costs of an iteration in torch.distributed.pipelining."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "order.csv").write_text(write_order(setting.schedule))
        multiprocessing.start_processes(
            _torch_worker,
            (
                setting.config.to_json(),
                setting.schedule.grid.depth,
                setting.schedule.grid.total_microbatches,
                rival,
                setting.warm_up,
                str(path),
            ),
            nprocs=setting.schedule.grid.depth,
            start_method="forkserver",
        )
        stages = range(setting.schedule.grid.depth)
        costs = [Cost(*json.loads((path / f"cost-{rank}").read_text())) for rank in stages]
        return Cost(costs[0].wall, sum(cost.cpu for cost in costs))


def _torch_worker(
    rank: int, text: str, stages: int, microbatches: int, rival: Rival, warm_up: int, folder: str
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    config = RunConfig.from_json(text)
    training, device = config.training, _device(config.training, rank, stages)
    distributed.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=stages,
    )
    model = build_model(config.model, training.seed, parameter_dtype(training), device)
    indices = [rank, rank + stages] if rival == "zero-bubble" else [rank]
    ranges = split_layers(model.layers, stages * len(indices))
    modules = []
    for index in indices:
        layers = map(model.build, range(*ranges[index]))
        modules.append(nn.Sequential(*layers).to(device))
    parts = [
        PipelineStage(module, index, stages * len(indices), device)
        for module, index in zip(modules, indices, strict=True)
    ]
    schedule = _torch_schedule(rival, parts, microbatches, model.loss, folder)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=training.learning_rate,
        betas=training.betas,
        fused=True,
    )
    corpus = load_data(config)

    def iterate(iteration: int) -> None:
        tokens, targets = zip(
            *(
                corpus.batch(Microbatch(iteration, 0, number), training.batch, config.model.context)
                for number in range(microbatches)
            ),
            strict=True,
        )
        with autocast_context(training, device):
            if rank == 0:
                schedule.step(torch.cat(tokens).to(device))
            elif rank == stages - 1:
                losses: list[Tensor] = []
                schedule.step(target=torch.cat(targets).to(device), losses=losses)
                torch.stack(losses).mean().item()
            else:
                schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    for iteration in range(warm_up):
        iterate(iteration)
    distributed.barrier()
    began, ran = time.perf_counter(), time.process_time()
    for iteration in range(warm_up, training.iterations):
        iterate(iteration)
    distributed.barrier()
    cost = [
        (end - start) / (training.iterations - warm_up)
        for start, end in ((began, time.perf_counter()), (ran, time.process_time()))
    ]
    (Path(folder) / f"cost-{rank}").write_text(json.dumps(cost))
    distributed.destroy_process_group()


def _device(training: TrainingConfig, rank: int, stages: int) -> torch.device:
    """Return the device of a rank.

    With fewer cards than ranks, each rank appears to NCCL as a separate machine, because NCCL
    refuses two ranks on a card.
    """
    if training.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.device_count() < stages:
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _torch_schedule(
    rival: Rival,
    parts: list[PipelineStage],
    microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    folder: str,
) -> Any:
    if rival == "1F1B":
        return Schedule1F1B(parts[0], microbatches, loss_fn=loss)
    if rival == "zero-bubble":
        return ScheduleInterleavedZeroBubble(cast(Any, parts), microbatches, loss_fn=loss)
    schedule = _PipelineScheduleRuntime(cast(Any, parts), microbatches, loss_fn=loss)
    schedule._load_csv(f"{folder}/order.csv")
    return schedule


def compare(setting: Comparison, repeats: int) -> list[OpCosts]:
    """Run all runtimes of a setting in turns, and return their costs."""
    here: list[Cost] = []
    there: dict[Rival, list[Cost]] = {rival: [] for rival in setting.rivals}
    with ForkServer() as fork_server:
        for _ in range(repeats):
            here.append(ours(setting, fork_server))
            for rival, costs in there.items():
                costs.append(torchs(setting, rival))
    return [
        OpCosts(setting.name, rival, least(here, setting.ops), least(costs, setting.ops))
        for rival, costs in there.items()
    ]


def least(costs: Sequence[Cost], ops: int) -> Cost:
    """Return the smallest costs of an op."""
    wall = min(cost.wall for cost in costs)
    cpu = min(cost.cpu for cost in costs)
    return Cost(wall / ops, cpu / ops)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("stages", 2),
        ("microbatches", 8),
        ("width", 32),
        ("iterations", 150),
        ("repeats", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    get_context("forkserver").set_forkserver_preload(
        ["torch.distributed.pipelining", "slipstream.runtime.launch", "slipstream.planner.plan"]
    )
    outcomes = [
        outcome
        for setting in settings(
            options.stages, options.microbatches, options.width, options.iterations
        )
        for outcome in compare(setting, options.repeats)
    ]
    if options.json:
        print(
            json.dumps(
                [
                    {**outcome._asdict(), "ratio": outcome.ratio, "cpu_ratio": outcome.cpu_ratio}
                    for outcome in outcomes
                ]
            )
        )
    else:
        table = Table(
            "schedule", "torch's runtime", "us an op", "there", "ratio", "CPU us", "there", "ratio"
        )
        for outcome in outcomes:
            table.add_row(
                outcome.name,
                outcome.rival,
                f"{outcome.ours.wall * 1e6:.0f}",
                f"{outcome.torchs.wall * 1e6:.0f}",
                f"{outcome.ratio:.2f}",
                f"{outcome.ours.cpu * 1e6:.0f}",
                f"{outcome.torchs.cpu * 1e6:.0f}",
                f"{outcome.cpu_ratio:.2f}",
            )
        Console().print(table)
    sys.exit(
        any(
            min(outcome.ratio, outcome.cpu_ratio) > LIMIT
            for outcome in outcomes
            if outcome.rival == "table"
        )
    )


if __name__ == "__main__":
    main()
