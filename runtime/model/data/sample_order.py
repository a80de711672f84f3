"""The order of an epoch's samples: a pseudorandom permutation that is computed, and not kept.

A Feistel network over the smallest square of a power of two that has room for all numbers (Luby and Rackoff, 1988),
applied again where it leads outside (cycle walking: Black and Rogaway, 2002). So the sample at any place is found in
constant time and memory, by whoever asks: nothing has to be shuffled, saved or handed on.
"""

import numpy as np
from numpy.typing import NDArray

from slipstream.runtime.model.seeds import derive_seed

ROUNDS = 8
"""Four are enough for a random-looking permutation of a large set; small sets need more."""
Numbers = NDArray[np.uint64]


def permuted(places: Numbers, count: int, seed: int) -> Numbers:
    """The number, below `count`, of the sample at each of these places: each number once, in an order by the seed."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = [np.uint64(derive_seed("order", seed, one)) for one in range(ROUNDS)]
    found, outside = places.astype(np.uint64), np.arange(len(places))
    while len(outside):
        found[outside] = _network(found[outside], half, keys)
        outside = outside[found[outside] >= count]
    return found


def _network(numbers: Numbers, half: int, keys: list[np.uint64]) -> Numbers:
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << bits) | right


def _mixed(numbers: Numbers) -> Numbers:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
