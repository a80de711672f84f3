"""How long training stands still when a worker is killed: from SIGKILL to the first op that is run again.

    python -m benchmarks.recovery [--kills 20] [--grid 3x2] [--heartbeat-timeout 0.5]

Trains a small GPT in float32; each time, a worker is killed before some op or between the steps, and comes back. Prints
the median and the worst. Exit status 1 when the median is above 1 s.
"""

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

from planner.job.file import Job, parse_job
from planner.plan import plan_job
from runtime.config import parse_run_config
from runtime.coordinator.recovery import Recovery
from runtime.launch import Resilience, run
from runtime.processes.fork_server import ForkServer
from runtime.processes.process_manager import Return
from runtime.protocol.failure_injection import Injection, Place
from schedules.schedule import Schedule, Worker

LIMIT_SECONDS = 1.0
PLACES: tuple[Place, ...] = (0, 2, 4, "A", "O", "stepped")
GAP = 40
"""Iterations between two kills: enough to come back."""
A_RUN = 5
"""Kills in one run."""


def recoveries(job: Job, rng: random.Random, fork_server: ForkServer,
               heartbeat_timeout_seconds: float) -> list[Recovery]:
    """Those of one run, of the deaths alone."""
    workers = [Worker(pipeline, column) for pipeline in range(job.pipelines) for column in range(job.stages)]
    killed = [(rng.choice(workers), GAP * (number + 1)) for number in range(A_RUN)]
    config = parse_run_config({"blocks": 2, "width": 16, "heads": 2, "context": 16},
                              {"batch": 1, "device": "cpu", "iterations": GAP * (A_RUN + 1)})

    def schedule(down: tuple[Worker, ...]) -> Schedule:
        return plan_job(job, down, method="greedy").schedule

    with tempfile.TemporaryDirectory() as folder:
        result = run(schedule(()), config, out=Path(folder), fork_server=fork_server, resilience=Resilience(
            scheduler=schedule, heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            injections=tuple(Injection(worker, at, rng.choice(PLACES)) for worker, at in killed),
            returns=tuple(Return(worker, at + 1) for worker, at in killed)))
    return [one for one in result.recoveries if one.dead]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--grid", default="3x2", help="pipelines x stages")
    parser.add_argument("--heartbeat-timeout", type=float, default=0.5)
    options = parser.parse_args()
    pipelines, stages = map(int, options.grid.split("x"))
    job = parse_job(f"pipelines = {pipelines}\nstages = {stages}\nmicrobatches = 2\n[time]\nforward = 1\n"
                    "backward_input = 1\nbackward_weight = 1\noptimizer = 1\n")
    rng, seconds = random.Random(1), list[float]()
    with ForkServer() as fork_server:
        while len(seconds) < options.kills:
            seconds += [one.seconds for one in recoveries(job, rng, fork_server, options.heartbeat_timeout)]
    median = statistics.median(seconds)
    print(f"{len(seconds)} kills: from SIGKILL to the first op that is run again, median {median * 1e3:.0f} ms, "
          f"worst {max(seconds) * 1e3:.0f} ms")
    sys.exit(median > LIMIT_SECONDS)


if __name__ == "__main__":
    main()
