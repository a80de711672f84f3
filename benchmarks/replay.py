"""Measure the cost of replaying a schedule: the measured period over the planned one.

    python -m benchmarks.replay [--milliseconds 20] [--grid 3x4x6] [--iterations 12] [--repeats 2]
                                [--json]

Every op sleeps one unit (the optimizer three), so that all workers fit on two cores and everything
beyond the plan is the runtime's own: transfers, reports, Python. In the last case, stages have two
layers that sleep half a unit each, and these have moved to the workers that are left. Plans are
made without transfer times. `measured` is what `slipstream train` reports, the median over
iterations of the longest busy window; `cadence` is the median time from one committed iteration to
the next. The quickest of the repeats counts, because other programs can only delay. Exit status 1
when one of them is more than 4 % above the plan.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.sleeping import MODEL, TRAINING, sleeping
from slipstream.planner.job.file import Job, parse_job
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_job, plan_only
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.launch import RunOptions, run
from slipstream.schedules.schedule import Schedule, Worker

LIMIT = 1.04
WARM_UP = 2
"""Number of iterations that do not count for the cadence."""


class Replayed(NamedTuple):
    """Planned and measured periods, in seconds."""

    name: str
    failed: tuple[str, ...]
    workers: int
    planned: float
    measured: float
    cadence: float

    @property
    def ratio(self) -> float:
        """Measured period relative to the planned one, by the measure that gives more."""
        return max(self.measured, self.cadence) / self.planned


class Case(NamedTuple):
    """Schedule to replay, with the number of layers per stage."""

    name: str
    schedule: Schedule
    layers: int = 1


def sleeping_job(
    pipelines: int, stages: int, microbatches: int, unit: float, layers: int = 1
) -> Job:
    """Return a job whose ops take one unit for all layers of a stage.

    The first stage has no I, and does all in W.
    """
    inputs, weights = [0.0] + [unit] * (stages - 1), [2 * unit] + [unit] * (stages - 1)
    return parse_job(f"""
        name = "sleepers"
        pipelines = {pipelines}
        stages = {stages}
        microbatches = {microbatches}
        [time]
        forward = {unit}
        backward_input = {inputs}
        backward_weight = {weights}
        optimizer = {3 * unit}
        [placement]
        layers = {[layers] * stages}
        """)


def replay(case: Case, stages: int, unit: float, iterations: int) -> Replayed:
    """Run a schedule with ops that sleep."""
    schedule, op = case.schedule, unit / case.layers
    config = parse_run_config({**MODEL, "blocks": stages * case.layers}, TRAINING)
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder, sleeping(op, op, op, 3 * unit):
        result = run(
            schedule,
            config,
            out=Path(folder),
            iterations=iterations,
            options=RunOptions(traced=0),
            progress=lambda *_: ends.append(time.perf_counter()),
        )
    assert result.measured_period_seconds is not None
    between = statistics.median(after - before for before, after in pairwise(ends[WARM_UP:]))
    failed = set(schedule.grid.workers()) - {seat.worker for seat in schedule.seats}
    return Replayed(
        case.name,
        tuple(map(str, sorted(failed))),
        len(schedule.seats),
        result.planned_period_seconds,
        result.measured_period_seconds,
        between,
    )


def cases(pipelines: int, stages: int, microbatches: int, unit: float) -> Sequence[Case]:
    """Return the cases: 1F1B, split backward, and both with workers down.

    The last routes go over layers that have moved.
    """
    job, fine = (sleeping_job(pipelines, stages, microbatches, unit, layers) for layers in (1, 2))
    one_down, two_down = [Worker(1, stages // 2)], [Worker(1, stages // 2), Worker(0, 0)]
    return (
        Case("1F1B", plan_job(job, method="1f1b").schedule),
        Case("1F1B, re-routed", plan_job(job, one_down, method="1f1b").schedule),
        Case("split", plan_job(job, time_limit=5).schedule),
        Case("split, re-routed", plan_job(job, one_down, time_limit=5).schedule),
        Case("split, re-routed twice", plan_job(job, two_down, time_limit=5).schedule),
        Case(
            "layers moved",
            plan_only(PlanOptions(layers="move", time_limit=5), fine, one_down).schedule,
            2,
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--milliseconds", type=float, default=20)
    parser.add_argument("--grid", default="3x4x6", help="pipelines x stages x micro-batches")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    unit = options.milliseconds / 1e3
    pipelines, stages, microbatches = map(int, options.grid.split("x"))
    outcomes = []
    for case in cases(pipelines, stages, microbatches, unit):
        repeats = (replay(case, stages, unit, options.iterations) for _ in range(options.repeats))
        outcomes.append(min(repeats, key=lambda outcome: outcome.ratio))
    if options.json:
        print(json.dumps([{**outcome._asdict(), "ratio": outcome.ratio} for outcome in outcomes]))
    else:
        table = Table(
            "schedule", "down", "workers", "planned ms", "measured ms", "cadence ms", "ratio"
        )
        for outcome in outcomes:
            table.add_row(
                outcome.name,
                ", ".join(outcome.failed),
                str(outcome.workers),
                f"{outcome.planned * 1e3:.1f}",
                f"{outcome.measured * 1e3:.1f}",
                f"{outcome.cadence * 1e3:.1f}",
                f"{outcome.ratio:.3f}",
            )
        Console().print(table)
    sys.exit(max(outcome.ratio for outcome in outcomes) > LIMIT)


if __name__ == "__main__":
    main()
