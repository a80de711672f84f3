"""Random numbers: xorshift64 (Marsaglia 2003)."""

import numpy as np

from slipstream.planner.search.kernel.jit import inlined


@inlined
def _bits(random):
    """The next 53 random bits, as an unsigned number."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return x >> np.uint64(11)


@inlined
def below(random, bound):
    """A whole number from 0 to below the bound."""
    return np.int64(_bits(random) % np.uint64(bound))


@inlined
def uniform(random):
    """A number from 0 to below 1."""
    return np.int64(_bits(random)) / 9007199254740992.0
