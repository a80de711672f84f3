"""Descriptors and threads of workers that live through many recoveries: what an order opens is closed when it ends.

    python -m benchmarks.resources [--recoveries 100] [--seed 1]

Trains layers that sleep for 2 ms in an op, in 3 pipelines of 2 stages, with clipping. The workers of one pipeline live,
or lose their connections; the others are killed again and again, and come back. At every commit, the open descriptors
and the threads of the living are counted. A worker holds more for a moment, while orders change, so that minima are
compared: those of each fifth of the recoveries. Exit status 1 when the last fifth's is higher than the first's by more
than one process group, which a worker has or has not, by who lives when it is counted.
"""

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.jobs import uniform_job
from benchmarks.sleeping import MODEL, TRAINING, sleeping
from planner.plan import plan_job
from runtime.config import parse_run_config
from runtime.coordinator.recovery import Recovery
from runtime.launch import Resilience, RunOptions, run
from runtime.processes.fork_server import ForkServer
from runtime.processes.process_manager import Return
from runtime.protocol.failure_injection import Injection, Place
from schedules.schedule import Schedule, Worker

OP_SECONDS = 0.002
WIDTH = 256
"""Activations of 256 KiB: more than a socket takes at once, so that some are cut off in the middle."""
GAP = 5
"""Iterations from one kill to the next."""
AWAY = 1
"""Iterations after which a worker is started again."""
PLACES: tuple[Place, ...] = (0, 2, 4, "A", "O", "stepped", "ordered", "met")
CUTS = 0.2
"""Share of the failures that are broken connections of a worker that lives."""
STABLE = (Worker(0, 0), Worker(0, 1))
PARTS = 5
A_GROUP = {"descriptors": 8, "threads": 3}
"""What a process group of six workers holds: a connection to each other one, and three of its own."""


@dataclass(slots=True)
class Samples:
    """Descriptors and threads of the workers that live, by the recoveries before."""

    fork_server: ForkServer
    recoveries: int = 0
    counts: dict[Worker, list[tuple[int, int, int]]] = field(default_factory=lambda: {one: [] for one in STABLE})

    def notify(self, news: Recovery | str) -> None:
        """Something has changed."""
        self.recoveries += isinstance(news, Recovery)

    def progress(self, *_: object) -> None:
        """An iteration was committed."""
        for worker in STABLE:
            process = Path(f"/proc/{self.fork_server.pids[str(worker)]}")
            counted = [len(list((process / what).iterdir())) for what in ("fd", "task")]
            self.counts[worker].append((self.recoveries, *counted))

    def minima(self, worker: Worker, what: int) -> list[int]:
        """Of each part of the recoveries, the first commits apart, when layers are still being built."""
        mine = self.counts[worker]
        return [min(one[what] for one in mine
                    if part * self.recoveries <= PARTS * one[0] <= (part + 1) * self.recoveries)
                for part in range(PARTS)]


def kills(count: int, seed: int, fork_server: ForkServer, out: Path) -> Samples:
    """One run with so many kills."""
    job, rng = uniform_job(3, 2, 2, op=1, optimizer=0, transfer=0), random.Random(seed)
    victims = [Worker(pipeline, column) for pipeline in (1, 2) for column in (0, 1)]
    killed = [(rng.choice(STABLE if rng.random() < CUTS else victims), GAP * (number + 1)) for number in range(count)]
    config = parse_run_config({**MODEL, "blocks": 2, "width": WIDTH, "context": 256},
                              {**TRAINING, "iterations": GAP * (count + 2), "clip_norm": 1e-3})
    samples = Samples(fork_server)

    def schedule(down: tuple[Worker, ...]) -> Schedule:
        return plan_job(job, down, method="greedy").schedule

    run(schedule(()), config, out=out, fork_server=fork_server, progress=samples.progress,
        options=RunOptions(notify=samples.notify),
        resilience=Resilience(
            scheduler=schedule, injections=tuple(
                Injection(worker, at, rng.choice(PLACES), "cut" if worker in STABLE else "kill")
                for worker, at in killed),
            returns=tuple(Return(worker, at + AWAY) for worker, at in killed if worker not in STABLE)))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recoveries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rose = False
    with tempfile.TemporaryDirectory() as folder, sleeping(OP_SECONDS, OP_SECONDS, OP_SECONDS, 0.0), \
            ForkServer() as fork_server:
        samples = kills(options.recoveries, options.seed, fork_server, Path(folder))
    print(f"{samples.recoveries} recoveries; minima of each fifth of them")
    for worker in STABLE:
        for number, (what, slack) in enumerate(A_GROUP.items(), start=1):
            minima = samples.minima(worker, number)
            rose |= minima[-1] > minima[0] + slack
            print(f"worker {worker}: {what} {' '.join(map(str, minima))}")
    sys.exit(rose)


if __name__ == "__main__":
    main()
