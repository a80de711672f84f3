"""Compute the cost of each layer: a stage's times and memory, divided over its layers.

A stage's value is the sum over its layers. The `[layers]` table says how to divide it: in
proportion to the values there, or evenly if it has none.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from slipstream.planner.job.file import Job, JobError
from slipstream.schedules.schedule import Worker


class ExactLayerCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs with one value per layer of the model.

    Times are in seconds, memory in the job's unit.
    """

    forward: tuple[Fraction, ...]
    backward_input: tuple[Fraction, ...]
    backward_weight: tuple[Fraction, ...]
    optimizer: tuple[Fraction, ...]
    all_reduce: tuple[Fraction, ...]
    activation: tuple[Fraction, ...]
    """Memory held from F to I of a micro-batch, by layer.

    Like `weight_stash`, 0 in a job without `[memory]`.
    """
    weight_stash: tuple[Fraction, ...]
    weights: tuple[Fraction, ...]
    """Memory of parameters, gradients, optimizer state and undo copies, by layer.

    Like `recomputed`, 0 if not in the job.
    """
    recomputed: tuple[Fraction, ...]


def layer_costs(job: Job) -> ExactLayerCosts:
    """Return the exact cost of each layer of a job, in order.

    Those of a stage add up to the stage's. Without `placement.layers`, every stage counts as one
    layer. Raises JobError if a stage has no layer, because its costs then belong to none.
    """
    counts = layer_counts(job)
    if not all(counts):
        raise JobError(
            f"placement.layers gives stage {counts.index(0)} no layer; expected at least one for "
            "each, if stages are cut or layers moved"
        )
    nothing = (0.0,) * job.depth
    time, memory = job.time, job.memory

    def divided(key: str, stages: tuple[float, ...]) -> tuple[Fraction, ...]:
        values = getattr(job.layer_values, key) if job.layer_values else None
        return _divide_over_layers(stages[: job.depth], counts, values)

    costs = {}
    for key in ("forward", "backward_input", "backward_weight", "optimizer", "all_reduce"):
        costs[key] = divided(key, getattr(time, key))
    for key in ("activation", "weight_stash", "weights", "recomputed"):
        costs[key] = divided(key, (getattr(memory, key) if memory else ()) or nothing)
    return ExactLayerCosts(**costs)


def layer_counts(job: Job) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage that a micro-batch passes.

    1 each if the job does not say.
    """
    return (1,) * job.depth if job.layers is None else job.layers[:job.depth]


@lru_cache(maxsize=4096)
def exact_decimal(value: float) -> Fraction:
    """Return a float as an exact fraction of the decimal that was written for it.

    1/10 for 0.1.
    """
    return Fraction(repr(value))


MOST_PARTS = 10**6
"""Largest number of parts into which a unit is divided to express another one."""
FLOAT_ROUNDING = Fraction(1, 2**50)
"""Relative difference of two floats that may be the same number, rounded twice."""


def limited_ratio(numerator: float, denominator: float) -> Fraction:
    """Return `numerator` / `denominator`, two lengths of ticks or sizes of units, as a fraction.

    It is rounded so that its smaller number (numerator or denominator) is at most a million.
    """
    if numerator < denominator:
        return 1 / limited_ratio(denominator, numerator)
    return Fraction(numerator / denominator).limit_denominator(MOST_PARTS)


def memory_ratio(coarse: float, fine: float) -> Fraction:
    """Return `coarse` / `fine`, two units of memory of which the second is finer.

    The ratio is as that of `limited_ratio`. Unless it is exact but for the rounding of floats, it
    is rounded up: then layers, in the finer unit, need no more than the slices that they are part
    of.
    """
    exact, near = Fraction(coarse) / Fraction(fine), limited_ratio(coarse, fine)
    if near >= exact * (1 - FLOAT_ROUNDING) or exact < 1:
        return near
    # The next larger fraction with at most so many parts: of neighbours p/q < p'/q', p'q - pq' is
    # 1.
    part, parts = near.as_integer_ratio()
    inverse = pow(part, -1, parts) if parts > 1 else 0
    finer = MOST_PARTS - (MOST_PARTS + inverse) % parts
    return Fraction(1 + part * finer, finer * parts)


def add_exactly(first: float, second: float) -> float:
    """Return the sum of two numbers added as decimals (0.1 + 0.2 is 0.3).

    So ticks and units stay coarse.
    """
    return float(exact_decimal(first) + exact_decimal(second))


@lru_cache(maxsize=256)
def _divide_over_layers(stages: tuple[float, ...], counts: tuple[int, ...],
                        values: tuple[float, ...] | None) -> tuple[Fraction, ...]:
    """Return values of all layers in proportion to their `values`.

    Each stage's value in `stages` is divided over its layers. The argument `counts` has the number
    of layers of each stage. The value is divided evenly if `values` is None, or has only zeros for
    the layers of that stage.
    """
    divided: list[Fraction] = []
    for stage, count in zip(stages, counts, strict=True):
        first = len(divided)
        shares: list[Fraction] = []
        if values is not None:
            shares = [exact_decimal(value) for value in values[first : first + count]]
        if not any(shares):
            shares = [Fraction(1)] * count
        divided += [exact_decimal(stage) * share / sum(shares) for share in shares]
    return tuple(divided)


# --- Optimizer state that holders share, while some are down --------------------------------------


STATE_COPIES = 2
"""Number of members that hold each part of sharded optimizer state.

Its owner and its buddy.
"""
ROUNDING_PARTS = 1000
"""Number of steps of a unit of memory to which added memory is rounded up.

Thirds of a byte would need a very fine unit.
"""


def held_state_share(holders: int) -> Fraction:
    """Return the share of a stage's sharded optimizer state that each holder keeps.

    There are `holders` workers. Each has its own part and copies of others' parts (as their buddy).
    """
    return min(Fraction(1), Fraction(STATE_COPIES, holders))


def with_shared_state(job: Job, failed: Sequence[Worker]) -> Job:
    """Return a copy of the job in which workers have less room for activations.

    They also keep the sharded state of failed ones. A layer that moves is assumed to have as many
    holders as its stage has left.
    """
    memory = job.memory
    if memory is None or not memory.state or not failed:
        return job
    weights, taken = list(memory.weights), [0.0] * job.stages
    for stage, state in enumerate(memory.state):
        columns = [
            column
            for other, column in enumerate(job.columns)
            if other % job.depth == stage % job.depth
        ]
        holders = job.pipelines * len(columns)
        live = max(1, holders - sum(columns.count(worker.column) for worker in failed))
        extra = math.ceil(ROUNDING_PARTS * exact_decimal(state)
                          * (held_state_share(live) - held_state_share(holders))) / ROUNDING_PARTS
        taken[job.columns[stage]] += extra
        if weights:
            weights[stage] = add_exactly(weights[stage], extra)
    capacity = tuple(
        add_exactly(room, -extra) for room, extra in zip(memory.capacity, taken, strict=True)
    )
    capacity_of = tuple(
        (worker, add_exactly(room, -taken[worker.column])) for worker, room in memory.capacity_of
    )
    return replace(
        job,
        memory=replace(
            memory, weights=tuple(weights), capacity=capacity, capacity_of=capacity_of
        ),
    )
