"""Workers that go on as half their processes (`[training] degraded_ranks`): the memory that is left on each.

A process then stands for two ranks. It holds the shards of both, and for each micro-batch what both hold: of a rank's
memory, in which the job counts, it has half a device. While it reduces and steps, the gradients of each rank are there
by themselves, too. Mostly it holds no micro-batch of these layers then; so it needs that room, but not besides.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import added, share
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import NoPlanError
from slipstream.schedules.schedule import Worker

STANDS_FOR = 2
"""Ranks that a process stands for."""
SLOWER = 2.0
"""Times as long, unless it is known better."""


def with_degraded(job: Job, degraded: Collection[Worker], *, slower: float = 1.0) -> Job:
    """The job while these workers are so. Their ops take so many times as long, where the job does not say how long.

    Raises NoPlanError where one has no room for a micro-batch of its stage, or for gradients on their way.
    """
    if not degraded:
        return job
    able = degradable(job)
    for worker in degraded:
        if worker.column not in able:
            raise NoPlanError(f"worker {worker} cannot go on as half its ranks: there is no room for a micro-batch, "
                              "or for gradients on their way, beside twice the weights; it is as good as down")
    time, memory = job.time, job.memory
    if slower != 1.0:
        time = replace(time, slow=tuple(sorted((dict.fromkeys(degraded, slower) | dict(time.slow)).items())))
    if memory is not None:
        rooms = dict(memory.capacity_of) | {worker: _room(job, worker.column) for worker in degraded}
        memory = replace(memory, capacity_of=tuple(sorted(rooms.items())))
    return replace(job, time=time, memory=memory)


def degradable(job: Job) -> frozenset[int]:
    """The columns whose workers have room then: for a micro-batch, and for gradients on their way."""
    if job.memory is None:
        return frozenset(range(job.stages))
    problem = build_problem(job)
    assert problem.memory is not None
    unit = problem.memory.unit
    return frozenset(column for column in range(job.stages) if _room(job, column) >= max(
        0.0 if _has_several(job, column) else _sizes(job, column).gradients,
        unit * max(problem.least_room(stage) for stage in problem.grid.stages_of(column))))


def _has_several(job: Job, column: int) -> bool:
    """Stages: then it may hold micro-batches of one of them while it reduces another."""
    return job.columns.count(column) > 1


def _room(job: Job, column: int) -> float:
    """Of a rank's memory, beside the stages of a column; less than 0 where their weights do not fit."""
    memory = job.memory
    assert memory is not None
    sizes, reserve = _sizes(job, column), memory.reserve[column] if memory.reserve else 0.0
    beside = sizes.weights + sizes.copies + reserve + (sizes.gradients if _has_several(job, column) else 0.0)
    return float(f"{added(added(memory.capacity[column], reserve), sizes.weights) / STANDS_FOR - beside:.12g}")


class _Sizes(NamedTuple):
    """What a rank holds of the stages of a column."""

    weights: float
    """All of it, where it has a process of its own."""
    gradients: float
    """Of that."""
    copies: float
    """Of the parameters that it steps itself: its process steps these, as it lays parameters out otherwise. Beside the
    weights, which have those that it keeps of a buddy's parameters; master weights are such copies already."""


def _sizes(job: Job, column: int) -> _Sizes:
    memory, training = job.memory, job.training
    assert memory is not None
    stages = [stage for stage, at in enumerate(job.columns) if at == column]
    weights = sum(memory.weights[stage] for stage in stages) if memory.weights else 0.0
    sharded, masters = bool(training.get("shard_optimizer")), bool(training.get("master_weights"))
    holders = job.pipelines * job.chains
    kept = float(share(holders)) if sharded else 1.0
    # Bytes an element: of the parameter, its gradient, what is stepped, and what the optimizer remembers.
    parameter, stepped = (2, 4) if masters else (4, 4)
    gradient = 2 if training.get("reduce_dtype") == "bf16" else 4
    slots = slots_of(job.training)
    state = (masters + slots + 1 + slots) * stepped  # with copies that undo a step, of what is stepped and remembered
    whole = weights * (parameter + gradient) / (parameter + gradient + kept * state)
    if memory.state:
        whole = weights - sum(memory.state[stage] for stage in stages) * kept
    return _Sizes(weights, whole * gradient / (parameter + gradient),
                  0.0 if masters else whole * parameter / (parameter + gradient) / (holders if sharded else 1))


def slots_of(training: Mapping[str, object]) -> int:
    """How many numbers the optimizer remembers of an element; one of the user's own is taken to be like AdamW."""
    if training.get("optimizer") == "sgd":
        return 1 if training.get("momentum") else 0
    return 3 if training.get("amsgrad") else 2
