"""Measure how long training pauses when a worker returns with much to copy.

    python -m benchmarks.joining [--width 1536] [--megabytes-per-second 15] [--returns 5]
                                 [--shard-optimizer]

Trains layers that sleep through their ops (so that two cores are enough for six workers) and are as
large as real ones, with AdamW, in 3 pipelines of 2 stages. A worker is killed and comes back
repeatedly, and receives its layers at the given speed, which takes longer than an iteration. Prints
the longest time between two commits from the start of the worker until it has trained 5 iterations;
the median iteration without it; the switch, from when all workers have stopped until the first op;
and the same after a death. With --shard-optimizer, repeats all of it with sharded optimizer state,
and compares the switch. Exit status 1 when the median of the longest times is above 1.5 iterations
and the switch: an iteration that begins with empty pipelines is longer than the others.
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
from slipstream.planner.plan import plan_job
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.protocol.failure_injection import Injection
from slipstream.schedules.schedule import Schedule, Worker

OP_SECONDS = 0.03
GAP = 40
"""Number of iterations between two deaths."""
SETTLED = 5
"""Number of iterations after which a worker that came back is like the others."""
SLACK = 1.5
WORKER = Worker(1, 0)
STAGES = 2
LAYERS_A_STAGE = 2


@dataclass(slots=True)
class Clock:
    """Times at which iterations were committed, and what changed."""

    commits: list[float] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)

    def progress(self, *_: object) -> None:
        """Record that an iteration was committed."""
        self.commits.append(time.monotonic())

    def notify(self, news: Recovery | str) -> None:
        """Record a change of workers."""
        if isinstance(news, Recovery):
            self.recoveries.append(news)

    def gap(self, start: int, end: int) -> float:
        """Return the longest time from one commit to the next in a range of iterations."""
        return max(later - earlier for earlier, later in pairwise(self.commits[start:end]))


def returns(
    options: argparse.Namespace, fork_server: ForkServer, out: Path, *, sharded: bool
) -> Clock:
    """Run a training in which a worker dies and comes back several times."""
    count = options.returns
    job = uniform_job(3, STAGES, 2, op=1, optimizer=0, transfer=0)
    config = parse_run_config(
        {**MODEL, "width": options.width, "blocks": STAGES * LAYERS_A_STAGE},
        {
            **TRAINING,
            "optimizer": "adamw",
            "iterations": GAP * (count + 1),
            "shard_optimizer": sharded,
        },
    )
    clock, deaths = Clock(), [GAP * number for number in range(1, count + 1)]

    def schedule(down: tuple[Worker, ...]) -> Schedule:
        return plan_job(job, down, method="greedy").schedule

    injections = tuple(Injection(WORKER, death) for death in deaths)
    returns = tuple(Return(WORKER, death + 2) for death in deaths)
    run(
        schedule(()),
        config,
        out=out,
        fork_server=fork_server,
        progress=clock.progress,
        options=RunOptions(notify=clock.notify),
        resilience=Resilience(
            scheduler=schedule,
            fetch_bytes_per_second=options.megabytes_per_second * 1e6,
            injections=injections,
            returns=returns,
        ),
    )
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--width", type=int, default=1536, help="of a layer; its matrix is as high as wide"
    )
    parser.add_argument(
        "--megabytes-per-second",
        type=float,
        default=15.0,
        help="from each of the two others at most",
    )
    parser.add_argument("--returns", type=int, default=5)
    parser.add_argument(
        "--shard-optimizer", action="store_true", help="without, then with sharded optimizer state"
    )
    options = parser.parse_args()
    switches, good = [], True
    with sleeping(*(OP_SECONDS / LAYERS_A_STAGE,) * 3, 0.0), ForkServer() as fork_server:
        for sharded in (False, True) if options.shard_optimizer else (False,):
            with tempfile.TemporaryDirectory() as folder:
                clock = returns(options, fork_server, Path(folder), sharded=sharded)
            print("with sharded optimizer state" if sharded else "with whole optimizer state")
            switch, fine = tell(clock, options)
            switches.append(switch)
            good = good and fine
    if options.shard_optimizer:
        print(
            f"switch with sharded state: {switches[1] / switches[0]:.2f} of that with whole state"
        )
    sys.exit(not good)


def tell(clock: Clock, options: argparse.Namespace) -> tuple[float, bool]:
    """Print the measurements; return the switch, in seconds, and whether commits were timely."""
    back = [recovery for recovery in clock.recoveries if recovery.returned]
    state_bytes = LAYERS_A_STAGE * options.width**2 * 4 * 3
    # From the third iteration after the death on: the worker is started in the second.
    median = statistics.median(
        later - earlier
        for recovery in back
        for earlier, later in pairwise(
            clock.commits[GAP * (recovery.iteration // GAP) + 2 : recovery.iteration]
        )
    )
    gaps = [
        clock.gap(GAP * (recovery.iteration // GAP) + 2, recovery.iteration + SETTLED)
        for recovery in back
    ]
    switch = statistics.median(recovery.seconds for recovery in back)
    dead = statistics.median(recovery.seconds for recovery in clock.recoveries if recovery.dead)
    print(
        f"{len(back)} returns with {state_bytes / 1e6:.0f} MB each, "
        f"{state_bytes / 2e6 / options.megabytes_per_second:.1f} s to move; iterations committed "
        f"meanwhile: {', '.join(str(recovery.meanwhile) for recovery in back)}\n"
        f"median iteration without it {median * 1e3:.0f} ms, switch {switch * 1e3:.0f} ms; "
        f"longest from one commit to the next: median {statistics.median(gaps) * 1e3:.0f} ms, "
        f"worst {max(gaps) * 1e3:.0f} ms ({max(gaps) / median:.2f} iterations); pause after a "
        f"death {dead * 1e3:.0f} ms"
    )
    return switch, statistics.median(gaps) <= SLACK * median + switch


if __name__ == "__main__":
    main()
