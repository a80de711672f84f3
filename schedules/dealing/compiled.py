"""Compile the loops of dealing at installation, and cache them on disk.

The command is `python -m slipstream.schedules.dealing.compiled`. Without it, the process of each
worker compiles the loops in its first iteration, and all do so at the same time: with 6 workers on
2 cores this took half a minute.
"""

import numpy as np

from slipstream.schedules.dealing.kernel import Arrays, improve_by_swaps, replay_iteration


def load_kernels() -> None:
    """Call each loop of dealing once, which loads its machine code or compiles it."""
    # An iteration without steps is enough: numba compiles for types and dimensions, not for values.
    empty = np.zeros(0, np.int64)
    zero = np.zeros(1, np.int64)
    pairs = np.zeros((0, 2), np.int64)
    arrays = Arrays(
        begin=np.zeros(2, np.int64),
        worker=empty,
        name=empty,
        column=pairs,
        ticks=pairs,
        source_begin=zero,
        source=empty,
        hop=empty,
        other_begin=zero,
        other=empty,
        block_of=zero,
        release=zero,
    )
    costs = np.zeros((1, 1), np.int64)
    improve_by_swaps(arrays, costs, 1, pairs, zero.copy())
    replay_iteration(arrays, costs, zero.copy(), 1, zero.copy())


if __name__ == "__main__":
    load_kernels()
