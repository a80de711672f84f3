"""Compile the loops of dealing at installation (`python -m slipstream.schedules.dealing.compiled`), cached on disk.

Otherwise each worker's process compiles them in its first iteration, all at the same time: with 6 workers on 2 cores
this took half a minute.
"""

import numpy as np

from slipstream.schedules.dealing.kernel import Arrays, improve_by_swaps, replay_iteration


def load_kernels() -> None:
    """Load the machine code of dealing's loops into this process, or compile them. numba does so when one is first
    called."""
    empty, one, pairs = np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros((0, 2), np.int64)
    arrays = Arrays(begin=np.zeros(2, np.int64), worker=empty, name=empty, column=pairs, ticks=pairs, source_begin=one,
                    source=empty, hop=empty, other_begin=one, other=empty, block_of=one, release=one)
    costs = np.zeros((1, 1), np.int64)
    improve_by_swaps(arrays, costs, 1, pairs, one.copy())
    replay_iteration(arrays, costs, one.copy(), 1, one.copy())


if __name__ == "__main__":
    load_kernels()
