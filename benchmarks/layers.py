"""Measure how close plans with moved layers are to the work bound.

    python -m benchmarks.layers [--group NAME ...] [--every N] [--offset N] [--time-limit 10]
                                [--room tight|roomy] [--loads] [--json FILE]

Instances have a grid of D pipelines x S stages x M micro-batches (D in 2, 3, 4, 6, 8, 16; S in 4,
8, 16; M in 2 S, 4 S), 4 or 8 layers per stage, F = I = W, transfer F / 10, optimizer F / 2, and
randomly placed workers that failed or are slow: one, two or four down; one or two slow, 1.2 to 3
times; one of each. `--group "1 down"` takes only the instances of that row of the table, and
`--every N` each N-th of the remaining instances, from `--offset` on.

There is room for 2 S micro-batches in addition to the worker's own stage, whose weights take as
much as S micro-batches (`tight`: a worker that holds another half stage has room for 1.5 S), or for
the same and half a stage's weights (`roomy`). `--loads` makes no plans.

For each instance the benchmark prints: period / work bound; the best proven bound / work bound,
below which no plan can be (a worker runs whole layers of whole micro-batches, hence more than the
mean); and the smallest longest load of all layouts tried / work bound, below which no order of
these layouts can be. Exit status 1 when fewer than nine in ten instances with one or two failures
are within 1.04.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from slipstream.planner.job.file import Job, parse_job
from slipstream.planner.job.layers import layer_costs
from slipstream.planner.job.toml import job_text
from slipstream.planner.layout.candidates import generate_layouts
from slipstream.planner.model.bounds_layouts import period_bound, work_bound
from slipstream.planner.model.from_job import build_layered_problem, choose_tick
from slipstream.planner.model.problem import AllowedLayouts, Layout, NoPlanError, Problem
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.schedules.layers import sum_over_ranges
from slipstream.schedules.schedule import Worker

GOAL = 1.04
LIMIT = 1.10
KINDS = ((1, 0), (2, 0), (4, 0), (0, 1), (0, 2), (1, 1))
"""Numbers of workers that are down, and that are slow."""


class Instance(NamedTuple):
    """Job and its failures, with the row of the table that counts it."""

    name: str
    group: str
    job: Job
    failed: list[Worker]


class Result(NamedTuple):
    """Period and best proven bound of an instance, relative to the work bound.

    With `--loads`, the least load stands for the period.
    """

    value: float
    bound: float


def instances(room: str, seed: int = 0) -> Iterator[Instance]:
    """Return the instances of the benchmark, which are the same for the same seed."""
    chosen = random.Random(seed)
    grid = itertools.product((2, 3, 4, 6, 8, 16), (4, 8, 16), (2, 4), (4, 8), KINDS)
    for pipelines, stages, factor, layers, (down, slow) in grid:
        workers = [
            Worker(pipeline, stage) for pipeline in range(pipelines) for stage in range(stages)
        ]
        hit = chosen.sample(workers, down + slow)
        factors = {str(worker): round(chosen.uniform(1.2, 3.0), 2) for worker in hit[down:]}
        counts = {"down": down, "slow": slow}
        group = " and ".join(f"{count} {state}" for state, count in counts.items() if count)
        who = [f"{worker} down" for worker in sorted(hit[:down])]
        who += [f"{worker} x {value}" for worker, value in factors.items()]
        name = f"{pipelines}x{stages}x{factor * stages}, {layers} layers a stage: {', '.join(who)}"
        yield Instance(
            name,
            group,
            _job(pipelines, stages, factor * stages, layers, factors, room),
            sorted(hit[:down]),
        )


def _job(
    pipelines: int, stages: int, microbatches: int, layers: int, slow: dict[str, float], room: str
) -> Job:
    beside = 0.5 * stages if room == "roomy" else 0.0
    time = {
        "forward": 80,
        "backward_input": 80,
        "backward_weight": 80,
        "transfer": 8,
        "optimizer": 40,
    }
    return parse_job(
        job_text(
            {
                "pipelines": pipelines,
                "stages": stages,
                "microbatches": microbatches,
                "time": {**time, "slow": slow} if slow else time,
                "memory": {
                    "capacity": 2 * stages + beside,
                    "activation": 1,
                    "weight_stash": 1,
                    "weights": stages,
                },
                "placement": {"layers": [layers] * stages},
            },
            {},
        )
    )


def longest_load(given: Problem, layout: Layout) -> int:
    """Return the ticks of the busiest worker.

    They are of its ops, and of all-reduces and optimizer steps of the layers it holds.
    """
    load = {
        worker: sum_over_ranges(given.costs.prefix_sums.closing, ranges)
        for worker, ranges in layout.holds.items()
    }
    for route in layout.routes.values():
        for layers, worker in route:
            load[worker] += given.slice_ticks(layers, worker)
    return max(load.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group", action="append")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--room", choices=("tight", "roomy"), default="tight")
    parser.add_argument("--loads", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    rows: dict[str, dict[str, float]] = {}
    groups: dict[str, list[Result]] = defaultdict(list)
    chosen = (
        instance
        for instance in instances(options.room)
        if not options.group or instance.group in options.group
    )
    for instance in itertools.islice(chosen, options.offset, None, options.every):
        given = build_layered_problem(instance.job, instance.failed, AllowedLayouts(layers="move"))
        bound = work_bound(given)
        try:
            loads = {
                layout.kind: longest_load(given, layout) / bound
                for layout in generate_layouts(given)
            }
        except LookupError as error:
            console.print(f"{instance.name}: no layout: {error}", highlight=False)
            continue
        row = {"load": min(loads.values()), "bound": period_bound(given).ticks / bound, **loads}
        if not options.loads:
            row["period"] = _planned(instance, options.time_limit) / (
                bound * tick_of_layers(instance.job)
            )
        rows[instance.name] = row
        value = row.get("period", row["load"])
        groups[instance.group].append(Result(value, row["bound"]))
        missed = GOAL if value <= LIMIT else LIMIT
        verdict = "" if value <= GOAL else f"  above {missed}"
        console.print(
            f"{instance.name:60} {value:.3f}  (bound {row['bound']:.3f}, least load "
            f"{row['load']:.3f}){verdict}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(_table(groups))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    few = groups["1 down"] + groups["2 down"]
    sys.exit(bool(few) and sum(result.value <= GOAL for result in few) < 0.9 * len(few))


def tick_of_layers(job: Job) -> float:
    """Return the seconds of a tick in the problem of a layout."""
    return float(choose_tick(job, layer_costs(job)))


def _planned(instance: Instance, seconds: float) -> float:
    """Return the period in seconds, or infinity if there is no plan."""
    try:
        schedule = plan_only(
            PlanOptions(layers="move", time_limit=seconds), instance.job, instance.failed
        ).schedule
    except NoPlanError:
        return float("inf")
    return schedule.seconds(schedule.period_ticks)


def _table(groups: dict[str, list[Result]]) -> Table:
    table = Table(
        "workers",
        "instances",
        f"within {GOAL}",
        f"within {LIMIT}",
        "median",
        "nine in ten",
        "worst",
        f"within {GOAL} of the bound",
    )
    for name, results in groups.items():
        ranked = sorted(result.value for result in results)
        shares = [bisect_right(ranked, goal) / len(ranked) for goal in (GOAL, LIMIT)]
        proven = sum(result.value <= GOAL * result.bound for result in results) / len(results)
        nine_in_ten = ranked[max(0, -(-9 * len(ranked) // 10) - 1)]
        values = (statistics.median(ranked), nine_in_ten, ranked[-1])
        table.add_row(
            name,
            str(len(results)),
            *map("{:.0%}".format, shares),
            *map("{:.3f}".format, values),
            f"{proven:.0%}",
        )
    return table


if __name__ == "__main__":
    main()
