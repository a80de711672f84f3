"""Measure the cost of checkpoints if the run itself chooses how often to save.

    python -m benchmarks.checkpoints [--width 256] [--seconds 120] [--least 1]

Trains a small GPT on 2 pipelines of 2 stages, as `slipstream train` does by default, but with at
least `--least` seconds between checkpoints instead of a minute, so that many fit into two minutes.
Prints the cost of each checkpoint as the run measures it, from the first copy of a layer until the
last one is on disk; the share of all checkpoints in the time, over complete pauses (the pause after
the last one has only begun); and how much longer iterations took in which one was written. Exit
status 1 when the share is above 1 %.
"""

import argparse
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.jobs import uniform_job
from slipstream.planner.plan import plan_job
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.coordinator.decisions import commit_log
from slipstream.runtime.launch import Resilience, RunResult, run
from slipstream.runtime.processes.fork_server import ForkServer

WARM_UP = 5
LIMIT = 0.01


def train(
    width: int, iterations: int, fork_server: ForkServer, every: int | None
) -> tuple[RunResult, list[float]]:
    """Return a run and the times at which its iterations were committed."""
    job = uniform_job(2, 2, 2, op=1, optimizer=1, transfer=0)
    config = parse_run_config(
        {"blocks": 4, "width": width, "heads": 4, "context": 32},
        {"batch": 1, "device": "cpu", "iterations": iterations},
    )
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        result = run(
            plan_job(job, method="greedy").schedule,
            config,
            out=Path(folder),
            fork_server=fork_server,
            progress=lambda *_: times.append(time.monotonic()),
            resilience=Resilience(checkpoint_every=every),
        )
    return result, times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--least", type=float, default=1.0)
    options = parser.parse_args()
    commit_log.MIN_INTERVAL_SECONDS = options.least
    with ForkServer() as fork_server:
        _, times = train(options.width, 4 * WARM_UP, fork_server, 0)
        period = statistics.median(after - before for before, after in pairwise(times[WARM_UP:]))
        result, times = train(
            options.width, max(20, int(options.seconds / period)), fork_server, None
        )
    costs = result.checkpoints
    if len(costs) < 2:
        sys.exit(f"{len(costs)} checkpoints in {times[-1] - times[0]:.0f} s: give more --seconds")
    gaps = [after - before for before, after in pairwise(times)]  # of iteration i + 1
    median = statistics.median(gaps[WARM_UP:])
    longer = 0.0
    for cost in costs[:-1]:
        touched, seconds_left = 0, cost.seconds
        while seconds_left > 0 and cost.iteration - 1 + touched < len(gaps):
            seconds_left -= gaps[cost.iteration - 1 + touched]
            longer += gaps[cost.iteration - 1 + touched] - median
            touched += 1
    whole = times[costs[-1].iteration - 1] - times[costs[0].iteration - 1]
    share = sum(cost.seconds for cost in costs[:-1]) / whole
    seconds = [cost.seconds for cost in costs]
    print(
        f"{len(costs)} checkpoints in {len(times)} iterations of {median * 1e3:.0f} ms; each cost "
        f"{min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f} ms"
    )
    print(
        f"share of the time, as the run measures it: {share:.2%}; iterations in which one was "
        f"written took longer than the median by {longer / whole:.2%} of the time"
    )
    sys.exit(share > LIMIT)


if __name__ == "__main__":
    main()
