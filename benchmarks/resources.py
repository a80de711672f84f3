"""Descriptors, threads and memory over many recoveries: what an order opens is closed when it ends, and what it holds
is given back.

    python -m benchmarks.resources [--recoveries 100] [--gap 10] [--seed 1]

Trains layers that sleep for 2 ms in an op, in 3 pipelines of 2 stages, with clipping. The workers of one pipeline live,
or lose their connections; the others are killed again and again, every `gap` iterations, and come back. At every
commit, the open descriptors and the threads of the living are counted; at every fifth, their memory, and that of the
coordinator, which is this process. Memory is counted twice: all that is no part of a file, and what no other process
shares. The fork server's pages are the workers', too, until they are written to, which makes them private, and the
memory no larger. A worker holds more for a moment, while orders change, so that minima are compared: those of each
fifth of the recoveries. Exit status 1 when the last fifth's is higher than the first's by more than one process group,
which a worker has or has not, by who lives when it is counted; when memory is more than 2 % and 1 MiB above the
second's: in the first, what is made when first used is made; or when private memory is so much above the third's.
"""

import argparse
import os
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.jobs import uniform_job
from benchmarks.sleeping import MODEL, TRAINING, sleeping
from slipstream.planner.plan import plan_job
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.coordinator.decisions.recovery_clock import Recovery
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.protocol.failure_injection import Injection, Place
from slipstream.schedules.schedule import Schedule, Worker

OP_SECONDS = 0.002
WIDTH = 256
"""Activations of 256 KiB: more than a socket takes at once, so that some are cut off in the middle."""
AWAY = 1
"""Iterations after which a worker is started again."""
PLACES: tuple[Place, ...] = (0, 2, 4, "A", "O", "stepped", "ordered", "met")
CUTS = 0.2
"""Share of the failures that are broken connections of a worker that lives."""
STABLE = (Worker(0, 0), Worker(0, 1))
PARTS = 5
MEMORY_EVERY = 5
"""Commits: reading it takes milliseconds."""
MOST_GROWTH = 1.02
A_GROUP = {"descriptors": 8, "threads": 3}
"""What a process group of six workers holds: a connection to each other one, and three of its own."""


@dataclass(slots=True)
class Samples:
    """What the workers that live hold, and the coordinator, by the recoveries before."""

    fork_server: ForkServer
    recoveries: int = 0
    counts: dict[Worker, list[tuple[int, int, int]]] = field(default_factory=lambda: {one: [] for one in STABLE})
    """Recoveries, descriptors, threads."""
    memory: dict[str, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Recoveries, KiB in all, and KiB that are private."""

    def notify(self, news: Recovery | str) -> None:
        """Something has changed."""
        self.recoveries += isinstance(news, Recovery)

    def progress(self, iteration: int, _: float) -> None:
        """An iteration was committed."""
        for worker in STABLE:
            process = Path(f"/proc/{self.fork_server.pids[str(worker)]}")
            counted = [len(list((process / what).iterdir())) for what in ("fd", "task")]
            self.counts[worker].append((self.recoveries, *counted))
        if iteration % MEMORY_EVERY == 0:
            pids = {f"worker {worker}": self.fork_server.pids[str(worker)] for worker in STABLE}
            for name, pid in {"coordinator": os.getpid(), **pids}.items():
                self.memory[name].append((self.recoveries, memory_kib(pid), private_kib(pid)))

    def minima(self, worker: Worker, what: int) -> list[int]:
        """Of descriptors (1) or threads (2) in each part of the recoveries."""
        return self._parts([(one[0], one[what]) for one in self.counts[worker]])

    def memory_minima(self, what: int) -> dict[str, list[int]]:
        """In KiB, of all memory (1) or what is private (2), in each part of the recoveries."""
        return {name: self._parts([(one[0], one[what]) for one in mine]) for name, mine in self.memory.items()}

    def _parts(self, mine: Sequence[tuple[int, int]]) -> list[int]:
        return [min(found for recoveries, found in mine
                    if part * self.recoveries <= PARTS * recoveries <= (part + 1) * self.recoveries)
                for part in range(PARTS)]


def memory_kib(pid: int) -> int:
    """Memory of a process that is no part of a file, also where it is still that of the process it was forked from."""
    return _kib(pid, "Anonymous:")


def private_kib(pid: int) -> int:
    """Memory of a process that no other one shares."""
    return _kib(pid, "Private_Clean:", "Private_Dirty:")


def _kib(pid: int, *names: str) -> int:
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return sum(int(words[1]) for words in lines if words[0] in names)


def kills(count: int, gap: int, seed: int, fork_server: ForkServer, out: Path) -> Samples:
    """One run with so many kills."""
    job, rng = uniform_job(3, 2, 2, op=1, optimizer=0, transfer=0), random.Random(seed)
    victims = [Worker(pipeline, column) for pipeline in (1, 2) for column in (0, 1)]
    killed = [(rng.choice(STABLE if rng.random() < CUTS else victims), gap * (number + 1)) for number in range(count)]
    config = parse_run_config({**MODEL, "blocks": 2, "width": WIDTH, "context": 256},
                              {**TRAINING, "iterations": gap * (count + 1), "clip_norm": 1e-3})
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
    parser.add_argument("--gap", type=int, default=5, help="iterations from one kill to the next")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rose = False
    with tempfile.TemporaryDirectory() as folder, sleeping(OP_SECONDS, OP_SECONDS, OP_SECONDS, 0.0), \
            ForkServer() as fork_server:
        samples = kills(options.recoveries, options.gap, options.seed, fork_server, Path(folder))
    iterations = len(samples.counts[STABLE[0]])
    print(f"{samples.recoveries} recoveries in {iterations} iterations; minima of each fifth of them")
    for worker in STABLE:
        for number, (what, slack) in enumerate(A_GROUP.items(), start=1):
            minima = samples.minima(worker, number)
            rose |= minima[-1] > minima[0] + slack
            print(f"worker {worker}: {what} {' '.join(map(str, minima))}")
    for number, (what, since) in enumerate((("memory", 1), ("private memory", 2)), start=1):
        for name, minima in samples.memory_minima(number).items():
            rose |= minima[-1] > max(MOST_GROWTH * minima[since], minima[since] + 1024)
            print(f"{name}: {what} {' '.join(f'{kib / 1024:.1f}' for kib in minima)} MiB")
    sys.exit(rose)


if __name__ == "__main__":
    main()
