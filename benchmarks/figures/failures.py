"""Compute the throughput by number of failed workers: 24 GPUs, 6 pipelines x 4 stages."""

from collections.abc import Sequence

from benchmarks.figures import published
from slipstream.cli.figures.figure import Cell, Figure, Series
from slipstream.planner.budget import CountCallback
from slipstream.planner.simulation.costs import costs_for
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy import Policy, Scenario
from slipstream.planner.simulation.throughput import Throughputs

MOST = 9
KINDS: tuple[type[Policy], ...] = tuple(
    POLICIES[name]
    for name in (
        "slipstream",
        "slipstream-fixed",
        "recycle",
        "oobleck",
        "elaswave",
        "bamboo",
        "fault-scaled",
        "work-conserving",
    )
)


def steady_rates(microbatches: int) -> dict[str, list[float]]:
    """Return the samples per second of the 6.7B model, by policy and number of failures."""
    throughputs = Throughputs(
        published.published_job("6.7B", microbatches), settle_seconds=published.SETTLE_SECONDS
    )
    scenario = Scenario(throughputs, costs_for(6.7e9, published.STAGES), 3600.0)
    found = {}
    for kind in KINDS:
        found[kind.name] = [kind(scenario).steady_rate(failures) for failures in range(MOST + 1)]
    return found


def reproduce(progress: CountCallback) -> Figure:
    """Compute all policies in steady state. The band is over the number of micro-batches."""
    found = []
    for index, microbatches in enumerate(published.MICROBATCHES):
        found.append(steady_rates(microbatches))
        progress(index + 1, len(published.MICROBATCHES))
    nominal = published.MICROBATCHES.index(published.NOMINAL)
    series = []
    for kind in KINDS:
        rates_by_count = [rates[kind.name] for rates in found]
        series.append(
            published.band(kind.name, rates_by_count, nominal, is_reference=kind.is_reference)
        )
    # 350M points relative to their fault-free throughput, so that they can stand beside those of
    # 6.7B.
    scale = published.FAULT_FREE["6.7B"] / published.FAULT_FREE["350M"]
    points = {
        "ReCycle, published": published.RECYCLE_6_7B,
        "Oobleck's best, published": published.OOBLECK_6_7B_MAX,
        "Bamboo's best, published (350M, scaled)": tuple(
            scale * value for value in published.BAMBOO_350M_MAX
        ),
    }
    rows: list[tuple[Cell, ...]] = []
    for failures in range(MOST + 1):
        here = [round(band.values[failures] or 0.0, 3) for band in series]
        there = [round(values[failures], 3) for values in points.values()]
        rows.append((failures, *here, *there))
    return Figure(
        name="failures",
        title="Throughput by failed workers, 6 x 4 A100, 6.7B",
        kind="lines",
        x_label="failed workers",
        y_label="samples per second",
        x=tuple(map(float, range(MOST + 1))),
        series=(
            *series,
            *(Series(name=name, values=values, published=True) for name, values in points.items()),
        ),
        header=("failed", *(kind.name for kind in KINDS), *points),
        rows=tuple(rows),
        findings=_findings(found, nominal),
        assumptions=assumptions(),
    )


def _findings(found: Sequence[dict[str, list[float]]], nominal: int) -> dict[str, float]:
    differences = [
        abs(ours / theirs - 1)
        for ours, theirs in zip(found[nominal]["recycle"], published.RECYCLE_6_7B, strict=True)
    ]
    return {
        "least slipstream / recycle, any number of failures and micro-batches": min(
            ours / theirs
            for rates in found
            for ours, theirs in zip(rates["slipstream"], rates["recycle"], strict=True)
        ),
        "mean distance of simulated to published recycle": sum(differences) / len(differences),
        "mean slipstream / work-conserving": sum(
            ours / limit
            for ours, limit in zip(
                found[nominal]["slipstream"], found[nominal]["work-conserving"], strict=True
            )
        )
        / (MOST + 1),
    }


def assumptions() -> tuple[str, ...]:
    """Return the assumptions about what is not published about the job."""
    counts = ", ".join(map(str, published.MICROBATCHES))
    return (
        f"micro-batches a pipeline are not published: {counts} make the band, {published.NOMINAL} "
        "(4 S, as Oobleck plans) the line",
        "stage times are not published: F = I = W on all stages, as in the worked example, an "
        "optimizer step as long as a forward, transfers hidden, memory unlimited; scaled so that "
        "1F1B without failures makes the published samples per second",
        published.SOURCE,
    )
