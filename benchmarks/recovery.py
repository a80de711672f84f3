"""Measure how long training pauses when a worker is killed.

    python -m benchmarks.recovery [--kills 20] [--grid 3x2] [--iteration 0.08]

Trains layers that sleep through their ops, so that two cores are enough for six workers and an
iteration takes as long as requested. Workers are killed repeatedly at random times, by SIGKILL from
outside, and come back. Prints the median and the worst of

    pause        from the kill until the last worker begins its first op again
    commit gap   from the last iteration that was committed before to the first one after: what was
                 lost of an iteration, the pause, and the iteration that is run again on the workers
                 that are left

Exit status 1 when the median pause is above 1 s, or the median commit gap above one iteration and
0.15 s.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.jobs import uniform_job
from benchmarks.sleeping import MODEL, TRAINING, sleeping
from slipstream.planner.job.file import Job
from slipstream.planner.plan import plan_job
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.process_manager import Return
from slipstream.schedules.schedule import Schedule, Worker

PAUSE_LIMIT_SECONDS = 1.0
GAP_LIMIT_SECONDS = 0.15
"""Maximum of the median commit gap beyond an iteration, in seconds."""
APART = 40
"""Number of iterations between two kills, enough for the worker to come back."""
A_RUN = 5
"""Number of kills in one run."""


@dataclass(slots=True)
class Killer:
    """Kill workers after certain iterations; record times of commits and recoveries."""

    fork_server: ForkServer
    kills: dict[int, tuple[Worker, float]]
    """Worker to kill by iteration, with the seconds after the commit of the iteration."""
    killed: list[float] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    """Times of the first ops after deaths."""
    commits: list[float] = field(default_factory=list)

    def progress(self, iteration: int, _: float) -> None:
        """Record that an iteration was committed, and time the kill that may follow."""
        self.commits.append(time.monotonic())
        if iteration in self.kills:
            worker, seconds = self.kills[iteration]
            timer = threading.Timer(seconds, self._kill, [str(worker)])
            timer.daemon = True
            timer.start()

    def notify(self, news: Recovery | str) -> None:
        """Record a recovery from a death."""
        if isinstance(news, Recovery) and news.dead:
            self.began.append(time.monotonic())

    def pauses(self) -> list[float]:
        """Return the times, in seconds, from each kill to the last worker's next op."""
        return [began - killed for killed, began in zip(self.killed, self.began, strict=True)]

    def gaps(self) -> list[tuple[float, float]]:
        """Return the times between commits around each pause, and their parts before the kill."""
        found = []
        for killed, began in zip(self.killed, self.began, strict=True):
            last, first = next(pair for pair in pairwise(self.commits) if pair[1] > began)
            found.append((first - last, max(0.0, killed - last)))
        return found

    def iteration_seconds(self) -> float:
        """Return the median duration of an iteration, in seconds."""
        return statistics.median(later - earlier for earlier, later in pairwise(self.commits))

    def _kill(self, name: str) -> None:
        with suppress(KeyError, ProcessLookupError):
            os.kill(self.fork_server.pids[name], signal.SIGKILL)
            self.killed.append(time.monotonic())


def kills(
    job: Job,
    rng: random.Random,
    fork_server: ForkServer,
    iteration_seconds: float,
    heartbeat_timeout_seconds: float,
) -> Killer:
    """Run a training in which workers are killed and come back."""
    workers = [
        Worker(pipeline, column)
        for pipeline in range(job.pipelines)
        for column in range(job.stages)
    ]
    killer = Killer(
        fork_server,
        {
            APART * (number + 1): (rng.choice(workers), rng.uniform(0, iteration_seconds))
            for number in range(A_RUN)
        },
    )
    config = parse_run_config(
        {**MODEL, "blocks": job.stages}, {**TRAINING, "iterations": APART * (A_RUN + 1)}
    )

    def schedule(down: tuple[Worker, ...]) -> Schedule:
        return plan_job(job, down, method="greedy").schedule

    with tempfile.TemporaryDirectory() as folder:
        run(
            schedule(()),
            config,
            out=Path(folder),
            fork_server=fork_server,
            progress=killer.progress,
            options=RunOptions(notify=killer.notify),
            resilience=Resilience(
                scheduler=schedule,
                heartbeat_timeout_seconds=heartbeat_timeout_seconds,
                returns=tuple(Return(worker, at + 2) for at, (worker, _) in killer.kills.items()),
            ),
        )
    return killer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--grid", default="3x2", help="pipelines x stages")
    parser.add_argument("--iteration", type=float, default=0.08, help="seconds")
    parser.add_argument("--heartbeat-timeout", type=float, default=5.0)
    options = parser.parse_args()
    pipelines, stages = map(int, options.grid.split("x"))
    job = uniform_job(pipelines, stages, 2, op=1, optimizer=0, transfer=0)
    op = options.iteration / plan_job(job, method="greedy").schedule.period_ticks
    rng, runs = random.Random(1), list[Killer]()
    with sleeping(op, op, op, 0.0), ForkServer() as fork_server:
        while sum(len(run.killed) for run in runs) < options.kills:
            runs.append(kills(job, rng, fork_server, options.iteration, options.heartbeat_timeout))
    pauses = [pause for run in runs for pause in run.pauses()]
    gaps, lost = zip(*(pair for run in runs for pair in run.gaps()), strict=True)
    iteration = statistics.median(run.iteration_seconds() for run in runs)
    median = statistics.median(gaps)
    print(
        f"{len(pauses)} kills, iterations of {iteration * 1e3:.0f} ms; pause, from SIGKILL until "
        f"the last worker begins again: median {statistics.median(pauses) * 1e3:.0f} ms, worst "
        f"{max(pauses) * 1e3:.0f} ms\n"
        f"commit gap: median {median * 1e3:.0f} ms, worst {max(gaps) * 1e3:.0f} ms; before the "
        f"kill of it: median {statistics.median(lost) * 1e3:.0f} ms"
    )
    sys.exit(
        statistics.median(pauses) > PAUSE_LIMIT_SECONDS or median > iteration + GAP_LIMIT_SECONDS
    )


if __name__ == "__main__":
    main()
