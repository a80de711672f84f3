"""Compare reductions that overlap with compute with the plan, and with torch's DDP.

    python -m benchmarks.overlap [--layers 8] [--microbatches 4] [--milliseconds 20]
                                 [--bandwidth 8e6] [--iterations 10]

Layers sleep the given milliseconds in each of F, I and W. Each worker has a network namespace of
its own, whose link a relay (`benchmarks.packet_relay`) slows to `--bandwidth` bytes per second;
reducing one layer's gradients takes as long as 2.5 of its ops, unless `--width` says otherwise.
Plans are made from these numbers, with `[network] overlap`.

The first case is 2 pipelines of 1 stage, and the same model in torch's DistributedDataParallel,
over gloo and the same link. The bucket setting of DDP that hides most counts (one layer each, two,
or the default). "Hidden" is the share of the reductions that does not lengthen an iteration: 1 -
(iteration - computing) / reductions, where computing is what torch's loop takes without reductions,
and reductions what they take alone. The second case is 2 pipelines of 2 stages. An iteration is the
median time from one commit to the next, or, in torch, from one step to the next. Exit status 1 when
an iteration is more than 5 % longer than planned, or less is hidden than torch hides.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.packet_relay import address, slow_network
from benchmarks.sleeping import MODEL, TRAINING, Sleepers, sleeping
from slipstream.planner.job.toml import job_text
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.protocol.authentication import SECRET_VARIABLE, create_secret

LIMIT = 1.05
LATENCY_SECONDS = 0.001
PIPELINES = 2
STAGES = (1, 2)
WARM_UP = 3
"""Number of iterations that do not count."""
OPS = 2.5
"""Number of a layer's ops that take as long as its reduction, without a width."""
TIMEOUT_SECONDS = 400


class Torch(NamedTuple):
    """Measurements of torch, in seconds."""

    computing: float
    """Seconds of an iteration without reductions."""
    reductions: float
    """Seconds of all reductions alone."""
    iterations: dict[str, float]
    """Seconds of an iteration with reductions, by bucket setting."""


class Ours(NamedTuple):
    """Planned and measured seconds of an iteration."""

    planned: float
    measured: float


def width_of(options: argparse.Namespace) -> int:
    """Return the width of the layers."""
    wanted: float = OPS * options.milliseconds / 1e3 * options.bandwidth / torch.float32.itemsize
    return int(options.width or wanted**0.5)


def job(stages: int, options: argparse.Namespace) -> str:
    """Return a job file. The first layer has no I, and does all of its backward in W."""
    each = options.layers // stages
    size = width_of(options) ** 2 * torch.float32.itemsize
    op = options.milliseconds / 1e3
    # The first layer sends no gradient back: all of its backward is W.
    inputs = [(each - 1) * op] + [each * op] * (stages - 1)
    weights = [(each + 1) * op] + [each * op] * (stages - 1)
    ones = [1] * (options.layers - 1)
    return job_text(
        {
            "name": "overlap",
            "pipelines": PIPELINES,
            "stages": stages,
            "microbatches": options.microbatches,
            "time": {
                "forward": each * op,
                "backward_input": inputs,
                "backward_weight": weights,
            },
            "placement": {"layers": [each] * stages},
            "layers": {
                "backward_input": [0, *ones],
                "backward_weight": [2, *ones],
            },
            "network": {
                "overlap": True,
                "latency": LATENCY_SECONDS,
                "bandwidth": options.bandwidth,
                "gradients": [each * size] * stages,
                "activation": 4 * width_of(options) * 4,
            },
            "model": {**MODEL, "blocks": options.layers, "width": width_of(options)},
            "training": TRAINING,
        },
        {},
    )


@contextmanager
def network(
    sides: int, options: argparse.Namespace
) -> Iterator[tuple[list[list[str]], dict[str, str]]]:
    """Return the prefixes of commands, and their environment."""
    with (
        slow_network(LATENCY_SECONDS, 0.0, sides=sides, bandwidth=options.bandwidth) as before,
        sleeping(*(options.milliseconds / 1e3,) * 3, 0.0),
    ):
        yield (
            before,
            {
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[1]),
                "OMP_NUM_THREADS": "1",
                SECRET_VARIABLE: create_secret().hex(),
                "GLOO_SOCKET_IFNAME": "wire",
            },
        )


def answer_of_first(commands: list[list[str]], environment: dict[str, str], folder: Path) -> bytes:
    """Run all commands, and return the output of the first. Raises OSError and SubprocessError."""
    with ExitStack() as stack:
        processes = []
        for side, command in enumerate(commands):
            log = stack.enter_context((folder / f"log{side}").open("wb"))
            processes.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.DEVNULL if side else subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    cwd=folder,
                )
            )
            stack.callback(processes[-1].kill)
        answer, _ = processes[0].communicate(timeout=TIMEOUT_SECONDS)
        if processes[0].returncode:
            raise OSError((folder / "log0").read_text())
        for process in processes:
            process.wait(TIMEOUT_SECONDS)
    return answer


def ours(stages: int, options: argparse.Namespace) -> Ours:
    """Plan and train with Slipstream."""
    sides = PIPELINES * stages
    with tempfile.TemporaryDirectory() as name, network(sides, options) as (before, environment):
        folder = Path(name)
        (folder / "job.toml").write_text(job(stages, options))
        answer = json.loads(
            answer_of_first(
                [
                    [
                        *before[side],
                        sys.executable,
                        "-m",
                        "slipstream",
                        "train",
                        str(folder / "job.toml"),
                        "--json",
                        "--time-limit",
                        "10",
                        "--iterations",
                        str(WARM_UP + options.iterations + 1),
                        "--out",
                        str(folder / f"out{side}"),
                        "--nodes",
                        str(sides),
                        "--node",
                        str(side),
                        "--rendezvous",
                        f"{address(0)}:29500",
                        "--checkpoint-every",
                        "0",
                    ]
                    for side in range(sides)
                ],
                environment,
                folder,
            )
        )
        lines = (folder / "out0" / "losses.jsonl").read_text().splitlines()
    ends = [json.loads(line)["time"] for line in lines][WARM_UP:]
    return Ours(
        answer["planned_period"],
        statistics.median(after - before for before, after in pairwise(ends)),
    )


def torchs(options: argparse.Namespace) -> Torch:
    """Measure DistributedDataParallel."""
    with (
        tempfile.TemporaryDirectory() as name,
        network(PIPELINES, options) as (before, environment),
    ):
        environment |= {"MASTER_ADDR": address(0), "MASTER_PORT": "29600"}
        words = [
            word
            for key in ("layers", "microbatches", "milliseconds", "bandwidth", "iterations")
            for word in (f"--{key}", str(getattr(options, key)))
        ]
        answer = json.loads(
            answer_of_first(
                [
                    [
                        *before[rank],
                        sys.executable,
                        "-m",
                        "benchmarks.overlap",
                        *words,
                        "--width",
                        str(width_of(options)),
                        "--rank",
                        str(rank),
                    ]
                    for rank in range(PIPELINES)
                ],
                environment,
                Path(name),
            )
        )
    return Torch(**answer)


def as_rank(options: argparse.Namespace) -> Torch:
    """Run one process of torch."""
    config = parse_run_config({**MODEL, "blocks": options.layers, "width": options.width}, TRAINING)
    model = Sleepers(config.model, 0, torch.float32, torch.device("cpu"))
    tokens = torch.zeros(1, config.model.context, dtype=torch.long)
    distributed.init_process_group("gloo", rank=options.rank, world_size=PIPELINES)

    def iterating(bucket_mb: float | None, *, reduces: bool = True) -> float:
        """Return the seconds of an iteration."""
        replica = DistributedDataParallel(
            nn.Sequential(*map(model.build, range(options.layers))), bucket_cap_mb=bucket_mb
        )  # type: ignore[arg-type]

        def iterate() -> None:
            for microbatch in range(options.microbatches):
                last = reduces and microbatch == options.microbatches - 1
                with nullcontext() if last else replica.no_sync():
                    model.loss(replica(tokens), tokens).backward()
            replica.zero_grad(set_to_none=False)

        return median(iterate, options)

    def reduce() -> None:
        for _ in range(options.layers):
            distributed.all_reduce(torch.zeros(options.width, options.width))

    one_layer = options.width**2 * torch.float32.itemsize / 2**20
    buckets = {"one layer": one_layer, "two layers": 2 * one_layer, "default": None}
    return Torch(
        iterating(None, reduces=False),
        median(reduce, options),
        {name: iterating(size) for name, size in buckets.items()},
    )


def median(run: Callable[[], None], options: argparse.Namespace) -> float:
    """Return the median seconds of an iteration, after a warm-up."""
    ends = []
    distributed.barrier()
    for _ in range(WARM_UP + options.iterations):
        run()
        ends.append(time.perf_counter())
    return statistics.median(after - before for before, after in pairwise(ends[WARM_UP - 1 :]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--milliseconds", type=float, default=20)
    parser.add_argument("--bandwidth", type=float, default=8e6)
    parser.add_argument("--width", type=int)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(as_rank(options)._asdict()))
        return
    theirs = torchs(options)
    print(
        f"computing {theirs.computing * 1e3:.0f} ms, reductions alone "
        f"{theirs.reductions * 1e3:.0f} ms; DistributedDataParallel by buckets: "
        + ", ".join(
            f"{name} {seconds * 1e3:.0f} ms" for name, seconds in theirs.iterations.items()
        ),
        flush=True,
    )
    found = []
    for stages in STAGES:
        found.append(row := ours(stages, options))
        print(
            f"{PIPELINES} x {stages}: planned {row.planned * 1e3:.0f} ms, measured "
            f"{row.measured * 1e3:.0f} ms, {row.measured / row.planned:.3f}",
            flush=True,
        )
    best = min(theirs.iterations, key=lambda name: theirs.iterations[name])
    hidden = {
        name: 1 - (seconds - theirs.computing) / theirs.reductions
        for name, seconds in (
            ("DistributedDataParallel", theirs.iterations[best]),
            ("here", found[0].measured),
        )
    }
    print("hidden: " + ", ".join(f"{name} {share:.1%}" for name, share in hidden.items()))
    late = max(row.measured / row.planned for row in found) > LIMIT
    sys.exit(late or hidden["here"] < hidden["DistributedDataParallel"])


if __name__ == "__main__":
    main()
