"""Compare how many samples re-routing, dropping the replica, and restarting keep.

    python -m benchmarks.samples_kept [--failures 10] [--every 12] [--back 6] [--milliseconds 20]
                                      [--grid 3x4x6]

The same job runs in all cases: ops sleep, one worker is killed every so many iterations, and is
back a few iterations later.

    re-routed   one run of `slipstream train`'s runtime: peers take over by schedules that were
                planned ahead, and the worker comes back while the others train.
    dropped     torchft's way: while a worker is away, its whole pipeline is. Over the wall time,
                outages and recoveries of the run above, at the measured speed of the job with one
                pipeline less, whose samples are fewer.
    restarted   all processes end, and restart from the last checkpoint, repeatedly, measured to the
                second. In favour of this way, a new worker is there at once, and a checkpoint is
                written every few iterations.

The column `kept` has samples per second relative to those of a run without failures. Exit status 1
when re-routing does not keep most.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.replay import sleeping_job
from benchmarks.sleeping import MODEL, TRAINING, sleeping
from slipstream.planner.job.file import Job
from slipstream.planner.plan import plan_job
from slipstream.runtime.checkpoints.checkpoint import open_latest
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.errors import RunError
from slipstream.runtime.launch import Resilience, RunOptions, RunResult, run
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.protocol.failure_injection import Injection
from slipstream.schedules.schedule import Schedule, Worker

CHECKPOINT_EVERY = 5
PLACE = 2
"""Index of the op before which a worker is killed."""
WARM_UP = 2


class Scenario(NamedTuple):
    """Job, duration of an op, and failures."""

    job: Job
    unit: float
    failures: int
    every: int
    back: int

    @property
    def iterations(self) -> int:
        """Number of iterations of the whole training."""
        return self.every * (self.failures + 1)

    def failure(self, number: int) -> tuple[Worker, int]:
        """Return which worker dies in which iteration. Stages and pipelines take turns."""
        workers = [
            Worker(pipeline, column)
            for column in range(self.job.stages)
            for pipeline in range(self.job.pipelines)
        ]
        return workers[number * (self.job.pipelines + 1) % len(workers)], (number + 1) * self.every


class Kept(NamedTuple):
    """Throughput with a reaction to failures, and the median failure's lost time."""

    name: str
    samples_per_second: float
    lost_seconds: float


class Clock:
    """Last time at which each iteration was committed."""

    def __init__(self) -> None:
        self.times: dict[int, float] = {}

    def __call__(self, iteration: int, _: float) -> None:
        self.times[iteration] = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds from the end of the warm-up to the end."""
        return self.times[max(self.times)] - self.times[WARM_UP]


def train(
    scenario: Scenario,
    schedule: Schedule,
    clock: Clock,
    folder: Path,
    iterations: int,
    resilience: Resilience,
) -> RunResult:
    """Run a schedule with ops that sleep."""
    config = parse_run_config({**MODEL, "blocks": schedule.grid.depth}, TRAINING)
    with sleeping(scenario.unit, scenario.unit, scenario.unit, 3 * scenario.unit):
        return run(
            schedule,
            config,
            out=folder,
            iterations=iterations,
            progress=clock,
            resilience=resilience,
            options=RunOptions(traced=0, force=True),
        )


def without_failures(scenario: Scenario, schedule: Schedule, folder: Path) -> float:
    """Return the samples (micro-batches) per second without failures."""
    clock = Clock()
    train(scenario, schedule, clock, folder, 2 * scenario.every, Resilience())
    between = [after - before for before, after in pairwise(list(clock.times.values())[WARM_UP:])]
    return schedule.grid.total_microbatches / statistics.median(between)


def rerouted(scenario: Scenario, whole: Schedule, folder: Path) -> tuple[Kept, float, float]:
    """Measure re-routing in one run.

    Also returns its seconds, and those in which a worker was away.
    """
    failures = [scenario.failure(number) for number in range(scenario.failures)]
    table = {}
    for worker in {failed_worker for failed_worker, _ in failures}:
        table[(worker,)] = plan_job(scenario.job, [worker], time_limit=3).schedule
    clock = Clock()
    injections = tuple(Injection(worker, at, PLACE) for worker, at in failures)
    returns = tuple(Return(worker, at + scenario.back) for worker, at in failures)
    result = train(
        scenario,
        whole,
        clock,
        folder,
        scenario.iterations,
        Resilience(
            scheduler=table.__getitem__,
            heartbeat_timeout_seconds=10.0,
            injections=injections,
            returns=returns,
        ),
    )
    deaths = [recovery for recovery in result.recoveries if recovery.dead]
    if len(deaths) != scenario.failures:
        sys.exit(f"{len(deaths)} of {scenario.failures} failures happened")
    backs = [recovery for recovery in result.recoveries if recovery.returned]
    away = sum(
        clock.times[back.iteration - 1] - clock.times[death.iteration - 1]
        for death, back in zip(deaths, backs, strict=True)
    )
    samples = whole.grid.total_microbatches * (scenario.iterations - 1 - WARM_UP)
    lost = [clock.times[death.iteration] - clock.times[death.iteration - 1] for death in deaths]
    period = statistics.median(after - before for before, after in pairwise(clock.times.values()))
    return (
        Kept("re-routed", samples / clock.seconds(), statistics.median(lost) - period),
        clock.seconds(),
        away,
    )


def dropped(
    scenario: Scenario, full: float, seconds: float, away: float, lost: float, folder: Path
) -> Kept:
    """Compute the samples of the same wall time without the pipelines that lack a worker."""
    fewer = sleeping_job(
        scenario.job.pipelines - 1, scenario.job.stages, scenario.job.microbatches[0], scenario.unit
    )
    partial = without_failures(scenario, plan_job(fewer, time_limit=5).schedule, folder)
    samples = full * (seconds - away) + partial * (away - scenario.failures * lost)
    return Kept("replica dropped", samples / seconds, lost)


def restarted(scenario: Scenario, whole: Schedule, folder: Path) -> Kept:
    """Measure restarts, with one more life than there are failures."""
    clock, resume, stops = Clock(), None, []
    for life in count():
        worker, at = scenario.failure(life) if life < scenario.failures else (Worker(0, 0), 2**30)
        try:
            train(
                scenario,
                whole,
                clock,
                folder,
                scenario.iterations,
                Resilience(
                    checkpoint_every=CHECKPOINT_EVERY,
                    resume=resume,
                    injections=(Injection(worker, at, PLACE),),
                ),
            )
        except RunError:
            stops.append((at, clock.times[at - 1]))
            resume = open_latest(folder / "checkpoints")
            continue
        break
    samples = whole.grid.total_microbatches * (scenario.iterations - 1 - WARM_UP)
    period = statistics.median(after - before for before, after in pairwise(clock.times.values()))
    lost = [clock.times[at] - stopped - period for at, stopped in stops]
    return Kept("restarted", samples / clock.seconds(), statistics.median(lost))


def compare(scenario: Scenario, folder: Path) -> tuple[float, Sequence[Kept]]:
    """Return the samples per second without failures, and with each reaction to failures."""
    whole = plan_job(scenario.job, time_limit=5).schedule
    full = without_failures(scenario, whole, folder / "full")
    ours, seconds, away = rerouted(scenario, whole, folder / "ours")
    return full, (
        ours,
        dropped(scenario, full, seconds, away, ours.lost_seconds, folder / "fewer"),
        restarted(scenario, whole, folder / "restarted"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("failures", 10), ("every", 12), ("back", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--milliseconds", type=float, default=20)
    parser.add_argument("--grid", default="3x4x6", help="pipelines x stages x micro-batches")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    unit = options.milliseconds / 1e3
    job = sleeping_job(*map(int, options.grid.split("x")), unit)
    with tempfile.TemporaryDirectory() as folder:
        full, ways = compare(
            Scenario(job, unit, options.failures, options.every, options.back), Path(folder)
        )
    if options.json:
        print(
            json.dumps(
                {
                    "without_failures": full,
                    "ways": [
                        {**way._asdict(), "kept": way.samples_per_second / full} for way in ways
                    ],
                }
            )
        )
    else:
        table = Table("way", "samples a second", "kept", "lost at a failure, s")
        table.add_row("no failures", f"{full:.1f}", "100 %", "")
        for way in ways:
            table.add_row(
                way.name,
                f"{way.samples_per_second:.1f}",
                f"{way.samples_per_second / full:.1%}",
                f"{way.lost_seconds:.2f}",
            )
        Console().print(table)
    sys.exit(max(ways, key=lambda way: way.samples_per_second) is not ways[0])


if __name__ == "__main__":
    main()
