"""How long planning takes against the time it was given.

    python -m benchmarks.time_limit [--limits 1 5]

Prints one row per job and limit: seconds taken, and by how much that is over. The checker's time is included.
"""

import argparse
import time

from rich.console import Console
from rich.table import Table

from benchmarks.jobs import uniform_job
from planner.plan import plan_job
from schedules.schedule import Worker

SHAPES = ((3, 4, 6), (4, 8, 16), (8, 8, 16), (8, 16, 32), (16, 8, 32), (32, 16, 32), (128, 8, 32))
"""Pipelines, stages, micro-batches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", type=float, nargs="+", default=[1.0, 5.0])
    limits = parser.parse_args().limits
    table = Table("job", "capacity", "limit", "taken", "over", "gap")
    for pipelines, stages, microbatches in SHAPES:
        for capacity in (stages, 2 * stages):
            job = uniform_job(pipelines, stages, microbatches, capacity=capacity)
            for limit in limits:
                began = time.monotonic()
                plan = plan_job(job, [Worker(1, stages // 2)], time_limit=limit)
                taken = time.monotonic() - began
                table.add_row(f"{pipelines}x{stages}x{microbatches}", str(capacity), f"{limit:g} s", f"{taken:.2f} s",
                              f"{max(0.0, taken - limit):.2f} s", f"{plan.schedule.gap:.2%}")
    Console().print(table)


if __name__ == "__main__":
    main()
