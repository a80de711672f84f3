"""Compare throughput with ReCycle's by number of pipelines, with one, two and four failures.

With few replicas, re-routing with layers in place is expensive: a stage's live workers get D / (D -
1) of the work. Later systems, which move layers, measured 1.35 times ReCycle's throughput
(ElasWave, arXiv 2510.00606, 96 NPUs) and up to 1.355 times (Chameleon, called Odyssey before, arXiv
2508.21613v4, 32 cards).
"""

from itertools import product

from benchmarks.figures import published
from benchmarks.figures.scaling import job
from slipstream.cli.figures.figure import Cell, Figure, Series
from slipstream.planner.budget import CountCallback
from slipstream.planner.simulation.costs import costs_for
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy import Scenario
from slipstream.planner.simulation.throughput import Throughputs

PIPELINES = (2, 3, 4, 6, 8, 12, 16)
FAILURES = (1, 2, 4)
STAGES = 8
MICROBATCHES = 16
ELASWAVE = 1.35
CHAMELEON = 1.355
KINDS = ("slipstream", "slipstream-fixed", "elaswave", "oobleck", "work-conserving")


def ratios(pipelines: int) -> dict[tuple[str, int], float]:
    """Return the steady throughput relative to ReCycle's, by policy and number of failures."""
    throughputs = Throughputs(
        job(pipelines * STAGES, MICROBATCHES), settle_seconds=published.SETTLE_SECONDS
    )
    scenario = Scenario(throughputs, costs_for(), 3600.0)
    recycle = POLICIES["recycle"](scenario)
    return {
        (name, failures): POLICIES[name](scenario).steady_rate(failures)
        / recycle.steady_rate(failures)
        for name in KINDS
        for failures in FAILURES
    }


def reproduce(progress: CountCallback) -> Figure:
    """Compute a line for each number of failures, and the two published ratios."""
    found = []
    for done, pipelines in enumerate(PIPELINES, 1):
        found.append(ratios(pipelines))
        progress(done, len(PIPELINES))
    series = []
    for name, failures in product(("slipstream", "elaswave"), FAILURES):
        values = tuple(rates[name, failures] for rates in found)
        series.append(Series(name=f"{name}, {failures} failed", values=values))
    reported = [
        Series(name=f"{name}, published", values=(value,) * len(PIPELINES), is_reference=True)
        for name, value in (("ElasWave", ELASWAVE), ("Chameleon", CHAMELEON))
    ]
    rows: list[tuple[Cell, ...]] = []
    for pipelines, rates in zip(PIPELINES, found, strict=True):
        for failures in FAILURES:
            rounded = (round(rates[name, failures], 4) for name in KINDS)
            rows.append((pipelines, failures, *rounded))
    few = [
        rates["slipstream", failures]
        for pipelines, rates in zip(PIPELINES, found, strict=True)
        if pipelines <= 4
        for failures in FAILURES
    ]
    return Figure(
        name="replicas",
        title=f"Throughput over ReCycle's by pipelines of {STAGES} stages",
        kind="lines",
        x_label="pipelines",
        y_label="throughput / ReCycle's",
        x=tuple(map(float, PIPELINES)),
        series=(*series, *reported),
        header=("pipelines", "failed", *(f"{name} / recycle" for name in KINDS)),
        rows=tuple(rows),
        logarithmic_x=True,
        findings={
            "least slipstream / recycle, 2 to 4 pipelines": min(few),
            "largest slipstream / recycle, 2 to 4 pipelines": max(few),
        },
        assumptions=(
            f"{STAGES} stages, {MICROBATCHES} micro-batches a pipeline, F = I = W, optimizer as "
            "long as a forward, transfers hidden, memory unlimited; failures where they cost "
            "least; ReCycle and ElasWave as simulated here, the published ratios are of other jobs",
        ),
    )
