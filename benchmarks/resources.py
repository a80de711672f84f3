"""Check descriptors, threads and memory over many recoveries.

What a generation opens is closed when it ends. python -m benchmarks.resources [--recoveries 100]
[--gap 10] [--seed 1]

Trains layers that sleep for 2 ms in an op, in 3 pipelines of 2 stages, with clipping. The workers
of one pipeline live, or lose their connections; the others are killed repeatedly, every `gap`
iterations, and come back. At every commit, the benchmark counts the open descriptors and the
threads of the living workers; at every fifth commit, their memory, and that of the coordinator,
which is this process. Memory is counted twice: all that belongs to no file, and what no other
process shares. Pages of the fork server are shared with workers until they are written to, which
makes them private without making memory larger. A worker briefly holds more while generations
change, so that minima are compared: those of each fifth of the recoveries.

Exit status 1 when the minimum of the last fifth is higher than that of the first by more than one
process group, which a worker may or may not have, depending on which workers live when it is
counted; when memory is more than 2 % and 1 MiB above that of the second fifth (the first fifth
includes what is made at first use); or when private memory is that much above that of the third
fifth.
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
from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.protocol.failure_injection import Injection, Place
from slipstream.schedules.schedule import Schedule, Worker

OP_SECONDS = 0.002
WIDTH = 256
"""Width of layers.

Activations of 256 KiB exceed what a socket takes at once, so that some are cut off.
"""
AWAY = 1
"""Number of iterations after which a worker is restarted."""
PLACES: tuple[Place, ...] = (0, 2, 4, "A", "O", "stepped", "ordered", "met")
CUTS = 0.2
"""Share of the failures that are broken connections of a worker that lives."""
STABLE = (Worker(0, 0), Worker(0, 1))
PARTS = 5
MEMORY_EVERY = 5
"""Number of commits between two readings of memory, which take milliseconds."""
MOST_GROWTH = 1.02
A_GROUP = {"descriptors": 8, "threads": 3}
"""Resources of six workers' process group: five connections, and three of its own."""


@dataclass(slots=True)
class Samples:
    """Resources of living workers and the coordinator, by number of previous recoveries."""

    fork_server: ForkServer
    recoveries: int = 0
    counts: dict[Worker, list[tuple[int, int, int]]] = field(
        default_factory=lambda: {worker: [] for worker in STABLE}
    )
    """Triples of recoveries, descriptors and threads, by worker."""
    memory: dict[str, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Triples of recoveries, total KiB, and private KiB, by process."""

    def notify(self, news: Recovery | str) -> None:
        """Count a recovery."""
        self.recoveries += isinstance(news, Recovery)

    def progress(self, iteration: int, _: float) -> None:
        """Record the resources after an iteration was committed."""
        for worker in STABLE:
            process = Path(f"/proc/{self.fork_server.pids[str(worker)]}")
            counted = [len(list((process / what).iterdir())) for what in ("fd", "task")]
            self.counts[worker].append((self.recoveries, *counted))
        if iteration % MEMORY_EVERY == 0:
            pids = {f"worker {worker}": self.fork_server.pids[str(worker)] for worker in STABLE}
            for name, pid in {"coordinator": os.getpid(), **pids}.items():
                self.memory[name].append((self.recoveries, memory_kib(pid), private_kib(pid)))

    def minima(self, worker: Worker, what: int) -> list[int]:
        """Return the minima of descriptors (1) or threads (2) in each part of the recoveries."""
        return self._parts([(count[0], count[what]) for count in self.counts[worker]])

    def memory_minima(self, what: int) -> dict[str, list[int]]:
        """Return the minima of memory, in KiB, in each part of the recoveries.

        Of `what`, 1 is all memory, 2 private memory.
        """
        minima = {}
        for name, mine in self.memory.items():
            minima[name] = self._parts([(count[0], count[what]) for count in mine])
        return minima

    def _parts(self, mine: Sequence[tuple[int, int]]) -> list[int]:
        minima = []
        for part in range(PARTS):
            first, last = part * self.recoveries, (part + 1) * self.recoveries
            minima.append(
                min(found for recoveries, found in mine if first <= PARTS * recoveries <= last)
            )
        return minima


def memory_kib(pid: int) -> int:
    """Return a process's memory, in KiB, that belongs to no file.

    It includes what the process still shares with its parent.
    """
    return _kib(pid, "Anonymous:")


def private_kib(pid: int) -> int:
    """Return the memory of a process that no other process shares, in KiB."""
    return _kib(pid, "Private_Clean:", "Private_Dirty:")


def _kib(pid: int, *names: str) -> int:
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return sum(int(words[1]) for words in lines if words[0] in names)


def kills(count: int, gap: int, seed: int, fork_server: ForkServer, out: Path) -> Samples:
    """Run a training with the given number of kills."""
    job, rng = uniform_job(3, 2, 2, op=1, optimizer=0, transfer=0), random.Random(seed)
    victims = [Worker(pipeline, column) for pipeline in (1, 2) for column in (0, 1)]
    killed = []
    for number in range(count):
        candidates = STABLE if rng.random() < CUTS else victims
        killed.append((rng.choice(candidates), gap * (number + 1)))
    config = parse_run_config(
        {**MODEL, "blocks": 2, "width": WIDTH, "context": 256},
        {**TRAINING, "iterations": gap * (count + 1), "clip_norm": 1e-3},
    )
    samples = Samples(fork_server)

    def schedule(down: tuple[Worker, ...]) -> Schedule:
        return plan_job(job, down, method="greedy").schedule

    injections, returns = [], []
    for worker, at in killed:
        action = "cut" if worker in STABLE else "kill"
        injections.append(Injection(worker, at, rng.choice(PLACES), action))
        if worker not in STABLE:
            returns.append(Return(worker, at + AWAY))
    run(
        schedule(()),
        config,
        out=out,
        fork_server=fork_server,
        progress=samples.progress,
        options=RunOptions(notify=samples.notify),
        resilience=Resilience(
            scheduler=schedule,
            injections=tuple(injections),
            returns=tuple(returns),
        ),
    )
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recoveries", type=int, default=100)
    parser.add_argument("--gap", type=int, default=5, help="iterations from one kill to the next")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rose = False
    with (
        tempfile.TemporaryDirectory() as folder,
        sleeping(OP_SECONDS, OP_SECONDS, OP_SECONDS, 0.0),
        ForkServer() as fork_server,
    ):
        samples = kills(options.recoveries, options.gap, options.seed, fork_server, Path(folder))
    iterations = len(samples.counts[STABLE[0]])
    print(
        f"{samples.recoveries} recoveries in {iterations} iterations; minima of each fifth of them"
    )
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
