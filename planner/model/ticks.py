"""From the user's units to whole numbers: seconds to ticks, memory to multiples of a unit."""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import msgspec

from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import LayerCosts, exact
from slipstream.schedules.costs import Room
from slipstream.schedules.layers import LayerRange
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


def times_in_ticks(job: Job, grid: Grid, tick: Fraction, costs: LayerCosts | None = None,
                   slices: Sequence[LayerRange] = ()) -> Times:
    """Times of the stages, and of these slices of layers with such costs."""
    def ticks(stages: Sequence[float], layers: Sequence[Fraction]) -> tuple[int, ...]:
        return (*(round(exact(value) / tick) for value in stages),
                *(round(sum(layers[first:end]) / tick) for first, end in slices))

    time = job.time
    optimizer = ticks(time.optimizer, ())
    return Times(forward=ticks(time.forward, costs.forward if costs else ()),
                 backward_input=ticks(time.backward_input, costs.backward_input if costs else ()),
                 backward_weight=ticks(time.backward_weight, costs.backward_weight if costs else ()),
                 all_reduce=ticks(time.all_reduce, costs.all_reduce if costs else ()),
                 optimizer=tuple(sum(optimizer[stage] for stage in grid.stages_of(column))
                                 for column in range(grid.columns)),
                 transfer=round(exact(time.transfer) / tick),
                 slow=tuple(Slow(worker, per_mille(factor)) for worker, factor in time.slow))


def memory_in_units(job: Job, costs: LayerCosts | None = None, slices: Sequence[LayerRange] = ()) -> Memory | None:
    """Whole multiples of the coarsest exact unit; rounded to the safe side where that would need huge numbers."""
    if job.memory is None:
        return None
    used = [exact(value) for value in (*job.memory.activation, *job.memory.weight_stash)]
    room = [exact(value) for value in job.memory.capacity]
    of_layers = [] if costs is None else [*costs.activation, *costs.weight_stash, *costs.weights]
    positive = [value for value in (*used, *room, *of_layers) if value]
    unit = max(_common(positive), max(positive) / FINEST_MEMORY) if positive else Fraction(1)

    def units(stages: Sequence[float], layers: Sequence[Fraction]) -> tuple[int, ...]:
        return (*(math.ceil(exact(value) / unit) for value in stages),
                *(math.ceil(sum(layers[first:end]) / unit) for first, end in slices))

    others = tuple(Room(worker, math.floor(exact(value) / unit)) for worker, value in job.memory.capacity_of)
    return Memory(unit=float(unit), capacity=tuple(math.floor(value / unit) for value in room),
                  capacity_of=others or msgspec.UNSET,
                  activation=units(job.memory.activation, costs.activation if costs else ()),
                  weight_stash=units(job.memory.weight_stash, costs.weight_stash if costs else ()),
                  weights=() if costs is None else tuple(math.ceil(value / unit) for value in costs.weights))
