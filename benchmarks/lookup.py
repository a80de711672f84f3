"""Measure the time of lookups in a loaded table, and of full checks.

    python -m benchmarks.lookup [--pipelines 16] [--stages 8] [--microbatches 16] [--failures 12]
                                [--lookups 500] [--json FILE]

Lookups are of random sets of failures. Each schedule is relabelled. The table holds greedy plans,
because the cost of a lookup does not depend on their quality. Times are in milliseconds.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid

from benchmarks.jobs import uniform_text
from slipstream.planner.job.file import parse_job
from slipstream.planner.options import PlanOptions
from slipstream.planner.tables.build import build_table
from slipstream.schedules.check import check
from slipstream.schedules.tables.pattern import dead_column
from slipstream.schedules.tables.table import Table


def milliseconds(times: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(times) * 1e3,
        "99 %": statistics.quantiles(times, n=100)[98] * 1e3,
        "worst": max(times) * 1e3,
    }


def measure(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    began = time.perf_counter()
    table = Table.load(folder)
    loaded = time.perf_counter()
    table.verify()
    verified = time.perf_counter()
    gc.collect()
    # Else the collector now and then walks all of ortools' objects (70 ms) during some lookup.
    gc.freeze()
    workers, chance = list(table.basis.grid.workers()), random.Random(0)
    lookups, settled, checks, some = [], [], [], []
    while len(lookups) < options.lookups:
        failed = chance.sample(workers, chance.randint(1, options.failures))
        if dead_column(failed, table.basis.grid) is not None:
            continue
        start = time.perf_counter()
        found = table.lookup(failed, roles_move=True)
        lookups.append(time.perf_counter() - start)
        assert found is not None
        start = time.perf_counter()
        table.lookup(failed, settled=True)
        settled.append(time.perf_counter() - start)
        if len(lookups) % max(1, options.lookups // 20) == 0:
            some.append(found.schedule)
    for schedule in some:
        start = time.perf_counter()
        assert check(schedule) == []
        checks.append(time.perf_counter() - start)
    return {
        "load": {"worst": (loaded - began) * 1e3},
        "verify all entries": {"worst": (verified - loaded) * 1e3},
        "lookup": milliseconds(lookups),
        "lookup, settled": milliseconds(settled),
        "full check, for comparison": milliseconds(checks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("pipelines", 16),
        ("stages", 8),
        ("microbatches", 16),
        ("failures", 12),
        ("lookups", 500),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    text = uniform_text(
        options.pipelines, options.stages, options.microbatches, capacity=2 * options.stages
    )
    with tempfile.TemporaryDirectory() as folder:
        build_table(
            parse_job(text),
            text.encode(),
            Path(folder),
            PlanOptions(method="greedy", time_limit=0.5),
            max_failures=options.failures,
            jobs=2,
        )
        found = measure(Path(folder), options)
    grid = Grid(
        "milliseconds",
        "median",
        "99 %",
        "worst",
        title=f"{options.pipelines} pipelines x {options.stages} "
        f"stages, up to {options.failures} failures, {options.lookups} lookups",
    )
    for name, times in found.items():
        columns = ("median", "99 %", "worst")
        texts = {column: f"{value:.2f}" for column, value in times.items()}
        grid.add_row(name, *(texts.get(column, "") for column in columns))
    Console().print(grid)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
