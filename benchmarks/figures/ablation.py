"""Add the techniques one by one: re-routing, split backward, staggered optimizer; 24 GPUs."""

from benchmarks.figures import published
from benchmarks.figures.failures import assumptions
from slipstream.cli.figures.figure import Cell, Figure
from slipstream.planner.budget import CountCallback
from slipstream.planner.simulation.loads import spread_over_stages
from slipstream.planner.simulation.throughput import Throughputs
from slipstream.schedules.schedule import BackwardMode, OptimizerMode

FAILURES = (1, 2, 4, 5, 8)
STEPS: tuple[tuple[str, BackwardMode, OptimizerMode], ...] = (
    ("re-routing", "fused", "synchronous"),
    ("+ split backward", "split", "synchronous"),
    ("+ staggered optimizer", "split", "staggered"),
)
OURS = "this planner"


def shares(microbatches: int) -> dict[str, list[float]]:
    """Return the throughput relative to 1F1B without failures, by step and number of failures."""
    throughputs = Throughputs(published.published_job("6.7B", microbatches))
    fault_free = throughputs.one_f_one_b_rate(published.PIPELINES)
    downs = [spread_over_stages(count, published.STAGES) for count in FAILURES]
    found = {}
    for name, backward, optimizer in STEPS:
        rates = (throughputs.round_robin_rate(down, backward, optimizer) for down in downs)
        found[name] = [rate / fault_free for rate in rates]
    return found | {
        OURS: [
            throughputs.planned_rate(down) / fault_free
            for count in FAILURES
            if (down := throughputs.normal_form(count)) is not None
        ]
    }


def reproduce(progress: CountCallback) -> Figure:
    """Show the gain of each step, without requiring that healthy workers run 1F1B."""
    found = []
    for index, microbatches in enumerate(published.MICROBATCHES):
        found.append(shares(microbatches))
        progress(index + 1, len(published.MICROBATCHES))
    nominal = published.MICROBATCHES.index(published.NOMINAL)
    series = []
    for name in found[0]:
        series.append(published.band(name, [rates[name] for rates in found], nominal))
    rows: list[tuple[Cell, ...]] = []
    for index, count in enumerate(FAILURES):
        rows.append((count, *(round(band.values[index] or 0.0, 4) for band in series)))
    first = {band.name: band.values[0] or 0.0 for band in series}
    return Figure(
        name="ablation",
        title="The ideas one by one, 6 x 4 workers",
        kind="bars",
        x_label="failed workers",
        y_label="throughput / fault-free 1F1B",
        x=tuple(map(str, FAILURES)),
        series=tuple(series),
        header=("failed", *(band.name for band in series)),
        rows=tuple(rows),
        findings={f"{name}, 1 failed": value for name, value in first.items()},
        assumptions=(
            *assumptions(),
            "failures one a stage, then two; re-routed round-robin but by this planner; "
            "re-routing with the memory of 1F1B",
        ),
    )
