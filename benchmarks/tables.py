"""Measure the cost of a table of schedules.

    python -m benchmarks.tables [--pipelines 128] [--stages 8] [--microbatches 16] [--share 0.1]
                                [--jobs N] [--method cp-sat] [--time-limit 5] [--out DIR]
                                [--json FILE] [--compare FILE]

Builds the table of all counts from 0 to `--share` of the workers, and prints seconds to build,
bytes, gaps, and the gain of storing programs once. `--json` stores the figures, `--compare` prints
them next to stored ones.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table as Grid

from benchmarks.jobs import uniform_text
from slipstream.planner.job.file import parse_job
from slipstream.planner.options import PlanOptions
from slipstream.planner.tables.build import BuiltTable, build_table
from slipstream.schedules.tables.table import Table


def build(options: argparse.Namespace, folder: Path) -> BuiltTable:
    text = uniform_text(
        options.pipelines, options.stages, options.microbatches, capacity=2 * options.stages
    )
    failures = int(options.share * options.pipelines * options.stages)
    how = PlanOptions(method=options.method, time_limit=options.time_limit)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("planning")
        return build_table(
            parse_job(text),
            text.encode(),
            folder,
            how,
            max_failures=failures,
            jobs=options.jobs,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def figures(built: BuiltTable, folder: Path) -> dict[str, float]:
    gaps = [row.gap for row in built.index.entries if row.gap is not None]
    table = Table.load(folder)
    stored = len(table.program_texts)
    used = sum(
        len(table.stored_entry(row.key).seats) for row in table.rows() if row.sha256 is not None
    )
    losses = [
        row.throughput / row.fault_scaled
        for row in built.index.entries
        if row.throughput is not None and row.fault_scaled is not None
    ]
    return {
        "entries": len(built.index.entries),
        "seconds": built.seconds,
        "megabytes": built.bytes / 1e6,
        "median gap": statistics.median(gaps),
        "worst gap": max(gaps),
        "programs": stored,
        "seats per program": used / stored,
        "least throughput / fault-scaled": min(losses),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("pipelines", 128),
        ("stages", 8),
        ("microbatches", 16),
        ("jobs", os.cpu_count() or 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--method", default="cp-sat")
    parser.add_argument("--time-limit", type=float, default=5.0)
    parser.add_argument(
        "--out", type=Path, help="Keep the table here; finished entries there are kept."
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        found = figures(build(options, folder), folder)
    kept = json.loads(options.compare.read_text()) if options.compare else {}
    grid = Grid(
        "figure",
        "value",
        *(["before"] if kept else []),
        title=f"{options.pipelines} pipelines x "
        f"{options.stages} stages, {options.method}, {options.jobs} processes",
    )
    for name, value in found.items():
        cells = [name, f"{value:.4g}"]
        if kept:
            cells.append(f"{kept[name]:.4g}" if name in kept else "")
        grid.add_row(*cells)
    Console().print(grid)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
