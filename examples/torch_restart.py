"""A loop that torchrun starts again with fewer nodes, from a checkpoint.

`python examples/torch_restart.py` rehearses it here: of four agents of torchrun, one for each
worker, one is killed, and the others start anew, with the plan for three. With real machines, use

    slipstream table job.toml --max-failures 1 --exact --optimizer synchronous --out table
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # a new store each time: the old one may be dead
    SLIPSTREAM_WORKER=0.1 torchrun --nnodes 3:4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        --max-restarts 99 examples/torch_restart.py table checkpoints

on each. Nodes name their workers: torchrun may give them other ranks at the next start. All see the
folder of checkpoints. Losses equal one process's. `torch_loop.py` goes on without a new start.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from itertools import product, starmap
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from slipstream.runtime.torch_pipelining import Place, ReroutedSchedule, ReroutedStage, Routes
from slipstream.schedules.files import write_atomically

JOB = """pipelines = 2\nstages = 2\nmicrobatches = 3
time = {forward = 1, backward_input = 1, backward_weight = 1, optimizer = 2}"""
STAGES = 2
PIPELINES = 2
MICROBATCHES = 3
WIDTH = 16
SAMPLES = 2
WORKERS = [f"{pipeline}.{stage}" for pipeline, stage in product(range(PIPELINES), range(STAGES))]
ITERATIONS = 6
KILLED_IN = 3
"""Iteration in which a worker is killed."""
TOLERANCE = 1e-12
DONE = "equal to"
TABLE = "table job.toml --max-failures 1 --exact --optimizer synchronous --method greedy --steps 50"
TORCHRUN = "--nnodes 3:4 --max-restarts 99 --rdzv-backend c10d --local-addr 127.0.0.1"
LIMITS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"  # s, s, times
MSE = nn.functional.mse_loss


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
    model, losses = nn.Sequential(*map(build_stage, range(STAGES))), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for iteration in range(ITERATIONS):
        samples = product(range(PIPELINES), range(MICROBATCHES))
        data = starmap(partial(read_microbatch, iteration), samples)
        loss = torch.stack([MSE(model(value), target) for value, target in data]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def meet(worker: str, folder: Path) -> tuple[set[str], int]:
    """Return the workers that torchrun has started, and the last iteration that is saved whole."""
    saved = Counter(int(path.stem.split("-")[1]) for path in folder.glob("*.pt"))
    whole = (iteration for iteration, files in saved.items() if files == STAGES)
    distributed.init_process_group("gloo")
    state = torch.tensor([WORKERS.index(worker), max(whole, default=0)])
    states = [torch.empty_like(state) for _ in range(distributed.get_world_size())]
    distributed.all_gather(states, state)
    live = {WORKERS[int(number)] for number, _ in states}
    return live, min(int(last) for _, last in states)


def train(table: str, folder: Path) -> list[float]:
    """Train as one worker; return the mean loss of each iteration."""
    worker = os.environ["SLIPSTREAM_WORKER"]
    live, first = meet(worker, folder)
    if first == 0 and len(live) < len(WORKERS):
        raise SystemExit("not all workers are here; expected all at the beginning: starting again")
    place = Place.take(Routes.read(table, set(WORKERS) - live))
    print(f"worker {worker} of {len(live)} begins with iteration {first}", flush=True)
    losses: list[float] = []
    modules = {stage: build_stage(stage) for stage in place.routes.stages_of(place.worker)}
    optimizers = {at: torch.optim.AdamW(modules[at].parameters(), lr=0.01) for at in modules}
    for stage in modules if first else ():
        weights, moments, losses = torch.load(folder / f"{stage}-{first}.pt", weights_only=True)
        modules[stage].load_state_dict(weights)
        optimizers[stage].load_state_dict(moments)
    schedule = ReroutedSchedule([ReroutedStage(modules[at], at, place) for at in modules], MSE)
    for iteration in range(first, ITERATIONS):
        if iteration == KILLED_IN and worker == WORKERS[-1]:
            os.kill(os.getppid(), signal.SIGKILL)  # the agent, as if the node were gone
            os.kill(os.getpid(), signal.SIGKILL)
        losses_here: list[Tensor] = []
        schedule.step_samples(partial(read_microbatch, iteration), losses_here)
        losses.append(
            place.commit(sum(loss.item() for loss in losses_here) / place.routes.microbatches)
        )
        for stage, optimizer in optimizers.items():
            optimizer.step()
            optimizer.zero_grad()
            if place.routes.holders(stage)[0] == place.worker:
                state = BytesIO()
                torch.save((modules[stage].state_dict(), optimizer.state_dict(), losses), state)
                write_atomically(folder / f"{stage}-{iteration + 1}.pt", state.getvalue())
    place.close()
    return losses


def rehearse() -> None:
    """Start an agent for each worker, kill the last, and wait for the comparison."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as holder, ExitStack() as started:
        # A free port, which no other process is given before torchrun listens on it.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        Path(name, "job.toml").write_text(JOB)
        subprocess.run(
            [sys.executable, "-m", "slipstream", *TABLE.split(), "--out", "table"],
            cwd=name,
            check=True,
            capture_output=True,
        )
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        errors = started.enter_context(Path(name, "errors").open("w"))
        agents = [
            started.enter_context(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                        *TORCHRUN.split(),
                        "--rdzv-endpoint",
                        f"127.0.0.1:{holder.getsockname()[1]}",
                        "--rdzv-conf",
                        f"is_host={worker == WORKERS[0]},{LIMITS}",
                        __file__,
                        f"{name}/table",
                        name,
                    ],
                    env=os.environ | {"SLIPSTREAM_WORKER": worker},
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            )
            for worker in WORKERS
        ]
        started.callback(lambda: [agent.terminate() for agent in agents])
        for line in agents[0].stdout or ():
            print(line, end="", flush=True)
            if DONE in line:
                return
        raise SystemExit(Path(name, "errors").read_text())


if __name__ == "__main__":
    if "RANK" not in os.environ:
        rehearse()
    else:
        losses, alone = train(sys.argv[1], Path(sys.argv[2])), train_alone()
        if os.environ["SLIPSTREAM_WORKER"] == WORKERS[0]:
            print("alone", *alone, "\nhere", *losses)
            assert (
                max(abs(loss - other) for loss, other in zip(alone, losses, strict=True))
                < TOLERANCE
            )
            print(f"{DONE} {TOLERANCE:g}", flush=True)
