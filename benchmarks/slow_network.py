"""Measure training on two nodes with a slow network between them.

    python -m benchmarks.slow_network [--latency 0 0.001 0.01 0.05] [--loss 0.01] [--layers 8]
                                      [--iterations 90]

The network has latency and loses packets. Trains layers that sleep for 10 ms in an op, in 3
pipelines of 2 stages on two nodes: one pipeline and the sums of gradients cross the network
(`benchmarks.packet_relay`). A worker is killed after one third of the iterations and restarted
after two thirds. For each one-way latency, without and with loss, prints the iteration, also as a
multiple of the first network's; pause and commit gap after the kill; and the commit gap and the
iterations that pass when the worker comes back.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from benchmarks.packet_relay import SIDES, address, slow_network
from benchmarks.sleeping import MODEL, TRAINING, sleeping
from slipstream.planner.job.toml import job_text
from slipstream.runtime.protocol.authentication import SECRET_VARIABLE, create_secret

OP_SECONDS = 0.01
STAGES = 2
VICTIM = "2.0"
TIMEOUT_SECONDS = 500


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one run, in seconds."""

    iteration: float
    pause: float
    gap: float
    join_gap: float
    join_iterations: int


def job(layers: int) -> str:
    """Return a job file with `layers` in each stage, of one parameter each."""
    return job_text(
        {
            "name": "slow",
            "pipelines": 3,
            "stages": STAGES,
            "microbatches": 2,
            "time": {
                "forward": OP_SECONDS,
                "backward_input": OP_SECONDS,
                "backward_weight": OP_SECONDS,
            },
            "model": {**MODEL, "blocks": layers * STAGES, "width": 64, "context": 16},
            "training": TRAINING,
        },
        {},
    )


def measure(latency: float, loss: float, layers: int, iterations: int) -> Measured:
    """Train over a network with this latency and loss.

    Raises OSError or SubprocessError if that fails.
    """
    kill, back = iterations // 3, 2 * iterations // 3
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "job.toml").write_text(job(layers))
        stack.enter_context(sleeping(*(OP_SECONDS / layers,) * 3, 0.0))
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            SECRET_VARIABLE: create_secret().hex(),
        }
        processes = []
        for side, before in enumerate(stack.enter_context(slow_network(latency, loss))):
            command = [
                *before,
                sys.executable,
                "-m",
                "slipstream",
                "train",
                str(folder / "job.toml"),
                "--json",
                "--method",
                "greedy",
                "--iterations",
                str(iterations),
                "--out",
                str(folder / f"out{side}"),
                "--nodes",
                str(SIDES),
                "--node",
                str(side),
                "--rendezvous",
                f"{address(0)}:29500",
            ]
            command += (
                [] if side else ["--kill", f"{VICTIM}@{kill}", "--return", f"{VICTIM}@{back}"]
            )
            log = stack.enter_context((folder / f"log{side}").open("wb"))
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE if side == 0 else subprocess.DEVNULL,
                stderr=log,
                env=environment,
                cwd=folder,
            )
            stack.callback(process.kill)
            processes.append(process)
        answer, _ = processes[0].communicate(timeout=TIMEOUT_SECONDS)
        if processes[0].returncode:
            raise OSError((folder / "log0").read_text())
    result = json.loads(answer)
    death, *returns = result["recoveries"]
    joined = next((recovery for recovery in returns if recovery["returned"]), None)
    if joined is None:
        raise OSError(f"worker {VICTIM} was not back before the end: give more --iterations")
    return Measured(
        result["measured_period"],
        death["seconds"],
        death["commit_gap_seconds"],
        joined["commit_gap_seconds"],
        joined["iteration"] - back,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--latency",
        type=float,
        nargs="+",
        default=[0.0, 0.001, 0.01, 0.05],
        help="seconds, one way",
    )
    parser.add_argument(
        "--loss", type=float, nargs="+", default=[0.0, 0.01], help="share of packets"
    )
    parser.add_argument(
        "--layers", type=int, default=8, help="of each stage: as many tensors are summed"
    )
    parser.add_argument("--iterations", type=int, default=90)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    first = None
    for latency in options.latency:
        for loss in options.loss:
            runs = [
                measure(latency, loss, options.layers, options.iterations)
                for _ in range(options.repeats)
            ]
            values = (map(attrgetter(name), runs) for name in Measured.__slots__)
            iteration, pause, gap, join_gap, passed = map(statistics.median, values)
            first = first or iteration
            print(
                f"{latency * 1e3:.0f} ms, {loss:.0%}: iteration {iteration * 1e3:5.0f} ms, "
                f"{iteration / first:.2f}, pause {pause * 1e3:5.0f} ms, commit gap "
                f"{gap * 1e3:5.0f} ms; coming back: commit gap {join_gap * 1e3:5.0f} ms, after "
                f"{passed:.0f} iterations",
                flush=True,
            )


if __name__ == "__main__":
    main()
