"""Measure how often a worker is wrongly found slow on a busy machine.

    python -m benchmarks.false_alarms [--grid 3x2x4] [--iterations 2000] [--milliseconds 2]
                                      [--computes]

Trains with ops that sleep, or with small ones that compute (`--computes`: a GPT of 2 blocks), and
counts what the detector finds although no worker is slow, and when it finds that out. Exit status 1
when there is one such case in 1,000 iterations or more.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path

from benchmarks.replay import sleeping_job
from benchmarks.sleeping import MODEL, TRAINING, sleeping
from slipstream.planner.plan import plan_job
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent
from slipstream.runtime.launch import RunOptions, run

MOST = 1 / 1000


@contextmanager
def lasting(unit: float, computes: bool) -> Iterator[None]:
    """Make ops sleep for a number of seconds, if they sleep."""
    with nullcontext() if computes else sleeping(unit, unit, unit, 3 * unit):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", default="3x2x4", help="pipelines x stages x micro-batches")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--milliseconds", type=float, default=2)
    parser.add_argument("--computes", action="store_true")
    options = parser.parse_args()
    unit, ends, found = options.milliseconds / 1e3, list[float](), list[SpeedEvent]()
    schedule = plan_job(
        sleeping_job(*map(int, options.grid.split("x")), unit), method="greedy"
    ).schedule
    config = (
        parse_run_config(
            {"blocks": 2, "width": 64, "heads": 2, "context": 32}, {"batch": 2, "device": "cpu"}
        )
        if options.computes
        else parse_run_config({**MODEL, "blocks": schedule.grid.depth}, TRAINING)
    )
    with tempfile.TemporaryDirectory() as folder, lasting(unit, options.computes):
        run(
            schedule,
            config,
            out=Path(folder),
            iterations=options.iterations,
            options=RunOptions(
                traced=0,
                notify=lambda news: found.append(news) if isinstance(news, SpeedEvent) else None,
            ),
            progress=lambda *_: ends.append(time.perf_counter()),
        )
    changes = [change for event in found for change in event.changes]
    alarms = [change for change in changes if change.factor > change.before]
    gaps = [after - before for before, after in pairwise(ends)]
    print(
        f"{options.iterations} iterations of {statistics.median(gaps) * 1e3:.0f} ms (longest "
        f"{max(gaps) * 1e3:.0f} ms) in {ends[-1] - ends[0]:.0f} s, "
        f"load {os.getloadavg()[1]:.0f}: {len(alarms)} false alarms"
    )
    for change in changes:
        print(
            f"  worker {change.worker}: {change.before:.2f} -> {change.factor:.2f} over "
            f"iterations {change.since} to {change.since + change.iterations - 1}"
        )
    sys.exit(len(alarms) >= MOST * options.iterations)


if __name__ == "__main__":
    main()
