"""Work with ranges of layers: text, union, and sums of values over them."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

LayerRange = tuple[int, int]
"""Consecutive layers as (first, end): from layer `first` to before layer `end`."""


def layers_text(layers: LayerRange) -> str:
    """Return text that names a range of layers: `layer 3` or `layers 4 to 6`."""
    first, end = layers
    return f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"


def compact_layers_text(ranges: Iterable[LayerRange]) -> str:
    """Return short text for ranges of layers: `0-2,5` for layers 0, 1, 2 and 5."""
    texts = []
    for first, end in ranges:
        texts.append(str(first) if end == first + 1 else f"{first}-{end - 1}")
    return ",".join(texts)


def merge_ranges(ranges: Iterable[LayerRange]) -> tuple[LayerRange, ...]:
    """Merge ranges of layers, in any order, into ascending ranges that do not touch."""
    merged: list[LayerRange] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)


def layers_in(ranges: Iterable[LayerRange]) -> frozenset[int]:
    """Return the set of all layers in these ranges."""
    return frozenset(layer for layers in ranges for layer in range(*layers))


def prefix_sums(values: Sequence[int]) -> tuple[int, ...]:
    """Return the sums of the first 0, 1, 2, ... values; the last sum is of all."""
    return tuple(accumulate(values, initial=0))


def sum_over_ranges(before: Sequence[int], ranges: Iterable[LayerRange]) -> int:
    """Return the sum of all layers' values over some ranges of layers.

    `before` has the `prefix_sums` of the layers' values.
    """
    return sum(before[end] - before[first] for first, end in ranges)
