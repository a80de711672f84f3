"""Workers of two ranks, with FSDP2 and tensor parallelism inside, in a loop that survives a death.

    python examples/torch_fsdp_tp.py

plans a table, and starts two "machines" with torchrun: one of three workers, and another of one, which
is killed in iteration 2. Two pipelines of two stages, eight ranks: stage 0 is sharded by FSDP2 over the
two ranks of its worker, stage 1 is cut by tensor parallelism. The modules stay as they are when a
worker dies: only connections between workers and the stages around the modules are made anew.
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

from slipstream.runtime.torch_pipelining import CommunicationError, Place, ReroutedSchedule, ReroutedStage, Routes

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
STAGES, PIPELINES, MICROBATCHES, WIDTH, SAMPLES, RANKS = 2, 2, 3, 16, 2, 2
ITERATIONS, KILLED_IN, KILLED_RANK = 5, 2, 6
TOLERANCE = 1e-12
DONE = "equal to"


def build_stage(stage: int) -> nn.Module:
    """Build a stage of the model, whole, the same whoever builds it."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)).double()


def cut_stage(stage: int) -> nn.Module:
    """Build a stage as the two ranks of a worker share it."""
    mesh, module = init_device_mesh("cpu", (RANKS,)), build_stage(stage)
    if stage == 0:
        # By default FSDP drops what it has gathered after each forward: split backward then loses gradients.
        return fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def read_microbatch(iteration: int, pipeline: int, index: int) -> tuple[Tensor, Tensor]:
    """Return input and target of a micro-batch, the same on both ranks of a worker."""
    made = torch.Generator().manual_seed(10_000 * iteration + 100 * pipeline + index)
    value = torch.randn(2, SAMPLES, WIDTH, generator=made, dtype=torch.float64)
    return value[0], value[1]


def train_alone() -> list[float]:
    """Train in one process; return loss and gradient norm of each iteration."""
    model, said = nn.Sequential(*map(build_stage, range(STAGES))), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        losses = []
        for pipeline in range(PIPELINES):
            for index in range(MICROBATCHES):
                value, target = read_microbatch(iteration, pipeline, index)
                losses.append(nn.functional.mse_loss(model(value), target) / (PIPELINES * MICROBATCHES))
                losses[-1].backward()
        norm = torch.cat([one.grad.flatten() for one in model.parameters()]).norm().item()
        said += [sum(loss.item() for loss in losses), norm]
        optimizer.step()
    return said


def train(table: str) -> list[float]:
    """Train as a rank of a worker; return loss and gradient norm of each iteration."""
    place = Place.take(Routes.read(table), inner=RANKS)
    modules = {stage: cut_stage(stage) for stage in place.routes.stages_of(place.worker)}
    optimizer = torch.optim.AdamW([one for module in modules.values() for one in module.parameters()], lr=0.01)
    schedule, norm, said = None, 0.0, [0.0] * (2 * ITERATIONS)
    while (iteration := place.committed) < ITERATIONS:
        optimizer.zero_grad()
        try:
            schedule = schedule or ReroutedSchedule(
                [ReroutedStage(module, stage, place) for stage, module in modules.items()], nn.functional.mse_loss)
            if iteration == KILLED_IN and os.environ["RANK"] == str(KILLED_RANK):
                os.kill(os.getpid(), signal.SIGKILL)
            own: list[Tensor] = []
            schedule.step_samples(partial(read_microbatch, iteration), own)
            norm = schedule.grad_norm()
            place.commit(sum(loss.item() for loss in own) / place.routes.microbatches)
        except CommunicationError as error:
            schedule = None
            owes_step = place.recover()
            if os.environ["RANK"] == "0":
                print(f"iteration {iteration}: {error}; {len(place.routes.workers)} workers go on", flush=True)
            if not owes_step:
                continue
        optimizer.step()
        said[2 * iteration:2 * iteration + 2] = [place.last_sum, norm]
    place.close()
    return said


def rehearse() -> None:
    """Start the loop on two machines, of which one is killed, and wait for what it says."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as free:
        folder, port = Path(name), free.getsockname()[1]
        free.close()
        (folder / "job.toml").write_text(JOB)
        subprocess.run([sys.executable, "-m", "slipstream", "table", folder / "job.toml", "--max-failures", "1",
                        "--exact", "--optimizer", "synchronous", "--method", "greedy", "--steps", "50",
                        "--out", folder / "table"], check=True, capture_output=True, timeout=120)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--master-addr", "127.0.0.1",
                    "--master-port", str(port)]
        with (folder / "errors").open("w") as errors, ExitStack() as started:
            machines = [started.enter_context(subprocess.Popen(
                [*torchrun, "--node-rank", str(rank), "--nproc-per-node", str(ranks), __file__, folder / "table"],
                stdout=subprocess.PIPE, stderr=errors, text=True)) for rank, ranks in enumerate((6, 2))]
            started.callback(lambda: [machine.terminate() for machine in machines])  # torchrun waits for the dead one
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
            print(*(f"{one:.12f} {other:.12f}" for one, other in zip(alone, numbers, strict=True)), sep="\n")
            assert max(abs(one - other) for one, other in zip(alone, numbers, strict=True)) < TOLERANCE
            print(f"{DONE} {TOLERANCE:g}", flush=True)
