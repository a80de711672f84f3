"""Compare the bubble of plans, by memory, with published figures of zero bubble.

    python -m benchmarks.curves [--settings FILE] [--only TEXT ...] [--every N] [--offset N]
                                [--time-limit 10 | --steps N] [--json FILE] [--figure FILE.png]
                                [--brief]

Each setting is planned with one stage on each worker (ZB), and with two as a V (ZB-V), at each
memory. `--json` keeps the results after each point: with the same file, only missing points are
planned. `--only` takes the points whose names contain one of the texts, such as "V 16x48" or
"1.25x". `--settings` names a file of other settings, in the form of
planner/published/published_curves.json; `one_stage` and `v` may be left out. `--figure` draws the
curves and needs matplotlib. Exits with 1 if a plan is behind a published figure.
"""

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from slipstream.cli.figures.memory_curves import build_row
from slipstream.planner.published.memory_curves import (
    PUBLISHED,
    Point,
    Result,
    describe,
    iterate_points,
    measure,
    read_settings,
)

TIGHT = 1.5
"""Memory up to which the mean lead of V placements is printed separately."""


def load_results(path: Path | None) -> dict[str, Result]:
    """Return the results that an earlier run has kept in a file, by point."""
    if path is None or not path.exists():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Result])


def keep_results(path: Path | None, results: Mapping[str, Result]) -> None:
    """Write the results to a file, if one is given, as a whole."""
    if path is not None:
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(msgspec.to_builtins(results), indent=1) + "\n")
        part.replace(path)


def build_point_table(points: Sequence[Point], results: Mapping[str, Result]) -> Table:
    """Return a table with a row for each point."""
    table = Table("point", "ours", "published", "bound", "", "processor s")
    for point in points:
        table.add_row(*build_row(point, results[point.name]))
    return table


def summarise(points: Sequence[Point], results: Mapping[str, Result]) -> str:
    """Return a line: points behind, equal, proven and ahead, and the mean lead."""
    words = [describe(point, results[point.name]) for point in points]
    counts = ", ".join(
        f"{words.count(word)} {word}" for word in ("behind", "equal", "proven", "ahead")
    )
    leads = [
        100 * (point.published - results[point.name].bubble)
        for point in points
        if point.published is not None and point.placement == "V" and point.memory <= TIGHT
    ]
    lead = (
        f"; V up to {TIGHT:g}x: ahead by {statistics.mean(leads):.2f} points in the mean"
        if leads
        else ""
    )
    return f"{len(points)} points: {counts}{lead}"


def draw(points: Sequence[Point], results: Mapping[str, Result], path: Path) -> None:
    """Draw bubble over memory for each setting, ZB and V: ours, published and bound."""
    from matplotlib.figure import Figure  # the extra `plots`

    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.name.rpartition(" ")[0], []).append(point)
    columns = min(6, len(groups))
    rows = -(-len(groups) // columns)
    picture = Figure(figsize=(3 * columns, 2.4 * rows), layout="constrained")
    axes = picture.subplots(rows, columns, squeeze=False).ravel()
    for panel, (name, members) in zip(axes, groups.items(), strict=False):
        memory = [point.memory for point in members]
        published = []
        for point in members:
            published.append(math.nan if point.published is None else 100 * point.published)
        panel.plot(
            memory,
            [100 * results[point.name].bubble for point in members],
            color="#0b6e4f",
            label="Slipstream",
        )
        panel.plot(
            memory, published, "o", color="black", fillstyle="none", markersize=3, label="published"
        )
        panel.plot(
            memory,
            [100 * max(0.0, results[point.name].bound) for point in members],
            "--",
            color="#888888",
            label="lower bound",
        )
        panel.set_title(name, fontsize=9)
        panel.set_ylim(bottom=0)
    for panel in axes[len(groups) :]:
        panel.set_axis_off()
    picture.supxlabel("memory, as a multiple of that of 1F1B")
    picture.supylabel("bubble, %")
    picture.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False
    )
    picture.savefig(path)


def main() -> None:
    """Plan the points that are asked for, and print how they compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", type=Path, default=PUBLISHED)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--brief", action="store_true", help="print only the last line")
    options = parser.parse_args()
    settings = read_settings(options.settings)
    points = list(iterate_points(settings))
    if options.only:
        points = [point for point in points if any(map(point.name.__contains__, options.only))]
    points = points[options.offset :: options.every]
    console, results = Console(), load_results(options.json)
    for point in points:
        if point.name not in results:
            results[point.name] = measure(point, time_limit=options.time_limit, steps=options.steps)
            keep_results(options.json, results)
    if not options.brief:
        console.print(build_point_table(points, results))
    console.print(summarise(points, results), highlight=False, soft_wrap=True)
    if options.figure:
        draw(points, results, options.figure)
    raise SystemExit(any(describe(point, results[point.name]) == "behind" for point in points))


if __name__ == "__main__":
    main()
