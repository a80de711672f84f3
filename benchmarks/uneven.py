"""Compare a real run with unequal samples with its replay.

    python -m benchmarks.uneven [--grid 3x4x6] [--milliseconds 40] [--iterations 10]
                                [--spread 0.7] [--json]

Worker processes run ops that sleep: a sample takes as long as `spread` says (log-normal), the same
in all stages, with and without dealing and failures. The mean time from one committed iteration to
the next, after the first two, is compared with that of the replay for the same iterations and the
same dealing. Exit status 1 when they differ by more than 5 %.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.replay import sleeping_job
from benchmarks.sleeping import MODEL, TRAINING, UnequalData, sleeping
from slipstream.planner.plan import plan_job
from slipstream.runtime.config import RunConfig, parse_run_config
from slipstream.runtime.data.dealt_samples import DealtSamples
from slipstream.runtime.launch import RunOptions, run
from slipstream.runtime.placement import place_layers
from slipstream.runtime.replay.microbatch import Microbatch
from slipstream.schedules.dealing import Dealer
from slipstream.schedules.schedule import Schedule, Worker

WARM_UP = 2
LIMIT = 0.05


class Outcome(NamedTuple):
    """Mean seconds of an iteration."""

    dead: int
    dealt: bool
    planned: float
    """Planned seconds, with equal samples."""
    replayed: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the replay."""
        return self.measured / self.replayed - 1


def replayed(schedule: Schedule, config: RunConfig, iterations: int) -> float:
    """Return the seconds by the replay of the same iterations with the same samples."""
    data, dealer = UnequalData(config), Dealer(schedule)
    dealt = DealtSamples(
        schedule,
        schedule.grid,
        data,
        config.training,
        place_layers(schedule.grid, schedule.grid.depth),
    )
    counts = schedule.grid.microbatches
    first = np.cumsum([0, *counts])
    samples = []
    for iteration in range(iterations):
        row = []
        for pipeline, count in enumerate(counts):
            for index in range(count):
                name = dealt(Microbatch(iteration, pipeline, index))
                row.append(int(first[name.pipeline]) + name.index)
        samples.append(row)
    dealt.close()
    return float(
        dealer.iteration_seconds(
            [data.costs(iteration) for iteration in range(iterations)], samples
        )[WARM_UP:].mean()
    )


def measured(schedule: Schedule, config: RunConfig, unit: float, iterations: int) -> float:
    """Return the seconds measured with worker processes."""
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder, sleeping(unit, unit, unit, 3 * unit):
        run(
            schedule,
            config,
            out=Path(folder),
            iterations=iterations,
            options=RunOptions(traced=0),
            progress=lambda *_: ends.append(time.perf_counter()),
        )
    return (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", default="3x4x6", help="pipelines x stages x micro-batches")
    parser.add_argument("--milliseconds", type=float, default=40)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument(
        "--spread", type=float, default=0.7, help="of the logarithm of a sample's times"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    unit, (pipelines, stages, microbatches) = (
        options.milliseconds / 1e3,
        map(int, options.grid.split("x")),
    )
    job, outcomes = sleeping_job(pipelines, stages, microbatches, unit), []
    for dead in ((), (Worker(1, stages // 2),)):
        schedule = plan_job(job, dead, method="greedy").schedule
        for swaps in (0, 6000):
            config = parse_run_config(
                {**MODEL, "blocks": stages},
                {
                    **TRAINING,
                    "data": "benchmarks.sleeping:UnequalData",
                    "deal_swaps": swaps,
                    "options": {
                        "microbatches": list(schedule.grid.microbatches),
                        "spread": options.spread,
                    },
                },
            )
            outcomes.append(
                Outcome(
                    len(dead),
                    swaps > 0,
                    schedule.seconds(schedule.period_ticks),
                    replayed(schedule, config, options.iterations),
                    measured(schedule, config, unit, options.iterations),
                )
            )
    if options.json:
        print(json.dumps([{**outcome._asdict(), "error": outcome.error} for outcome in outcomes]))
    else:
        table = Table(
            "dead", "samples", "equal, s", "replayed, s", "measured, s", "measured / replayed"
        )
        for outcome in outcomes:
            table.add_row(
                str(outcome.dead),
                "dealt" if outcome.dealt else "as they come",
                f"{outcome.planned:.3f}",
                f"{outcome.replayed:.3f}",
                f"{outcome.measured:.3f}",
                f"{1 + outcome.error:.3f}",
            )
        Console().print(table)
    sys.exit(max(abs(outcome.error) for outcome in outcomes) > LIMIT)


if __name__ == "__main__":
    main()
