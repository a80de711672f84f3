"""A loop in torch.distributed.pipelining that goes on when a worker is killed.

    python examples/torch_loop.py

rehearses it on this machine: it plans a table of schedules, and starts the loop under torchrun, on
a "machine" of eight workers and another of one, which is killed in iteration 3. With real machines,
use

    slipstream table job.toml --max-failures 2 --exact --optimizer synchronous --out table
    torchrun --nnodes 9 --nproc-per-node 1 ... examples/torch_loop.py table

on each. Three pipelines of three stages; no process is started anew. Losses equal one process's.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.runtime.torch_pipelining import (
    CommunicationError,
    Place,
    ReroutedSchedule,
    ReroutedStage,
    Routes,
)

JOB = """
pipelines = 3
stages = 3
microbatches = 4
[time]
forward = 1
backward_input = 1
backward_weight = 1
optimizer = 2
"""
STAGES = 3
PIPELINES = 3
MICROBATCHES = 4
WIDTH = 16
SAMPLES = 2
ITERATIONS = 6
KILLED_IN = 3
"""Iteration in which a worker is killed."""
KILLED_RANK = 8
"""Rank of that worker."""
TOLERANCE = 1e-12
DONE = "equal to"


def build_stage(stage: int) -> nn.Module:
    """Build a stage of the model, the same whoever builds it."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def read_microbatch(iteration: int, pipeline: int, index: int) -> tuple[Tensor, Tensor]:
    """Return input and target of a micro-batch, the same whoever reads it."""
    made = torch.Generator().manual_seed(10_000 * iteration + 100 * pipeline + index)
    value = torch.randn(2, SAMPLES, WIDTH, generator=made, dtype=torch.float64)
    return value[0], value[1]


def train_alone() -> list[float]:
    """Train in one process; return the mean loss of each iteration."""
    model = nn.Sequential(*map(build_stage, range(STAGES)))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), [0.0] * ITERATIONS
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        for pipeline in range(PIPELINES):
            for index in range(MICROBATCHES):
                value, target = read_microbatch(iteration, pipeline, index)
                loss = nn.functional.mse_loss(model(value), target) / (PIPELINES * MICROBATCHES)
                loss.backward()
                losses[iteration] += loss.item()
        optimizer.step()
    return losses


def train(table: str) -> list[float]:
    """Train as one worker; return the mean loss of each iteration."""
    place = Place.take(Routes.read(table))
    modules = {stage: build_stage(stage) for stage in place.routes.stages_of(place.worker)}
    optimizer = torch.optim.AdamW(
        [parameter for module in modules.values() for parameter in module.parameters()], lr=0.01
    )
    schedule, losses = None, [0.0] * ITERATIONS
    while (iteration := place.committed) < ITERATIONS:
        optimizer.zero_grad()
        try:
            schedule = schedule or ReroutedSchedule(
                [ReroutedStage(module, stage, place) for stage, module in modules.items()],
                nn.functional.mse_loss,
            )
            if iteration == KILLED_IN and os.environ["RANK"] == str(KILLED_RANK):
                os.kill(os.getpid(), signal.SIGKILL)
            losses_here: list[Tensor] = []
            schedule.step_samples(partial(read_microbatch, iteration), losses_here)
            place.commit(sum(loss.item() for loss in losses_here) / place.routes.microbatches)
        except CommunicationError as error:
            schedule = None
            owes_step = place.recover()
            if place.worker == place.routes.workers[0]:
                print(
                    f"iteration {iteration}: {error}; {len(place.routes.workers)} workers go on",
                    flush=True,
                )
            if not owes_step:
                continue
        optimizer.step()
        losses[iteration] = place.last_sum
    place.close()
    return losses


def rehearse() -> None:
    """Start the loop on two machines, kill one, and wait for the comparison."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as holder:
        # A free port, which no other process is given before torchrun listens on it.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        folder, port = Path(name), holder.getsockname()[1]
        (folder / "job.toml").write_text(JOB)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "slipstream",
                "table",
                folder / "job.toml",
                "--max-failures",
                "1",
                "--exact",
                "--optimizer",
                "synchronous",
                "--method",
                "greedy",
                "--steps",
                "50",
                "--out",
                folder / "table",
            ],
            check=True,
            capture_output=True,
        )
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(port),
        ]
        with (folder / "errors").open("w") as errors, ExitStack() as started:
            machines = [
                started.enter_context(
                    subprocess.Popen(
                        [
                            *torchrun,
                            "--node-rank",
                            str(rank),
                            "--nproc-per-node",
                            str(workers),
                            __file__,
                            folder / "table",
                        ],
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                    )
                )
                for rank, workers in enumerate((8, 1))
            ]
            # Torchrun waits for the dead one.
            started.callback(lambda: [machine.terminate() for machine in machines])
            for line in machines[0].stdout or ():
                print(line, end="", flush=True)
                if DONE in line:
                    return
        raise SystemExit((folder / "errors").read_text())


def main() -> None:
    """Rehearse, or train as one of torchrun's processes and compare."""
    if "RANK" not in os.environ:
        rehearse()
        return
    torch.set_num_threads(1)
    losses = train(sys.argv[1])
    if os.environ["RANK"] == "0":
        alone = train_alone()
        print(
            *(f"{loss:.12f} {other:.12f}" for loss, other in zip(alone, losses, strict=True)),
            sep="\n",
        )
        assert max(abs(loss - other) for loss, other in zip(alone, losses, strict=True)) < TOLERANCE
        print(f"{DONE} {TOLERANCE:g}", flush=True)


if __name__ == "__main__":
    main()
