"""Workers that go on as half their processes (`[training] degraded_ranks`): the memory that is left on each.

A process then stands for two ranks. It holds the shards of both, and for each micro-batch what both hold: of a rank's
memory, in which the job counts, it has half a device. Where optimizers keep parts of states, it has parameters and
gradients once as each rank has them, and once to compute with.
"""

from collections.abc import Collection

from msgspec.structs import replace

from planner.job.estimate import BYTES_HELD, BYTES_UNDO, BYTES_WHOLE
from planner.job.file import Job
from planner.job.layers import added
from planner.job.shared_state import share
from planner.model.from_job import build_problem
from planner.model.problem import NoPlanError
from schedules.schedule import Worker

STANDS_FOR = 2
"""Ranks that a process stands for."""
SLOWER = 2.0
"""Times as long, unless it is known better."""


def with_degraded(job: Job, degraded: Collection[Worker], *, slower: float = 1.0) -> Job:
    """The job while these workers are so. Their ops take so many times as long, where the job does not say how long.

    Raises NoPlanError where one has no room for a micro-batch of its stage.
    """
    if not degraded:
        return job
    able = degradable(job)
    for worker in degraded:
        if worker.column not in able:
            raise NoPlanError(f"worker {worker} cannot go on as half its ranks: there is no room for a micro-batch "
                              "beside twice the weights; it is as good as down")
    time, memory = job.time, job.memory
    if slower != 1.0:
        time = replace(time, slow=tuple(sorted((dict.fromkeys(degraded, slower) | dict(time.slow)).items())))
    if memory is not None:
        rooms = dict(memory.capacity_of) | {worker: _room(job, worker.column) for worker in degraded}
        memory = replace(memory, capacity_of=tuple(sorted(rooms.items())))
    return replace(job, time=time, memory=memory)


def degradable(job: Job) -> frozenset[int]:
    """The columns whose workers have room for a micro-batch then."""
    if job.memory is None:
        return frozenset(range(job.stages))
    problem = build_problem(job)
    assert problem.memory is not None
    unit = problem.memory.unit
    return frozenset(column for column in range(job.stages) if _room(job, column) >= unit * max(
        problem.least_room(stage) for stage in problem.grid.stages_of(column)))


def _room(job: Job, column: int) -> float:
    """Of a rank's memory, beside the stages of a column; less than 0 where their weights do not fit."""
    memory = job.memory
    assert memory is not None
    stages = [stage for stage, at in enumerate(job.columns) if at == column]
    weights = sum(memory.weights[stage] for stage in stages) if memory.weights else 0.0
    again = 0.0
    if memory.state:
        holders = job.pipelines * job.chains
        again = weights - sum(memory.state[stage] * share(holders) for stage in stages)
    elif job.training.get("shard_optimizer") or job.training.get("master_weights"):
        again = weights * BYTES_WHOLE / (BYTES_HELD + BYTES_UNDO)
    return float(f"{added(memory.capacity[column], weights) / STANDS_FOR - weights - again:.12g}")
