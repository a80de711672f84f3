"""What each layer costs, in whole ticks and units of memory, and sums over layers."""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import msgspec

from slipstream.schedules.layers import LayerRange, totals


class Sums(NamedTuple):
    """[layer] sums over all layers before it, L + 1 values each."""

    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    all_reduce: tuple[int, ...]
    closing: tuple[int, ...]
    activation: tuple[int, ...]
    weight_stash: tuple[int, ...]
    weights: tuple[int, ...]
    most: tuple[int, ...]


class LayerTicks(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One value for each of the L layers; memory is 0 where it is unlimited.

    Without values where nothing is cut and no layer moves: then the ticks may be too coarse for single layers.
    """

    forward: tuple[int, ...] = ()
    backward_input: tuple[int, ...] = ()
    backward_weight: tuple[int, ...] = ()
    optimizer: tuple[int, ...] = ()
    all_reduce: tuple[int, ...] = ()
    activation: tuple[int, ...] = ()
    """Of a micro-batch, from F to I;"""
    weight_stash: tuple[int, ...] = ()
    """from I to W."""
    weights: tuple[int, ...] = ()
    """Parameters, gradients and optimizer state."""

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Ticks of F, I and W of each layer for one micro-batch, at the usual speed."""
        return tuple(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))

    @cached_property
    def closing(self) -> tuple[int, ...]:
        """Ticks of each layer at the end of an iteration on a worker that holds it: all-reduce and optimizer."""
        return tuple(map(sum, zip(self.all_reduce, self.optimizer, strict=True)))

    @cached_property
    def most(self) -> tuple[int, ...]:
        """The most that a micro-batch ever holds of each layer: its activation, or after its I its stash."""
        return tuple(map(max, self.activation, self.weight_stash))

    @cached_property
    def sums(self) -> Sums:
        """Sums over the layers before each one."""
        return Sums(*(totals(getattr(self, name)) for name in Sums._fields))

    def of_slices(self, name: str, slices: Iterable[LayerRange]) -> tuple[int, ...]:
        """The values of this name, of ranges of layers."""
        before = getattr(self.sums, name)
        return tuple(before[end] - before[first] for first, end in slices)
