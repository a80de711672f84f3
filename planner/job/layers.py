"""Compute the cost of each layer: a stage's times and memory, divided over its layers.

A stage's value is the sum over its layers. The `[layers]` table says how to divide it: in proportion to the values
there, or evenly if it has none.
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
    """Costs with one value per layer of the model: times in seconds, memory in the job's unit."""

    forward: tuple[Fraction, ...]
    backward_input: tuple[Fraction, ...]
    backward_weight: tuple[Fraction, ...]
    optimizer: tuple[Fraction, ...]
    all_reduce: tuple[Fraction, ...]
    activation: tuple[Fraction, ...]
    """Activation memory of each layer. `activation` and `weight_stash` are 0 without `[memory]`."""
    weight_stash: tuple[Fraction, ...]
    weights: tuple[Fraction, ...]
    """Memory of each layer's parameters and state. `weights` and `recomputed` are 0 if the job does not say."""
    recomputed: tuple[Fraction, ...]


def layer_costs(job: Job) -> LayerSeconds:
    """Return the exact cost of each layer, 0..L-1, so that the layers of a stage add up to the stage.

    Without `placement.layers`, every stage of a chain is one layer. Raises JobError if a stage has no layer, because
    its costs then belong to none.
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
    """Return the number of layers of each stage of a chain."""
    return (1,) * job.depth if job.layers is None else job.layers[:job.depth]


@lru_cache(maxsize=4096)
def exact(value: float) -> Fraction:
    """Return the decimal number that the user wrote, not the binary number that approximates it."""
    return Fraction(repr(value))


def ratio(one: float, other: float) -> Fraction:
    """Return the ratio of two ticks or units that were rounded to floats, as a fraction that a file can hold."""
    if one < other:
        return 1 / ratio(other, one)
    return Fraction(one / other).limit_denominator(10**6)


def added(one: float, other: float) -> float:
    """Return the sum of the decimal numbers that the user wrote, so that ticks and units stay coarse."""
    return float(exact(one) + exact(other))


@lru_cache(maxsize=256)
def _divided(stages: tuple[float, ...], counts: tuple[int, ...],
             values: tuple[float, ...] | None) -> tuple[Fraction, ...]:
    """Divide each stage's value over its layers, in proportion to `values` of the layers, or evenly if these are 0."""
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
"""Copies of each part of sharded state: the owner's and its buddy's."""
FINE = 1000
"""Fractions of the job's unit to which added memory is rounded up: thirds of a byte would need a very fine unit."""


def share(holders: int) -> Fraction:
    """Return the share of the whole state that each of `holders` holders keeps."""
    return min(Fraction(1), Fraction(COPIES, holders))


def with_shared_state(job: Job, failed: Sequence[Worker]) -> Job:
    """Return the job while some workers are down: holders of their stages keep more state and have that much less room.

    A layer that moves is assumed to have as many holders as its stage has left.
    """
    memory = job.memory
    if memory is None or not memory.state or not failed:
        return job
    weights, taken = list(memory.weights), [0.0] * job.stages
    for stage, state in enumerate(memory.state):
        columns = [column for other, column in enumerate(job.columns) if other % job.depth == stage % job.depth]
        holders = job.pipelines * len(columns)
        live = max(1, holders - sum(columns.count(worker.column) for worker in failed))
        extra = math.ceil(FINE * exact(state) * (share(live) - share(holders))) / FINE
        taken[job.columns[stage]] += extra
        if weights:
            weights[stage] = added(weights[stage], extra)
    return replace(job, memory=replace(
        memory, weights=tuple(weights),
        capacity=tuple(added(room, -extra) for room, extra in zip(memory.capacity, taken, strict=True)),
        capacity_of=tuple((worker, added(room, -taken[worker.column])) for worker, room in memory.capacity_of)))
