"""The ideas one by one: re-routing, then split backward, then staggered optimizer; 24 GPUs."""

from planner.fleet.figures import published
from planner.fleet.figures.failures import assumptions
from planner.fleet.figures.figure import Cell, Figure, Tell, band
from planner.fleet.speeds import Speeds, spread
from schedules.schedule import BackwardMode, OptimizerMode

FAILURES = (1, 2, 4, 5, 8)
STEPS: tuple[tuple[str, BackwardMode, OptimizerMode], ...] = (
    ("re-routing", "fused", "synchronous"), ("+ split backward", "split", "synchronous"),
    ("+ staggered optimizer", "split", "staggered"))
OURS = "this planner"


def shares(microbatches: int) -> dict[str, list[float]]:
    """Throughput over that of 1F1B without failures, by step and number of failures."""
    speeds = Speeds(published.published_job("6.7B", microbatches))
    whole = speeds.usual(published.PIPELINES)
    downs = [spread(count, published.STAGES) for count in FAILURES]
    found = {name: [speeds.round_robin(down, backward, optimizer) / whole for down in downs]
             for name, backward, optimizer in STEPS}
    return found | {OURS: [speeds.planned(target) / whole for count in FAILURES
                           if (target := speeds.target(count)) is not None]}


def reproduce(tell: Tell) -> Figure:
    """Each step without the limit that healthy workers run 1F1B, so that one sees what the step itself is worth."""
    found = []
    for index, microbatches in enumerate(published.MICROBATCHES):
        found.append(shares(microbatches))
        tell(index + 1, len(published.MICROBATCHES))
    nominal = published.MICROBATCHES.index(published.NOMINAL)
    series = [band(name, [one[name] for one in found], nominal) for name in found[0]]
    rows: list[tuple[Cell, ...]] = [
        (count, *(round(one.values[index] or 0.0, 4) for one in series)) for index, count in enumerate(FAILURES)]
    first = {one.name: one.values[0] or 0.0 for one in series}
    return Figure(
        name="ablation", title="The ideas one by one, 6 x 4 workers", kind="bars", x_label="failed workers",
        y_label="throughput / fault-free 1F1B", x=tuple(map(str, FAILURES)), series=tuple(series),
        header=("failed", *(one.name for one in series)), rows=tuple(rows),
        findings={f"{name}, 1 failed": value for name, value in first.items()},
        assumptions=(*assumptions(), "failures one a stage, then two; orphans dealt round-robin but by this planner; "
                     "re-routing with the memory of 1F1B"))
