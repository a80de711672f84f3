"""Ranges of layers, and sums over them."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

LayerRange = tuple[int, int]
"""Consecutive layers [first, end)."""


def layers_text(layers: LayerRange) -> str:
    """`layer 3` or `layers 4 to 6`."""
    first, end = layers
    return f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"


def short(ranges: Iterable[LayerRange]) -> str:
    """Layers for a drawing: `0-2,5`, the last layer included."""
    return ",".join(str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in ranges)


def joined_ranges(ranges: Iterable[LayerRange]) -> tuple[LayerRange, ...]:
    """The same layers as ascending ranges that do not touch."""
    found: list[LayerRange] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return tuple(found)


def layers_in(ranges: Iterable[LayerRange]) -> frozenset[int]:
    """All layers of some ranges."""
    return frozenset(layer for layers in ranges for layer in range(*layers))


def totals(values: Sequence[int]) -> tuple[int, ...]:
    """The sums of the first 0, 1, 2 ... values."""
    return tuple(accumulate(values, initial=0))


def total(before: Sequence[int], ranges: Iterable[LayerRange]) -> int:
    """The sum over all layers of some ranges; `before` as `totals` gives it."""
    return sum(before[end] - before[first] for first, end in ranges)
