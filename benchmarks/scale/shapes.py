"""Define a job for a number of workers, and what node 0 and workers know.

It has the first schedule, too.
"""

from pathlib import Path

from benchmarks.jobs import uniform_job
from slipstream.planner.job.file import Job
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.runtime.failure_domains import divide_workers_by_node
from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.state.parts import ElementCounts
from slipstream.schedules import codec
from slipstream.schedules.schedule import Schedule, Worker

SECRET = Secret(b"of a run that trains nothing, 32 B")
WORKERS_A_NODE = 8
LAYERS_A_STAGE = 2
ELEMENTS = ElementCounts(10**8)
"""Number of elements of each layer."""


def grid_of(workers: int) -> tuple[int, int]:
    """Return the number of pipelines and of stages.

    Raises ValueError if this number of workers makes no grid.
    """
    stages = 16
    if workers < 256:
        stages = 4 if workers < 64 else 8
    if workers < 2 * stages or workers % stages:
        raise ValueError(
            f"{workers} workers are no grid: give a multiple of {stages}, at least {2 * stages}"
        )
    return workers // stages, stages


def job_of(workers: int) -> Job:
    """Return a job with room for two micro-batches, and two layers, per stage.

    There are two micro-batches per stage.
    """
    pipelines, stages = grid_of(workers)
    return uniform_job(
        pipelines, stages, 2 * stages, capacity=2 * stages, layers=[LAYERS_A_STAGE] * stages
    )


def first_schedule(job: Job, folder: Path) -> Schedule:
    """Return the first schedule, planned by the list schedulers once for a folder."""
    path = folder / f"{job.name}.json"
    if not path.exists():
        codec.write(plan_only(PlanOptions(method="greedy", time_limit=1.0), job, ()).schedule, path)
    return codec.read(path)


def shares_of(workers: list[Worker]) -> list[list[Worker]]:
    """Return the workers of each node."""
    return [
        list(share)
        for share in divide_workers_by_node(workers, max(1, len(workers) // WORKERS_A_NODE), ())
    ]
