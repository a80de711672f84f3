"""The published job over availability traces: how far ahead of other policies, and how far from the limit.

    python -m benchmarks.traces [TRACE.csv ...] [--microbatches 8 16 32] [--seeds 5] [--json FILE]

Over the published availability trace and each trace file given, by number of micro-batches a pipeline: the mean
throughput of this planner over that of others, and over the work-conserving limit. The means are over draws of which
machines leave, or which make the job's 24. Costs are those of 6.7B parameters; Bamboo's those of 350M, in its favour.
"""

import argparse
import json
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from planner.fleet.availability_trace import AvailabilityTrace, fit_to_job
from planner.fleet.costs import costs_for
from planner.fleet.figures import published
from planner.fleet.policies import POLICIES
from planner.fleet.simulation import throughputs_over_traces
from planner.fleet.throughput import Throughputs
from planner.fleet.trace_file import read_availability_trace

OTHERS = ("oobleck", "recycle", "elaswave", "malleus", "bamboo", "work-conserving")


def drawn(path: Path | None, seeds: int) -> list[AvailabilityTrace]:
    workers = published.PIPELINES * published.STAGES
    if path is None:
        return [published.published_trace(seed) for seed in range(seeds)]
    return [fit_to_job(read_availability_trace(path, seed), workers, seed) for seed in range(seeds)]


@cache
def planned(microbatches: int) -> Throughputs:
    return Throughputs(published.published_job("6.7B", microbatches), settle_seconds=published.SETTLE_SECONDS)


def ratios(traces: list[AvailabilityTrace], microbatches: int) -> dict[str, float]:
    throughputs = planned(microbatches)
    kinds = [POLICIES[name] for name in ("slipstream", *OTHERS) if name != "bamboo"]
    costs = costs_for(published.PARAMETERS["6.7B"], published.STAGES)
    found = throughputs_over_traces(kinds, throughputs, costs, traces)
    small = costs_for(published.PARAMETERS["350M"], published.STAGES)
    found |= throughputs_over_traces([POLICIES["bamboo"]], throughputs, small, traces)
    means = {name: float(np.mean(values)) for name, values in found.items()}
    return {name: means["slipstream"] / means[name] for name in OTHERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [(path, count) for path in (None, *options.traces) for count in options.microbatches]
    rows = []
    for path, count in track(cases, console=Console(stderr=True)):
        traces = drawn(path, options.seeds)
        rows.append({"trace": traces[0].name, "alive": traces[0].mean_live / traces[0].places, "micro-batches": count,
                     **ratios(traces, count)})
    grid = Table("trace", "micro-batches", *(f"over {name}" for name in OTHERS[:-1]), "of the limit")
    for row in rows:
        grid.add_row(str(row["trace"]), str(row["micro-batches"]), *(f"{row[name]:.3f}" for name in OTHERS))
    Console().print(grid)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
