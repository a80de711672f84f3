"""Order of an epoch's samples: a pseudorandom permutation that is computed and not stored.

It is a Feistel network (Luby and Rackoff, 1988) over the smallest square of a power of two that has room for all
numbers. A result that is out of range is permuted again (cycle walking: Black and Rogaway, 2002). So any worker finds
the sample at any place in constant time and memory, and no order has to be shuffled, saved or sent.
"""

import numpy as np
from numpy.typing import NDArray

from slipstream.runtime.seeds import derive_seed

ROUNDS = 8
"""Number of rounds of the Feistel network: four suffice for a random-looking permutation of a large set; small sets
need more."""
Numbers = NDArray[np.uint64]


def permute_places(places: Numbers, count: int, seed: int) -> Numbers:
    """Return the number of the sample (0 to `count` - 1) at each of the positions `places` in the order of one pass
    over the data, which `seed` determines.

    Each sample is at exactly one position, from 0 to `count` - 1.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = [np.uint64(derive_seed("order", seed, round_)) for round_ in range(ROUNDS)]
    numbers, outside = places.astype(np.uint64), np.arange(len(places))
    while len(outside):
        numbers[outside] = _apply_network(numbers[outside], half, keys)
        outside = outside[numbers[outside] >= count]
    return numbers


def _apply_network(numbers: Numbers, half: int, keys: list[np.uint64]) -> Numbers:
    """Return each of `numbers`, of twice `half` bits, as permuted by a Feistel network with one round for each of
    `keys`.

    The network maps different numbers to different numbers of as many bits.
    """
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix_bits(right + key) & mask)
    return (left << bits) | right


def _mix_bits(numbers: Numbers) -> Numbers:
    """Return numbers mixed by the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
