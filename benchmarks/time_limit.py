"""Compare the time of planning with the time it was given.

    python -m benchmarks.time_limit [--limits 0.01 1 5] [--only PIPELINESxSTAGESxMICROBATCHES ...]

It may take at most a second or a fifth more, for any job. Prints one row per job and limit:
wall-clock and CPU seconds (CPU seconds are fewer if other programs use the machine), whether that
is within the limit, and what was planned: the whole iteration, blocks of fewer micro-batches, or
nothing, with the size that fits. All that a plan needs counts: building the problem, the search,
assembling, checking, and encoding the file.
"""

import argparse
import time

from rich.console import Console
from rich.table import Table

from benchmarks.jobs import uniform_job
from slipstream.planner.blockwise import TooLargeError
from slipstream.planner.compiled import ensure_compiled
from slipstream.planner.job.file import Job
from slipstream.planner.params import DEFAULTS
from slipstream.planner.plan import plan_job
from slipstream.schedules.codec import encode
from slipstream.schedules.schedule import Worker

SHAPES = (
    (3, 4, 6),
    (4, 8, 16),
    (8, 8, 16),
    (8, 16, 32),
    (16, 8, 32),
    (32, 16, 32),
    (128, 8, 32),
    (4, 8, 1024),
    (1, 1024, 16),
    (4, 8, 8192),
    (4, 8, 65_536),
)
"""Triples of pipelines, stages and micro-batches."""


def outcome(job: Job, limit: float) -> str:
    """Describe what was planned within the limit."""
    failed = [Worker(1, job.stages // 2)] if job.pipelines > 1 else []
    try:
        plan = plan_job(job, failed, time_limit=limit)
    except TooLargeError as error:
        return str(error).partition(": ")[2]
    encode(plan.schedule)
    blocks = (plan.evidence or "").startswith("planned as")
    gap = "no bound" if plan.schedule.gap is None else f"gap {plan.schedule.gap:.2%}"
    return gap + (f", {str(plan.evidence).partition(',')[0]}" if blocks else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limits", type=float, nargs="+", default=[0.01, 1.0, 5.0])
    parser.add_argument(
        "--only", nargs="+", default=["x".join(map(str, shape)) for shape in SHAPES]
    )
    options = parser.parse_args()
    ensure_compiled()
    table = Table("job", "limit", "taken", "processor", "kept", "outcome")
    for shape in options.only:
        pipelines, stages, microbatches = map(int, shape.split("x"))
        job = uniform_job(pipelines, stages, microbatches, capacity=2 * stages)
        for limit in options.limits:
            began, ran = time.monotonic(), time.process_time()
            found = outcome(job, limit)
            taken, busy = time.monotonic() - began, time.process_time() - ran
            kept = taken <= limit + max(
                DEFAULTS.blocks.grace_seconds, DEFAULTS.blocks.grace_share * limit
            )
            table.add_row(
                shape,
                f"{limit:g} s",
                f"{taken:.2f} s",
                f"{busy:.2f} s",
                "yes" if kept else "no",
                found,
            )
    Console().print(table)


if __name__ == "__main__":
    main()
