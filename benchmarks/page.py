"""Measure the time to draw a frame of the timeline page with 100,000 ops.

    python -m benchmarks.page [--pipelines 32] [--stages 8] [--microbatches 128] [--frames 60]
                              [--json FILE]

It runs in a headless Chromium without a GPU. The page shows a greedy plan with four workers down,
so that most pipelines differ. It is zoomed, panned and scrolled, one step per frame. Prints
milliseconds of drawing, and from one frame to the next. Exit status 1 when the median of a movement
is above 1000 / 60.
"""

import argparse
import json
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.jobs import uniform_job
from slipstream.cli.timeline_page import ShownSchedule, timeline_page
from slipstream.planner.plan import plan_job
from slipstream.schedules.schedule import Schedule, Worker
from tests.browser import Browser, find_browser

TARGET = 1000 / 60
MOVES = {
    "zoom in": "timeline.zoom(0.94, 900)",
    "pan": "timeline.pan(0.02)",
    "zoom out": "timeline.zoom(1.08, 500)",
    "scroll": "timeline.chart.scrollTop += 40",
    "rows by stage, zoom": "timeline.zoom(0.94, 700)",
    "followed, zoom": "timeline.zoom(i < frames / 2 ? 0.9 : 1.1, 700)",
}
BEFORE = {
    "rows by stage, zoom": "timeline.set('group', 'stage'); timeline.whole();",
    "followed, zoom": "timeline.whole(); timeline.find('1.3');",
}
SCRIPT = """(async () => {
    const frames = %d, gaps = [];
    %s
    await new Promise(requestAnimationFrame);
    timeline.drawn.length = 0;
    let last = performance.now();
    for (let i = 0; i < frames; i++) {
        %s;
        await new Promise(requestAnimationFrame);
        gaps.push(performance.now() - last);
        last = performance.now();
    }
    return { drawn: timeline.drawn, gaps };
})()"""


def plan(options: argparse.Namespace) -> Schedule:
    down = [
        Worker(pipeline % options.pipelines, stage % options.stages)
        for pipeline, stage in ((1, 2), (5, 3), (9, 0), (20, 7))
    ]
    job = uniform_job(
        options.pipelines, options.stages, options.microbatches, capacity=2 * options.stages
    )
    return plan_job(job, down, method="greedy").schedule


def measure(schedule: Schedule, frames: int) -> dict[str, dict[str, float]]:
    browser = Browser(find_browser())
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.html"
            path.write_bytes(timeline_page([ShownSchedule("plan", schedule)]))
            with browser.open(path, width=1600, height=1000) as page:
                page.frame()
                found = {
                    name: page.js(SCRIPT % (frames, BEFORE.get(name, ""), move))
                    for name, move in MOVES.items()
                }
    finally:
        browser.close()
    quantiles: dict[str, dict[str, float]] = {}
    for name, times in found.items():
        quantiles[name] = {}
        for what, key in (("draw", "drawn"), ("frame", "gaps")):
            ranked = sorted(times[key])
            for share in (0.5, 0.95):
                place = min(len(ranked) - 1, int(len(ranked) * share))
                quantiles[name][f"{what} {share:.0%}"] = ranked[place]
    return quantiles


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pipelines", type=int, default=32)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=128)
    parser.add_argument("--frames", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    schedule = plan(options)
    found = measure(schedule, options.frames)
    table = Table(f"{sum(1 for _ in schedule.all_ops()):,} ops, ms", *next(iter(found.values())))
    for name, row in found.items():
        table.add_row(name, *(f"{value:.1f}" for value in row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return int(any(row["draw 50%"] > TARGET for row in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
