"""How long training stands still when a worker comes back whose layers take longer to move than an iteration lasts.

    python -m benchmarks.joining [--width 1536] [--megabytes-per-second 15] [--returns 5]

Trains layers that sleep through their ops (so that two cores are enough for six workers) and are as large as real ones,
by AdamW, in 3 pipelines of 2 stages. Again and again a worker is killed and comes back, and is sent its layers no
faster than it is told. Prints the longest time between two commits from when the worker is started until it has trained
5 iterations; the median iteration without it; and the switch: from when all have stopped until the first op. Exit
status 1 when the median of the longest is above 1.5 iterations and the switch: an iteration that begins with empty
pipelines is longer than the others.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.jobs import uniform_job
from benchmarks.sleeping import MODEL, TRAINING, sleeping
from planner.plan import plan_job
from runtime.config import parse_run_config
from runtime.coordinator.recovery import Recovery
from runtime.launch import Resilience, RunOptions, run
from runtime.processes.fork_server import ForkServer
from runtime.processes.process_manager import Return
from runtime.protocol.failure_injection import Injection
from schedules.schedule import Schedule, Worker

OP_SECONDS = 0.03
GAP = 40
"""Iterations between two deaths."""
SETTLED = 5
"""Iterations after which the one who came back is like the others."""
SLACK = 1.5
WORKER = Worker(1, 0)
STAGES = 2
LAYERS_A_STAGE = 2


@dataclass(slots=True)
class Clock:
    """When iterations were committed, and what changed."""

    commits: list[float] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)

    def progress(self, *_: object) -> None:
        """An iteration was committed."""
        self.commits.append(time.monotonic())

    def notify(self, news: Recovery | str) -> None:
        """Something has changed."""
        if isinstance(news, Recovery):
            self.recoveries.append(news)

    def gap(self, start: int, end: int) -> float:
        """The longest from one commit to the next, of the iterations in a range."""
        return max(later - earlier for earlier, later in pairwise(self.commits[start:end]))


def returns(count: int, width: int, bytes_per_second: float, fork_server: ForkServer, out: Path) -> Clock:
    """A worker dies and comes back so many times."""
    job = uniform_job(3, STAGES, 2, op=1, optimizer=0, transfer=0)
    config = parse_run_config({**MODEL, "width": width, "blocks": STAGES * LAYERS_A_STAGE},
                              {**TRAINING, "optimizer": "adamw", "iterations": GAP * (count + 1)})
    clock, deaths = Clock(), [GAP * number for number in range(1, count + 1)]

    def schedule(down: tuple[Worker, ...]) -> Schedule:
        return plan_job(job, down, method="greedy").schedule

    run(schedule(()), config, out=out, fork_server=fork_server, progress=clock.progress,
        options=RunOptions(notify=clock.notify),
        resilience=Resilience(
        scheduler=schedule, fetch_bytes_per_second=bytes_per_second,
        injections=tuple(Injection(WORKER, death) for death in deaths),
        returns=tuple(Return(WORKER, death + 2) for death in deaths)))
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1536, help="of a layer; its matrix is as high as wide")
    parser.add_argument("--megabytes-per-second", type=float, default=15.0, help="from each of the two others at most")
    parser.add_argument("--returns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sleeping(*(OP_SECONDS / LAYERS_A_STAGE,) * 3, 0.0), \
            ForkServer() as fork_server:
        clock = returns(options.returns, options.width, options.megabytes_per_second * 1e6, fork_server, Path(folder))
    back = [one for one in clock.recoveries if one.returned]
    state_bytes = LAYERS_A_STAGE * options.width**2 * 4 * 3
    # From the third iteration after the death on: the worker is started in the second.
    median = statistics.median(later - earlier for one in back for earlier, later in pairwise(
        clock.commits[GAP * (one.iteration // GAP) + 2:one.iteration]))
    gaps = [clock.gap(GAP * (one.iteration // GAP) + 2, one.iteration + SETTLED) for one in back]
    switch = statistics.median(one.seconds for one in back)
    print(f"{len(back)} returns with {state_bytes / 1e6:.0f} MB each, "
          f"{state_bytes / 2e6 / options.megabytes_per_second:.1f} s to move; iterations committed meanwhile: "
          f"{', '.join(str(one.meanwhile) for one in back)}\n"
          f"median iteration without it {median * 1e3:.0f} ms, switch {switch * 1e3:.0f} ms; longest from one commit "
          f"to the next: median {statistics.median(gaps) * 1e3:.0f} ms, worst {max(gaps) * 1e3:.0f} ms "
          f"({max(gaps) / median:.2f} iterations)")
    sys.exit(statistics.median(gaps) > SLACK * median + switch)


if __name__ == "__main__":
    main()
