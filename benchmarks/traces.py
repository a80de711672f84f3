"""Compare policies for a job over availability traces, and with the limit.

    python -m benchmarks.traces [TRACE.csv ...] [--preset NAME --parameters N]
                                [--microbatches 8 16 32] [--seeds 5] [--settle-seconds 4]
                                [--json FILE]

The job is the published one, or a preset with other numbers of micro-batches (0: its own). For the
published availability trace and each given trace file, by number of micro-batches per pipeline, the
benchmark prints: the mean throughput of this planner relative to other policies and to the
work-conserving limit; and the share of that limit that memory and the fill of the pipelines allow
with all workers alive, which is proven. The means are over draws of which machines leave, or which
make the job's workers; if a job has more workers than a trace, each place of the trace represents
several. Costs are those of 6.7B parameters or of the given number; Bamboo's are those of 350M, in
its favour. Exit status 1 when this planner is behind a policy that it could follow.
"""

import argparse
import json
import sys
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.figures import published
from slipstream.planner.job.file import Job, parse_job
from slipstream.planner.job.presets import preset_text
from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.options import PlanOptions
from slipstream.planner.simulation.availability_trace import AvailabilityTrace, fit_to_job
from slipstream.planner.simulation.costs import costs_for
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy_runs import simulate_traces
from slipstream.planner.simulation.throughput import Throughputs
from slipstream.planner.simulation.trace_file import read_availability_trace

FOLLOWED = ("slipstream-fixed", "recycle")
"""Policies whose schedules this planner may choose, so that it must never be behind them."""
WIDTH = 160
"""Width of the table in a file, in columns; rich would cut it at 80."""
OTHERS = ("oobleck", "recycle", "elaswave", "malleus", "bamboo", "work-conserving")


def drawn(path: Path | None, job: Job, seeds: int) -> list[AvailabilityTrace]:
    """Return the different traces that result from fitting one to the job with several seeds."""
    distinct = {}
    for seed in range(seeds):
        if path is None:
            whole = published.published_trace(seed)
        else:
            whole = read_availability_trace(path, seed)
        trace = fit_to_job(whole, job.pipelines * job.stages, seed)
        distinct[trace.live, trace.changes] = trace
    return list(distinct.values())


def chosen_job(name: str | None, microbatches: int) -> Job:
    """Return the published job, or a preset, with this number of micro-batches per pipeline."""
    if name is None:
        return published.published_job("6.7B", microbatches)
    job = parse_job(preset_text(name), name)
    return (
        msgspec.structs.replace(job, microbatches=(microbatches,) * job.pipelines)
        if microbatches
        else job
    )


def means(
    traces: list[AvailabilityTrace], throughputs: Throughputs, parameters: float
) -> dict[str, float]:
    """Return the mean samples per second of each policy."""
    stages = throughputs.job.stages
    kinds = [
        POLICIES[name] for name in ("slipstream", "slipstream-fixed", *OTHERS) if name != "bamboo"
    ]
    found = simulate_traces(kinds, throughputs, costs_for(parameters, stages), traces)
    small = costs_for(published.PARAMETERS["350M"], stages)
    found |= simulate_traces([POLICIES["bamboo"]], throughputs, small, traces)
    return {name: float(np.mean(values)) for name, values in found.items()}


def most_of_the_limit(throughputs: Throughputs) -> float:
    """Return an upper bound for plans with all workers and layers in place.

    It is a share of the work-conserving limit.
    """
    problem = PlanOptions().make_problem(throughputs.job)
    return (
        throughputs.samples
        / (lower_bound(problem) * problem.tick_seconds)
        / throughputs.work_conserving_rate(throughputs.workers)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--preset")
    parser.add_argument("--parameters", type=float, default=published.PARAMETERS["6.7B"])
    parser.add_argument("--settle-seconds", type=float, default=published.SETTLE_SECONDS)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    grid = Table(
        "trace",
        "alive",
        "micro-batches",
        "over layers in place",
        *(f"over {name}" for name in OTHERS[:-1]),
        "of the limit",
        "all alive, at most",
    )
    rows = []
    for count in track(options.microbatches, console=Console(stderr=True)):
        throughputs = Throughputs(
            chosen_job(options.preset, count), settle_seconds=options.settle_seconds
        )
        bound = most_of_the_limit(throughputs)
        for path in (None, *options.traces):
            traces = drawn(path, throughputs.job, options.seeds)
            mean = means(traces, throughputs, options.parameters)
            ratios = {
                name: mean["slipstream"] / mean[name] for name in ("slipstream-fixed", *OTHERS)
            }
            alive = traces[0].mean_live_machines / traces[0].places
            rows.append(
                {
                    "trace": traces[0].name,
                    "alive": alive,
                    "micro-batches": max(throughputs.job.microbatches),
                    **ratios,
                    "at most": bound,
                }
            )
            grid.add_row(
                traces[0].name,
                f"{alive:.0%}",
                str(rows[-1]["micro-batches"]),
                *(f"{ratio:.3f}" for ratio in (*ratios.values(), bound)),
            )
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else WIDTH).print(grid)
    behind = [
        (row["trace"], row["micro-batches"], name)
        for row in rows
        for name in FOLLOWED
        if row[name] < 1
    ]
    for trace, count, name in behind:
        print(f"{trace}, {count} micro-batches: behind {name}, which this planner could follow")
    sys.exit(bool(behind))


if __name__ == "__main__":
    main()
