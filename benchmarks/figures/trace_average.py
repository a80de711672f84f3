"""Compute the average throughput over the published availability trace, 24 GPUs."""

import numpy as np

from benchmarks.figures import published
from benchmarks.figures.failures import assumptions
from slipstream.cli.figures.figure import Cell, Figure, Series
from slipstream.planner.budget import CountCallback
from slipstream.planner.simulation.costs import costs_for
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy_runs import simulate_traces
from slipstream.planner.simulation.throughput import Throughputs

SEEDS = 5
"""Number of averaged draws of which workers leave."""
MODELS = ("6.7B", "350M")
RATIOS = {"6.7B": "oobleck", "350M": "bamboo"}


def averages(model: str, microbatches: int) -> dict[str, float]:
    """Return the mean samples per second by policy."""
    throughputs = Throughputs(
        published.published_job(model, microbatches), settle_seconds=published.SETTLE_SECONDS
    )
    costs = costs_for(published.PARAMETERS[model], published.STAGES)
    traces = [published.published_trace(seed) for seed in range(SEEDS)]
    by_policy = simulate_traces(list(POLICIES.values()), throughputs, costs, traces)
    return {name: float(np.mean(values)) for name, values in by_policy.items()}


def reproduce(progress: CountCallback) -> Figure:
    """Compute all policies. The range is over the number of micro-batches."""
    found: dict[str, list[dict[str, float]]] = {model: [] for model in MODELS}
    total = len(MODELS) * len(published.MICROBATCHES)
    for index, model in enumerate(MODELS):
        for number, microbatches in enumerate(published.MICROBATCHES):
            found[model].append(averages(model, microbatches))
            progress(index * len(published.MICROBATCHES) + number + 1, total)
    nominal = published.MICROBATCHES.index(published.NOMINAL)
    rows: list[tuple[Cell, ...]] = []
    for model in MODELS:
        for name in POLICIES:
            values = [rates[name] for rates in found[model]]
            there = published.AVERAGES[model].get(name)
            rows.append(
                (
                    model,
                    name,
                    there,
                    round(values[nominal], 3),
                    round(min(values), 3),
                    round(max(values), 3),
                )
            )
    return Figure(
        name="trace",
        title="Average over the published trace, 6 x 4 A100",
        kind="bars",
        x_label="",
        y_label="average throughput / fault-free 1F1B",
        x=tuple(POLICIES),
        series=tuple(band for model in MODELS for band in _series(model, found[model], nominal)),
        header=(
            "model",
            "policy",
            "published",
            f"simulated, {published.NOMINAL} micro-batches",
            "least",
            "most",
        ),
        rows=tuple(rows),
        findings=_findings(found),
        assumptions=(
            *assumptions(),
            f"which workers leave is not published: the mean of {SEEDS} draws",
            "the published averages are of real runs, with whatever their reconfigurations cost "
            "there",
        ),
    )


def _series(model: str, found: list[dict[str, float]], nominal: int) -> list[Series]:
    scale = published.FAULT_FREE[model]
    columns = []
    for name in POLICIES:
        columns.append([rates[name] / scale for rates in found])
    points = published.AVERAGES[model]
    # Not all policies were published.
    shares: list[float | None] = []
    for name in POLICIES:
        shares.append(points[name] / scale if name in points else None)
    return [
        Series(
            name=f"simulated, {model}",
            values=tuple(column[nominal] for column in columns),
            low=tuple(map(min, columns)),
            high=tuple(map(max, columns)),
        ),
        Series(
            name=f"published, {model}",
            published=True,
            values=tuple(shares),
        ),
    ]


def _findings(found: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    findings = {}
    for model, peer in RATIOS.items():
        there = published.AVERAGES[model]
        findings[f"recycle / {peer}, {model}, published"] = there["recycle"] / there[peer]
        for number, microbatches in enumerate(published.MICROBATCHES):
            rates = found[model][number]
            for ours in ("recycle", "slipstream"):
                findings[f"{ours} / {peer}, {model}, {microbatches} micro-batches"] = (
                    rates[ours] / rates[peer]
                )
    for number, microbatches in enumerate(published.MICROBATCHES):
        rates = found["6.7B"][number]
        key = f"slipstream / work-conserving, {microbatches} micro-batches"
        findings[key] = rates["slipstream"] / rates["work-conserving"]
    return findings
