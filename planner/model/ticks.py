"""From the user's units to whole numbers: seconds to ticks, memory to multiples of a unit."""

import math
from collections.abc import Iterable
from fractions import Fraction

import msgspec

from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import LayerCosts, exact
from slipstream.planner.model.layer_ticks import LayerTicks
from slipstream.schedules.costs import Room
from slipstream.schedules.schedule import Grid, Memory, Slow, Times

FINEST = 10**6
"""The longest op has at most this many ticks; finer times are rounded to it."""
FINEST_MEMORY = 2**40
"""So many multiples of the unit at most; amounts are then rounded to the safe side."""


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


def times_in_ticks(job: Job, grid: Grid, tick: Fraction) -> Times:
    """Times of the stages."""
    def ticks(values: Iterable[float]) -> tuple[int, ...]:
        return tuple(round(exact(value) / tick) for value in values)

    time = job.time
    optimizer = ticks(time.optimizer)
    return Times(forward=ticks(time.forward), backward_input=ticks(time.backward_input),
                 backward_weight=ticks(time.backward_weight), all_reduce=ticks(time.all_reduce),
                 optimizer=tuple(sum(optimizer[stage] for stage in grid.stages_of(column))
                                 for column in range(grid.columns)),
                 transfer=round(exact(time.transfer) / tick),
                 slow=tuple(Slow(worker, per_mille(factor)) for worker, factor in time.slow))


def unit_of(job: Job, costs: LayerCosts | None = None) -> Fraction:
    """The coarsest unit that holds all memory exactly, or a coarser one where that would need huge numbers."""
    assert job.memory is not None
    values = [exact(value) for value in (*job.memory.activation, *job.memory.weight_stash, *job.memory.capacity)]
    values += [] if costs is None else [*costs.activation, *costs.weight_stash, *costs.weights]
    positive = [value for value in values if value]
    return max(_common(positive), max(positive) / FINEST_MEMORY) if positive else Fraction(1)


def memory_in_units(job: Job, costs: LayerCosts | None = None) -> Memory | None:
    """Of the stages, in whole multiples of the unit, rounded to the safe side. With `costs`, weights of each layer."""
    if job.memory is None:
        return None
    memory, unit = job.memory, unit_of(job, costs)
    others = tuple(Room(worker, math.floor(exact(value) / unit)) for worker, value in memory.capacity_of)
    return Memory(unit=float(unit), capacity=tuple(math.floor(exact(value) / unit) for value in memory.capacity),
                  capacity_of=others or msgspec.UNSET, activation=_units(map(exact, memory.activation), unit),
                  weight_stash=_units(map(exact, memory.weight_stash), unit),
                  weights=() if costs is None else _units(costs.weights, unit))


def _units(values: Iterable[Fraction], unit: Fraction) -> tuple[int, ...]:
    return tuple(math.ceil(value / unit) for value in values)


def layer_ticks(job: Job, costs: LayerCosts, tick: Fraction, *, fused: bool) -> LayerTicks:
    """Of these costs. `fused`: weights' gradients are made at once, so that nothing is stashed for them."""
    def ticks(values: Iterable[Fraction]) -> tuple[int, ...]:
        return tuple(round(value / tick) for value in values)

    unit = unit_of(job, costs) if job.memory else Fraction(1)  # without memory, all amounts are 0
    stash = _units(costs.weight_stash, unit)
    return LayerTicks(forward=ticks(costs.forward), backward_input=ticks(costs.backward_input),
                      backward_weight=ticks(costs.backward_weight), optimizer=ticks(costs.optimizer),
                      all_reduce=ticks(costs.all_reduce), activation=_units(costs.activation, unit),
                      weight_stash=(0,) * len(stash) if fused else stash, weights=_units(costs.weights, unit))
