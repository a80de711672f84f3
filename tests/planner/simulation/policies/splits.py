"""All ways to divide layers over stages."""

from collections.abc import Iterator, Sequence


def splits(layers: Sequence[float], stages: int) -> Iterator[tuple[float, ...]]:
    """The sums of the parts."""
    if stages == 1:
        yield (sum(layers),)
        return
    for first in range(1, len(layers) - stages + 2):
        for rest in splits(layers[first:], stages - 1):
            yield (sum(layers[:first]), *rest)
