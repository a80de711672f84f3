"""Measure the cost of slow workers, and what remains when work is shed.

Ops sleep.

    python -m benchmarks.slow_workers [--factor 2] [--grid 4x4x16] [--milliseconds 20] [--json]

One worker takes `factor` times as long for its ops from some iteration on, and later is as fast as
the others again. Prints for each phase of the run the planned period, the measured one (the longest
busy window of any worker), the throughput relative to the plan's, and the number of iterations
until the change was detected. Exit status 1 when that is more than 5, or the throughput with shed
work is below 0.93 of the plan's.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.replay import sleeping_job
from benchmarks.sleeping import MODEL, TRAINING, sleeping
from slipstream.planner.failures import FailurePlanner
from slipstream.planner.plan import plan_job
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent, period_at
from slipstream.runtime.launch import Resilience, RunOptions, RunResult, run
from slipstream.runtime.protocol.failure_injection import Slowdown
from slipstream.schedules.schedule import Schedule, Worker

LEAST_SHARE = 0.93
MOST_ITERATIONS = 5
WARM_UP = 2
"""Number of iterations of a phase that do not count."""


class Phase(NamedTuple):
    """Part of a run between changes of speed, in seconds."""

    name: str
    iterations: int
    planned: float
    measured: float
    """Median time from one committed iteration to the next."""

    @property
    def share(self) -> float:
        """Throughput as a share of the planned one."""
        return self.planned / self.measured


def phase(name: str, ends: list[float], first: int, end: int, planned: float) -> Phase:
    """Return the phase of iterations `first` to `end` - 1, without its first ones."""
    between = [later - earlier for earlier, later in pairwise(ends[first + WARM_UP - 1 : end])]
    return Phase(name, end - first, planned, statistics.median(between))


def train(
    schedule: Schedule, options: argparse.Namespace, unit: float, slow: Worker
) -> tuple[RunResult, list[float]]:
    """Run with one slow worker; return the result and the times of commits."""
    job = sleeping_job(*map(int, options.grid.split("x")), unit)
    config = parse_run_config({**MODEL, "blocks": schedule.grid.depth}, TRAINING)
    ends: list[float] = []
    slowdowns = (
        Slowdown(slow, options.slow_at, options.factor),
        Slowdown(slow, options.usual_at, 1.0),
    )
    with tempfile.TemporaryDirectory() as folder, sleeping(unit, unit, unit, 3 * unit):
        result = run(
            schedule,
            config,
            out=Path(folder),
            iterations=options.iterations,
            options=RunOptions(traced=0, notify=lambda news: print(news, file=sys.stderr)),
            resilience=Resilience(
                scheduler=FailurePlanner(job, schedule).after,
                slowdowns=slowdowns,
                at_speeds=FailurePlanner(job, schedule).at_speeds,
            ),
            progress=lambda *_: ends.append(time.perf_counter()),
        )
    return result, ends


def phases(
    schedule: Schedule,
    result: RunResult,
    ends: list[float],
    options: argparse.Namespace,
    slow: Worker,
) -> list[Phase]:
    """Return the phases between changes of speed.

    If a change was not detected, later phases are missing.
    """
    usual = schedule.seconds(schedule.period_ticks)
    found = [phase("as fast as its peers", ends, 0, options.slow_at, usual)]
    shed = next((event for event in result.speed_events if event.changed), None)
    if shed is None:
        return found
    at_half = period_at(schedule, {slow: options.factor})
    found.append(
        Phase(
            "slow, not known",
            shed.iteration - options.slow_at,
            at_half,
            statistics.median(
                later - earlier
                for earlier, later in pairwise(ends[options.slow_at : shed.iteration])
            ),
        )
    )
    found.append(
        phase(
            "slow, work shed", ends, shed.iteration, options.usual_at, shed.planned_seconds or 0.0
        )
    )
    back = next(
        (
            event
            for event in result.speed_events
            if event.changed and event.iteration > options.usual_at
        ),
        None,
    )
    if back is not None:
        found.append(
            phase(
                "as fast again, work given back",
                ends,
                back.iteration,
                options.iterations,
                back.planned_seconds or 0.0,
            )
        )
    return found


def iterations_until(event: SpeedEvent, change: int) -> int:
    """Return the number of iterations from a change of speed to its detection.

    It includes the last one measured.
    """
    return max(detection.since + detection.iterations for detection in event.changes) - change


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--grid", default="4x4x16", help="pipelines x stages x micro-batches")
    parser.add_argument("--milliseconds", type=float, default=20)
    parser.add_argument("--slow-at", type=int, default=10)
    parser.add_argument("--usual-at", type=int, default=28)
    parser.add_argument("--iterations", type=int, default=44)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    unit = options.milliseconds / 1e3
    schedule = plan_job(
        sleeping_job(*map(int, options.grid.split("x")), unit), method="greedy"
    ).schedule
    slow = Worker(1, schedule.grid.columns // 2)
    result, ends = train(schedule, options, unit, slow)
    found = phases(schedule, result, ends, options, slow)
    changed = (event for event in result.speed_events if event.changed)
    starts = (options.slow_at, options.usual_at)
    until = [iterations_until(event, at) for event, at in zip(changed, starts, strict=False)]
    if options.json:
        print(
            json.dumps(
                {
                    "phases": [{**phase._asdict(), "share": phase.share} for phase in found],
                    "found_after": until,
                }
            )
        )
    else:
        table = Table("worker", "iterations", "planned ms", "measured ms", "throughput / plan's")
        for phase in found:
            table.add_row(
                phase.name,
                str(phase.iterations),
                f"{phase.planned * 1e3:.0f}",
                f"{phase.measured * 1e3:.0f}",
                f"{phase.share:.3f}",
            )
        Console().print(table)
        print("found after " + ", ".join(map(str, until)) + " iterations")
    shares = [phase.share for phase in found if phase.name == "slow, work shed"]
    sys.exit(not shares or min(shares) < LEAST_SHARE or until[0] > MOST_ITERATIONS)


if __name__ == "__main__":
    main()
