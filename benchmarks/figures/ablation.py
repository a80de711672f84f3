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
    ("re-routing", "fused", "synchronous"), ("+ split backward", "split", "synchronous"),
    ("+ staggered optimizer", "split", "staggered"))
OURS = "this planner"


def shares(microbatches: int) -> dict[str, list[float]]:
    """Return the throughput relative to 1F1B without failures, by step and number of failures."""
    throughputs = Throughputs(published.published_job("6.7B", microbatches))
    fault_free = throughputs.one_f_one_b_rate(published.PIPELINES)
    downs = [spread_over_stages(count, published.STAGES) for count in FAILURES]
    found = {name: [throughputs.round_robin_rate(down, backward, optimizer) / fault_free for down in downs]
             for name, backward, optimizer in STEPS}
    return found | {OURS: [throughputs.planned_rate(down) / fault_free for count in FAILURES
                           if (down := throughputs.normal_form(count)) is not None]}


def reproduce(progress: CountCallback) -> Figure:
    """Compute each step without the restriction that healthy workers run 1F1B, to show the gain of the step."""
    found = []
    for index, microbatches in enumerate(published.MICROBATCHES):
        found.append(shares(microbatches))
        progress(index + 1, len(published.MICROBATCHES))
    nominal = published.MICROBATCHES.index(published.NOMINAL)
    series = [published.band(name, [one[name] for one in found], nominal) for name in found[0]]
    rows: list[tuple[Cell, ...]] = [
        (count, *(round(one.values[index] or 0.0, 4) for one in series)) for index, count in enumerate(FAILURES)]
    first = {one.name: one.values[0] or 0.0 for one in series}
    return Figure(
        name="ablation", title="The ideas one by one, 6 x 4 workers", kind="bars", x_label="failed workers",
        y_label="throughput / fault-free 1F1B", x=tuple(map(str, FAILURES)), series=tuple(series),
        header=("failed", *(one.name for one in series)), rows=tuple(rows),
        findings={f"{name}, 1 failed": value for name, value in first.items()},
        assumptions=(*assumptions(), "failures one a stage, then two; re-routed round-robin but by this planner; "
                     "re-routing with the memory of 1F1B"))
