"""Measure how planning scales with the cluster: from 16 workers to 16,384.

    python -m benchmarks.growth [--smallest 16] [--largest 16384] [--stages 16]
                                [--failures 0 1 5 50] [--stage-layers 8] [--layers fixed|move]
                                [--time-limit 10] [--json FILE]

There are 32 micro-batches per pipeline; F = I = W = 10, transfer 1, optimizer 5, room for 2 S
micro-batches. For each size and number of failures (each in another pipeline, stages in turn),
every plan is made in a separate process and checked. The columns are:

- pieces: different groups of pipelines, which are planned once each (see
  `planner.model.decompose`), and their ops;
- first: seconds to a plan by the list scheduler alone (`--layers move`: of the first layout,
  without search);
- gap after the time limit, seconds until then, and the peak memory of the process.

Each cell has wall-clock seconds, and below, in brackets, CPU seconds, which are fewer if other
programs use the machine.
"""

import argparse
import json
import multiprocessing
import resource
import time
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from benchmarks.jobs import uniform_job
from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.model.decompose import decompose
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.options import LAYERS, PlanOptions
from slipstream.planner.plan import plan_with
from slipstream.schedules.schedule import Worker

MICROBATCHES = 32
FAILURES = (0, 1, 5, 50)


def measure(
    pipelines: int, stages: int, layers: int, failures: int, options: PlanOptions
) -> dict[str, float]:
    """Measure one plan in this process."""
    big = uniform_job(
        pipelines,
        stages,
        MICROBATCHES,
        capacity=2 * stages,
        layers=[layers] * stages if layers else None,
    )
    failed = [Worker(index, index % stages) for index in range(failures)]
    problem = build_problem(big, failed)
    pieces = decompose(problem)
    began, used = time.monotonic(), time.process_time()
    plan = plan_with(options, big, failed)
    return {
        "pieces": len(pieces),
        "ops": sum(piece.problem.operation_count for piece in pieces),
        "seconds": time.monotonic() - began,
        "processor": time.process_time() - used,
        "gap": plan.schedule.gap,
        "bound": lower_bound(problem),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _apart(*given: object) -> dict[str, float]:
    """Measure one plan in a new process, whose peak memory is the plan's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, given)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smallest", type=int, default=16, help="workers")
    parser.add_argument("--largest", type=int, default=16384, help="workers")
    parser.add_argument("--failures", type=int, nargs="+", default=FAILURES)
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument(
        "--stage-layers", type=int, default=0, help="layers of each stage; 0: stages are not cut"
    )
    parser.add_argument("--layers", choices=LAYERS, default="fixed")
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    table = Table(
        "workers",
        "failures",
        "pieces",
        "ops planned",
        "ops in all",
        "first",
        "gap",
        "seconds",
        "gap",
        "ms / worker",
        "memory",
        title=f"{options.stages} stages, {MICROBATCHES} micro-batches",
    )
    rows = []
    pipelines = max(1, options.smallest // options.stages)
    while (workers := pipelines * options.stages) <= options.largest:
        for failures in options.failures:
            if failures >= pipelines:
                continue
            total = workers * MICROBATCHES * 3
            how = PlanOptions(layers=options.layers, time_limit=options.time_limit)
            quick = replace(
                how,
                method="greedy",
                time_limit=0.0 if options.layers == "move" else options.time_limit,
            )
            first = _apart(pipelines, options.stages, options.stage_layers, failures, quick)
            best = _apart(pipelines, options.stages, options.stage_layers, failures, how)
            rows.append({"workers": workers, "failures": failures, "first": first, "best": best})
            table.add_row(
                f"{workers:,}",
                str(failures),
                f"{first['pieces']:.0f}",
                f"{first['ops']:,.0f}",
                f"{total:,}",
                f"{first['seconds']:.2f} s",
                f"{first['gap']:.1%}",
                f"{best['seconds']:.1f}",
                f"{best['gap']:.2%}",
                f"{1000 * first['seconds'] / workers:.2f}",
                f"{max(first['megabytes'], best['megabytes']):,.0f} MB",
            )
            console.print(
                f"{workers:>6,} workers, {failures:>2} down: {first['seconds']:6.2f} s "
                f"({first['processor']:.2f}) {first['gap']:7.2%}, then {best['seconds']:5.1f} s "
                f"({best['processor']:.1f}) {best['gap']:7.2%}",
                highlight=False,
            )
        pipelines *= 4
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
