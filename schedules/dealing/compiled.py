"""The install step of dealing (`python -m slipstream.schedules.dealing.compiled`): its loops are compiled, once per
installation, and kept on disk.

Else each worker's process compiles them at once in its first iteration: 6 workers on 2 cores took half a minute.
"""

import numpy as np

from slipstream.schedules.dealing.kernel import Arrays, improve, replay


def load() -> None:
    """Have this process load the machine code, or compile it: numba does when a function is first called."""
    none, one, pairs = np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros((0, 2), np.int64)
    arrays = Arrays(begin=np.zeros(2, np.int64), worker=none, name=none, column=pairs, ticks=pairs, source_begin=one,
                    source=none, hop=none, other_begin=one, other=none, block_of=one, release=one)
    costs = np.zeros((1, 1), np.int64)
    improve(arrays, costs, 1, pairs, one.copy())
    replay(arrays, costs, one.copy(), 1, one.copy())


if __name__ == "__main__":
    load()
