"""What each layer of the model costs: a stage's times and memory, divided over its layers.

A stage's value is the sum over its layers. `[layers]` says how it is divided: in proportion to the values there, evenly
where it has none.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from slipstream.planner.job.file import Job, JobError
from slipstream.schedules.schedule import Worker


class LayerSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """One value for each of the L layers of the model; times in seconds, memory in the job's unit."""

    forward: tuple[Fraction, ...]
    backward_input: tuple[Fraction, ...]
    backward_weight: tuple[Fraction, ...]
    optimizer: tuple[Fraction, ...]
    all_reduce: tuple[Fraction, ...]
    activation: tuple[Fraction, ...]
    """0 without `[memory]`; so is the next."""
    weight_stash: tuple[Fraction, ...]
    weights: tuple[Fraction, ...]
    """0 where the job does not say; so is the next."""
    recomputed: tuple[Fraction, ...]


def layer_costs(job: Job) -> LayerSeconds:
    """The cost of each layer, 0..L-1: exact, so that the layers of a stage add up to the stage.

    Without `placement.layers` every stage of a chain is one layer. Raises JobError where a stage has no layer: its
    costs belong to none.
    """
    counts = layer_counts(job)
    if not all(counts):
        raise JobError(f"placement.layers gives stage {counts.index(0)} no layer; expected at least one for each, "
                       "where stages are cut or layers moved")
    nothing = (0.0,) * job.depth
    time, memory = job.time, job.memory

    def divided(key: str, stages: tuple[float, ...]) -> tuple[Fraction, ...]:
        return _divided(stages[:job.depth], counts, getattr(job.layer_values, key) if job.layer_values else None)

    return LayerSeconds(
        **{key: divided(key, getattr(time, key))
           for key in ("forward", "backward_input", "backward_weight", "optimizer", "all_reduce")},
        **{key: divided(key, (getattr(memory, key) if memory else ()) or nothing)
           for key in ("activation", "weight_stash", "weights", "recomputed")})


def layer_counts(job: Job) -> tuple[int, ...]:
    """Layers of each stage of a chain."""
    return (1,) * job.depth if job.layers is None else job.layers[:job.depth]


@lru_cache(maxsize=4096)
def exact(value: float) -> Fraction:
    """The decimal number that the user wrote, not the binary one that stands for it."""
    return Fraction(repr(value))


def ratio(one: float, other: float) -> Fraction:
    """Of two ticks or units, which were rounded to floats: a ratio of numbers that a file can hold."""
    if one < other:
        return 1 / ratio(other, one)
    return Fraction(one / other).limit_denominator(10**6)


def added(one: float, other: float) -> float:
    """The sum of the decimal numbers that the user wrote, so that ticks and units stay coarse."""
    return float(exact(one) + exact(other))


@lru_cache(maxsize=256)
def _divided(stages: tuple[float, ...], counts: tuple[int, ...],
             values: tuple[float, ...] | None) -> tuple[Fraction, ...]:
    """Each stage's value over its layers, in proportion to `values`, which are by layer; evenly where these are 0."""
    divided: list[Fraction] = []
    for stage, count in zip(stages, counts, strict=True):
        first = len(divided)
        shares = [Fraction(1)] * count if values is None else [exact(value) for value in values[first:first + count]]
        if not any(shares):
            shares = [Fraction(1)] * count
        divided += [exact(stage) * share / sum(shares) for share in shares]
    return tuple(divided)


# --- Optimizer state that holders share, while some are down ----------------------------------------------------------


COPIES = 2
"""Of each part: the owner's and its buddy's."""
FINE = 1000
"""What is added is rounded up to such a part of the job's unit: thirds of a byte would need a very fine one."""


def share(holders: int) -> Fraction:
    """What each of so many holders keeps of the whole."""
    return min(Fraction(1), Fraction(COPIES, holders))


def with_shared_state(job: Job, failed: Sequence[Worker]) -> Job:
    """A job while some workers are down: whoever holds their stages keeps more state, and has that much less room.

    Layers that move are taken to have as many holders as their stage has left.
    """
    memory = job.memory
    if memory is None or not memory.state or not failed:
        return job
    weights, less = list(memory.weights), [0.0] * job.stages
    for stage, state in enumerate(memory.state):
        columns = [column for other, column in enumerate(job.columns) if other % job.depth == stage % job.depth]
        holders = job.pipelines * len(columns)
        left = max(1, holders - sum(columns.count(worker.column) for worker in failed))
        more = math.ceil(FINE * exact(state) * (share(left) - share(holders))) / FINE
        less[job.columns[stage]] += more
        if weights:
            weights[stage] = added(weights[stage], more)
    return replace(job, memory=replace(
        memory, weights=tuple(weights),
        capacity=tuple(added(room, -more) for room, more in zip(memory.capacity, less, strict=True)),
        capacity_of=tuple((worker, added(room, -less[worker.column])) for worker, room in memory.capacity_of)))
