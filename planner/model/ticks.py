"""From the user's units to whole numbers: seconds to ticks, memory to multiples of a unit."""

import math
from collections.abc import Callable, Iterable
from fractions import Fraction

import msgspec

from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import LayerCosts, exact
from slipstream.planner.model.layer_ticks import LayerTicks
from slipstream.schedules.costs import Room
from slipstream.schedules.schedule import Grid, Memory, Slow, Times

FINEST = 10**6
"""The longest op has at most this many ticks; finer times are rounded up to it."""
FINEST_MEMORY = 2**40
"""So many multiples of the unit at most; amounts are then rounded to the safe side."""

Rounded = Callable[[Fraction], int]


def tick_of(job: Job, costs: LayerCosts | None = None) -> Fraction:
    """The coarsest tick in seconds that holds every time exactly, or the longest op / FINEST when that is coarser.

    With `costs`, those of each layer, too.
    """
    time = job.time
    compute = [exact(value) for value in {*time.forward, *time.backward_input, *time.backward_weight}]
    others = [exact(value) for value in (*time.optimizer, *time.all_reduce, time.transfer)]
    if costs is not None:
        compute += {*costs.forward, *costs.backward_input, *costs.backward_weight}
        others += {*costs.optimizer, *costs.all_reduce}
    slowed = [value * Fraction(per_mille(factor), 1000) for _, factor in time.slow for value in compute]
    values = [value for value in (*compute, *slowed, *others) if value]
    return max(_common(values), max(values) / FINEST)


def _common(values: Iterable[Fraction]) -> Fraction:
    """The greatest common divisor of fractions."""
    numerator, denominator = 0, 1
    for value in values:
        common = math.lcm(denominator, value.denominator)
        numerator = math.gcd(numerator * (common // denominator), value.numerator * (common // value.denominator))
        denominator = common
    return Fraction(numerator, denominator)


def per_mille(factor: float) -> int:
    """A factor in thousandths."""
    return round(factor * 1000)


def times_in_ticks(job: Job, grid: Grid, tick: Fraction, *, down: bool = False) -> Times:
    """Times of the stages, rounded up, or down."""
    rounded: Rounded = math.floor if down else math.ceil

    def ticks(values: Iterable[float]) -> tuple[int, ...]:
        return tuple(rounded(exact(value) / tick) for value in values)

    time = job.time
    optimizer = ticks(time.optimizer)
    return Times(forward=ticks(time.forward), backward_input=ticks(time.backward_input),
                 backward_weight=ticks(time.backward_weight), all_reduce=ticks(time.all_reduce),
                 optimizer=tuple(sum(optimizer[stage] for stage in grid.stages_of(column))
                                 for column in range(grid.columns)),
                 transfer=rounded(exact(time.transfer) / tick),
                 slow=tuple(Slow(worker, per_mille(factor)) for worker, factor in time.slow))


def unit_of(job: Job, costs: LayerCosts | None = None) -> Fraction:
    """The coarsest unit that holds all memory exactly, or a coarser one where that would need huge numbers."""
    if job.memory is None:
        return Fraction(1)
    values = [exact(value) for value in (*job.memory.activation, *job.memory.weight_stash, *job.memory.capacity)]
    values += [] if costs is None else [*costs.activation, *costs.weight_stash, *costs.weights]
    positive = [value for value in values if value]
    return max(_common(positive), max(positive) / FINEST_MEMORY) if positive else Fraction(1)


def memory_in_units(job: Job, unit: Fraction, *, down: bool = False) -> Memory | None:
    """Of the stages, in whole multiples of the unit, rounded to the safe side; `down`: to the other one."""
    if job.memory is None:
        return None
    memory = job.memory
    rounded, other = (math.floor, math.ceil) if down else (math.ceil, math.floor)

    def units(values: Iterable[float], rounded: Rounded) -> tuple[int, ...]:
        return tuple(rounded(exact(value) / unit) for value in values)

    rooms = tuple(Room(worker, other(exact(value) / unit)) for worker, value in memory.capacity_of)
    return Memory(unit=float(unit), capacity=units(memory.capacity, other), capacity_of=rooms or msgspec.UNSET,
                  activation=units(memory.activation, rounded), weight_stash=units(memory.weight_stash, rounded))


def layer_ticks(costs: LayerCosts, tick: Fraction, unit: Fraction, *, fused: bool, down: bool = False) -> LayerTicks:
    """Of these costs, rounded up, or down. `fused`: weights' gradients are made at once, and so nothing is stashed."""
    rounded: Rounded = math.floor if down else math.ceil

    def of(values: Iterable[Fraction], one: Fraction) -> tuple[int, ...]:
        return tuple(rounded(value / one) for value in values)

    return LayerTicks(forward=of(costs.forward, tick), backward_input=of(costs.backward_input, tick),
                      backward_weight=of(costs.backward_weight, tick), optimizer=of(costs.optimizer, tick),
                      all_reduce=of(costs.all_reduce, tick), activation=of(costs.activation, unit),
                      weight_stash=(0,) * len(costs.forward) if fused else of(costs.weight_stash, unit),
                      weights=of(costs.weights, unit))
