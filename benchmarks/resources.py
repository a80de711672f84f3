"""Descriptors and threads of workers that live through many recoveries: what an order opens is closed when it ends.

    python -m benchmarks.resources [--recoveries 100] [--seed 1]

Trains layers that sleep for 2 ms in an op, in 3 pipelines of 2 stages. The workers of one pipeline live; the others are
killed again and again, by SIGKILL at any moment, and come back. At every commit, the open descriptors and the threads
of the living are counted. A worker holds more for a moment, while orders change, so that minima are compared: those of
each fifth of the recoveries. Exit status 1 when the last fifth's is higher than the first's.
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
from runtime.launch import Resilience, run
from runtime.processes.fork_server import ForkServer
from runtime.processes.process_manager import Return
from runtime.protocol.failure_injection import Injection, Place
from schedules.schedule import Schedule, Worker

OP_SECONDS = 0.002
GAP = 8
"""Iterations from one kill to the next."""
AWAY = 2
"""Iterations after which a worker is started again."""
PLACES: tuple[Place, ...] = (0, 2, 4, "A", "O", "stepped", "ordered", "met")
STABLE = (Worker(0, 0), Worker(0, 1))
PARTS = 5


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
        mine, total = self.counts[worker], self.recoveries
        return [min(one[what] for one in mine if part * total <= PARTS * one[0] <= (part + 1) * total)
                for part in range(PARTS)]


def kills(count: int, seed: int, fork_server: ForkServer, out: Path) -> Samples:
    """One run with so many kills."""
    job, rng = uniform_job(3, 2, 2, op=1, optimizer=0, transfer=0), random.Random(seed)
    victims = [Worker(pipeline, column) for pipeline in (1, 2) for column in (0, 1)]
    killed = [(rng.choice(victims), GAP * (number + 1)) for number in range(count)]
    config = parse_run_config({**MODEL, "blocks": 2}, {**TRAINING, "iterations": GAP * (count + 2)})
    samples = Samples(fork_server)

    def schedule(down: tuple[Worker, ...]) -> Schedule:
        return plan_job(job, down, method="greedy").schedule

    run(schedule(()), config, out=out, fork_server=fork_server, progress=samples.progress, notify=samples.notify,
        resilience=Resilience(
            scheduler=schedule, injections=tuple(Injection(worker, at, rng.choice(PLACES)) for worker, at in killed),
            returns=tuple(Return(worker, at + AWAY) for worker, at in killed)))
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
        for number, what in enumerate(("descriptors", "threads"), start=1):
            minima = samples.minima(worker, number)
            rose |= minima[-1] > minima[0]
            print(f"worker {worker}: {what} {' '.join(map(str, minima))}")
    sys.exit(rose)


if __name__ == "__main__":
    main()
