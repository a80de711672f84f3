"""Operate on ranges of layers, and sum values over them."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

LayerRange = tuple[int, int]
"""Consecutive layers [first, end)."""


def layers_text(layers: LayerRange) -> str:
    """Return text that names a range of layers: `layer 3` or `layers 4 to 6`."""
    first, end = layers
    return f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"


def compact_layers_text(ranges: Iterable[LayerRange]) -> str:
    """Return ranges of layers as short text with the last ones included: `0-2,5`."""
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
    """Return the set of all layers in some ranges."""
    return frozenset(layer for layers in ranges for layer in range(*layers))


def prefix_sums(values: Sequence[int]) -> tuple[int, ...]:
    """Return the prefix sums of values: the sums of the first 0, 1, 2, ... of them."""
    return tuple(accumulate(values, initial=0))


def sum_over_ranges(before: Sequence[int], ranges: Iterable[LayerRange]) -> int:
    """Return the sum of values over ranges of layers, from `prefix_sums` in `before`."""
    return sum(before[end] - before[first] for first, end in ranges)
