"""Train with torchtitan's own Trainer, which goes on when a worker is killed.

    python examples/torchtitan_rerouted.py

rehearses it on CPUs: it plans a table of schedules, and trains torchtitan's llama3 debug model
twice under torchrun, on a "machine" of three workers and another of one, which is killed the second
time, in step 3. Losses are the same. With machines, a model and data of your own, write a function
like `llama3` in torchtitan_config.py, and start as many processes as workers, or more with tensor
parallelism or shards:

    torchrun --nnodes 4 --nproc-per-node 1 ... -m torchtitan.train \\
        --module torchtitan_config --config llama3
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

JOB = """
pipelines = 2
stages = 2
microbatches = 4
[time]
forward = 1
backward_input = 1
backward_weight = 1
optimizer = 2
"""
KILLED_RANK = 3
TOLERANCE = 1e-4


def train_on_cpus() -> None:
    """Run torchtitan's program, which takes CUDA for granted, without a GPU."""
    torch.set_num_threads(1)
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
    from torchtitan import train
    from torchtitan.distributed import utils

    cpu: Any = torch.cpu
    cpu.get_device_properties = lambda _=None: SimpleNamespace(total_memory=2**34, name="CPU")
    cpu.get_device_name, cpu.memory_stats, cpu.current_device = (
        lambda _=None: "CPU",
        lambda _=None: {},
        lambda: 0,
    )
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda _=None: None
    utils.set_pg_timeouts = lambda **_: None
    train.main()


def run(folder: Path, killed: str) -> list[float]:
    """Train on two machines, and kill rank `killed` ("": none); return the losses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
    ]
    program = [
        __file__,
        "--module",
        "torchtitan_config",
        "--config",
        "llama3",
        "--dump_folder",
        folder,
    ]
    losses: dict[str, float] = {}
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
                        *program,
                    ],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=os.environ | {"TABLE": str(folder / "table"), "KILLED": killed},
                )
            )
            for rank, workers in enumerate((3, 1))
        ]
        # Torchrun waits for the dead one.
        started.callback(lambda: [machine.terminate() for machine in machines])
        for line in machines[0].stdout or ():
            if found := re.search(r"(step: +\d+) +loss: +([\d.]+)", line):
                losses[found[1]] = float(found[2])
            if "workers go on" in line:
                print(line, end="", flush=True)
            if "Training completed" in line:
                return [*losses.values()]
    raise SystemExit((folder / "errors").read_text())


def rehearse() -> None:
    """Plan, train without a failure and with one, and compare."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
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
            timeout=300,
        )
        whole, killed = run(folder, ""), run(folder, str(KILLED_RANK))
    print(*(f"{loss:.5f} {other:.5f}" for loss, other in zip(whole, killed, strict=True)), sep="\n")
    assert max(abs(loss - other) for loss, other in zip(whole, killed, strict=True)) < TOLERANCE
    print(f"equal to {TOLERANCE:g}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train_on_cpus()
    else:
        rehearse()
