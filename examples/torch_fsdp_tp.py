"""A loop with FSDP2 and tensor parallelism inside workers, which survives a death.

    python examples/torch_fsdp_tp.py

plans a table, and starts two "machines" with torchrun: one of three workers, and another of one,
which is killed in iteration 2. Two pipelines of two stages, eight ranks: stage 0 is sharded by
FSDP2 over the two ranks of its worker, stage 1 is cut by tensor parallelism. The modules stay as
they are when a worker dies: only connections between workers and the stages around the modules are
made anew.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from slipstream.runtime.torch_pipelining import (
    CommunicationError,
    Place,
    ReroutedSchedule,
    ReroutedStage,
    Routes,
)

JOB = """
pipelines = 2
stages = 2
microbatches = 3
[time]
forward = 1
backward_input = 1
backward_weight = 1
optimizer = 2
"""
STAGES = 2
PIPELINES = 2
MICROBATCHES = 3
WIDTH = 16
SAMPLES = 2
RANKS = 2
ITERATIONS = 5
KILLED_IN = 2
"""Iteration in which a worker is killed."""
KILLED_RANK = 6
"""Rank of that worker."""
TOLERANCE = 1e-12
DONE = "equal to"


def build_stage(stage: int) -> nn.Module:
    """Build a stage of the model, whole, the same whoever builds it."""
    torch.manual_seed(stage)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
    ).double()


def cut_stage(stage: int) -> nn.Module:
    """Build a stage, sharded over the two ranks of a worker."""
    mesh, module = init_device_mesh("cpu", (RANKS,)), build_stage(stage)
    if stage == 0:
        # By default FSDP drops what it has gathered after each forward: split backward then loses
        # gradients.
        return fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def read_microbatch(iteration: int, pipeline: int, index: int) -> tuple[Tensor, Tensor]:
    """Return input and target of a micro-batch, the same on both ranks of a worker."""
    made = torch.Generator().manual_seed(10_000 * iteration + 100 * pipeline + index)
    value = torch.randn(2, SAMPLES, WIDTH, generator=made, dtype=torch.float64)
    return value[0], value[1]


def train_alone() -> list[float]:
    """Train in one process; return losses and gradient norms, alternately, by iteration."""
    model, said = nn.Sequential(*map(build_stage, range(STAGES))), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        losses = []
        for pipeline in range(PIPELINES):
            for index in range(MICROBATCHES):
                value, target = read_microbatch(iteration, pipeline, index)
                losses.append(
                    nn.functional.mse_loss(model(value), target) / (PIPELINES * MICROBATCHES)
                )
                losses[-1].backward()
        norm = (
            torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()
        )
        said += [sum(loss.item() for loss in losses), norm]
        optimizer.step()
    return said


def train(table: str) -> list[float]:
    """Train as a rank of a worker; return losses and gradient norms, alternately."""
    place = Place.take(Routes.read(table), inner=RANKS)
    modules = {stage: cut_stage(stage) for stage in place.routes.stages_of(place.worker)}
    optimizer = torch.optim.AdamW(
        [parameter for module in modules.values() for parameter in module.parameters()], lr=0.01
    )
    schedule, norm, said = None, 0.0, [0.0] * (2 * ITERATIONS)
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
            norm = schedule.grad_norm()
            place.commit(sum(loss.item() for loss in losses_here) / place.routes.microbatches)
        except CommunicationError as error:
            schedule = None
            owes_step = place.recover()
            if os.environ["RANK"] == "0":
                print(
                    f"iteration {iteration}: {error}; {len(place.routes.workers)} workers go on",
                    flush=True,
                )
            if not owes_step:
                continue
        optimizer.step()
        said[2 * iteration : 2 * iteration + 2] = [place.last_sum, norm]
    place.close()
    return said


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
                            str(ranks),
                            __file__,
                            folder / "table",
                        ],
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                    )
                )
                for rank, ranks in enumerate((6, 2))
            ]
            # Torchrun waits for the dead one.
            started.callback(lambda: [machine.terminate() for machine in machines])
            for line in machines[0].stdout or ():
                print(line, end="", flush=True)
                if DONE in line:
                    return
        raise SystemExit((folder / "errors").read_text())


if __name__ == "__main__":
    if "RANK" not in os.environ:
        rehearse()
    else:
        torch.set_num_threads(1)
        numbers, alone = train(sys.argv[1]), train_alone()
        if os.environ["RANK"] == "0":
            print(
                *(f"{loss:.12f} {other:.12f}" for loss, other in zip(alone, numbers, strict=True)),
                sep="\n",
            )
            assert (
                max(abs(loss - other) for loss, other in zip(alone, numbers, strict=True))
                < TOLERANCE
            )
            print(f"{DONE} {TOLERANCE:g}", flush=True)
