"""Compute the cost of each layer: a stage's times and memory, divided over its layers.

A stage's value is the sum over its layers. It is divided in proportion to the values of the
`[layers]` table, or evenly if there are none.
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
    """Times in seconds and memory in the job's unit, with one value per layer."""

    forward: tuple[Fraction, ...]
    backward_input: tuple[Fraction, ...]
    backward_weight: tuple[Fraction, ...]
    optimizer: tuple[Fraction, ...]
    all_reduce: tuple[Fraction, ...]
    activation: tuple[Fraction, ...]
    """Memory held from F to I of a micro-batch; 0, like `weight_stash`, without `[memory]`."""
    weight_stash: tuple[Fraction, ...]
    weights: tuple[Fraction, ...]
    """Memory of parameters, gradients, optimizer state and undo copies, by layer.

    Like `recomputed`, 0 if the job does not say.
    """
    recomputed: tuple[Fraction, ...]


def layer_costs(job: Job) -> ExactLayerCosts:
    """Return the exact costs of a job's layers, in order.

    If the job has no `placement.layers`, every stage counts as one layer. Raises JobError if a
    stage has no layer, because its costs then belong to none.
    """
    counts = layer_counts(job)
    if not all(counts):
        raise JobError(
            f"placement.layers gives stage {counts.index(0)} no layer; expected at least one for "
            "each, if stages are cut or layers moved"
        )
    nothing = (0.0,) * job.depth
    time, memory = job.time, job.memory

    # A bidirectional job repeats its values for the second direction; the first has all layers.
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

    If the job does not say, each number is 1.
    """
    return (1,) * job.depth if job.layers is None else job.layers[: job.depth]


@lru_cache(maxsize=4096)
def exact_decimal(value: float) -> Fraction:
    """Return a float as an exact fraction, by its decimal digits: 1/10 for 0.1."""
    return Fraction(repr(value))


MOST_PARTS = 10**6
"""Largest number of parts into which a unit is divided to express another one."""
FLOAT_ROUNDING = Fraction(1, 2**50)
"""Relative difference of two floats that may be the same number, rounded twice."""


def limited_ratio(numerator: float, denominator: float) -> Fraction:
    """Return `numerator` / `denominator` as a fraction, for ratios of tick lengths or units.

    The fraction is rounded so that the smaller of its two numbers is at most `MOST_PARTS`.
    """
    if numerator < denominator:
        return 1 / limited_ratio(denominator, numerator)
    return Fraction(numerator / denominator).limit_denominator(MOST_PARTS)


def memory_ratio(coarse: float, fine: float) -> Fraction:
    """Return how many of the unit `fine` are in the unit `coarse`, as a fraction.

    The fraction has the limits of `limited_ratio`. It is rounded up, unless it is exact but for the
    rounding of floats. Layers, in the finer unit, then need no more memory than the slices that
    they are part of.
    """
    exact, near = Fraction(coarse) / Fraction(fine), limited_ratio(coarse, fine)
    if near >= exact * (1 - FLOAT_ROUNDING):
        return near
    # The next larger fraction with at most so many parts; neighbours p/q < p'/q' have
    # p'q - pq' = 1.
    part, parts = near.as_integer_ratio()
    if near < 1:  # p' is the smaller number
        inverse = pow(parts, -1, part) if part > 1 else 0
        larger = MOST_PARTS - (MOST_PARTS - inverse) % part
        return Fraction(larger, (larger * parts - 1) // part)
    inverse = pow(part, -1, parts) if parts > 1 else 0
    finer = MOST_PARTS - (MOST_PARTS + inverse) % parts
    return Fraction(1 + part * finer, finer * parts)


def add_exactly(first: float, second: float) -> float:
    """Return the sum of two numbers, added as decimals: 0.1 + 0.2 is 0.3.

    Without rounding errors, ticks and units stay coarse.
    """
    return float(exact_decimal(first) + exact_decimal(second))


@lru_cache(maxsize=256)
def _divide_over_layers(
    stages: tuple[float, ...], counts: tuple[int, ...], values: tuple[float, ...] | None
) -> tuple[Fraction, ...]:
    """Divide each stage's value over its layers in proportion to their `values`, or evenly."""
    divided: list[Fraction] = []
    for stage, count in zip(stages, counts, strict=True):
        first = len(divided)
        shares: list[Fraction] = []
        if values is not None:
            shares = [exact_decimal(value) for value in values[first : first + count]]
        # A value that no layer is said to cause is divided evenly.
        if not any(shares):
            shares = [Fraction(1)] * count
        divided += [exact_decimal(stage) * share / sum(shares) for share in shares]
    return tuple(divided)


# --- Optimizer state that holders share, while some are down --------------------------------------


STATE_COPIES = 2
"""Number of members that hold each part of sharded optimizer state: owner and buddy."""
ROUNDING_PARTS = 1000
"""Number of parts in a unit of memory, for rounding added state up.

Thirds of a byte would need a very fine unit.
"""


def held_state_share(holders: int) -> Fraction:
    """Return the share of a stage's sharded optimizer state that each of `holders` keeps.

    Each holder has its own part and, as a buddy, a copy of another's part.
    """
    return min(Fraction(1), Fraction(STATE_COPIES, holders))


def with_shared_state(job: Job, failed: Sequence[Worker]) -> Job:
    """Return a copy of the job in which live workers keep failed ones' sharded state.

    The state takes room from activations. A layer that moves is assumed to have as many holders as
    its stage has left. Without shared state or failures, the job itself is returned.
    """
    memory = job.memory
    if memory is None or not memory.state or not failed:
        return job
    weights, taken = list(memory.weights), [0.0] * job.stages
    for stage, state in enumerate(memory.state):
        # In a bidirectional job, two columns hold each stage.
        columns = [
            column
            for other, column in enumerate(job.columns)
            if other % job.depth == stage % job.depth
        ]
        holders = job.pipelines * len(columns)
        live = max(1, holders - sum(columns.count(worker.column) for worker in failed))
        # Fewer holders keep larger parts of the same state.
        extra = (
            math.ceil(
                ROUNDING_PARTS
                * exact_decimal(state)
                * (held_state_share(live) - held_state_share(holders))
            )
            / ROUNDING_PARTS
        )
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
        memory=replace(memory, weights=tuple(weights), capacity=capacity, capacity_of=capacity_of),
    )
