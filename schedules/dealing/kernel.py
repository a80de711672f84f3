"""Run the compiled loops of dealing.

The loops replay an iteration with the costs of its samples, and swap samples to shorten it.

All numbers are integers, so that all machines get the same result. numba caches machine code by
source file; these functions call none of another file, so numba notices when they change. It finds
cached code by a function's name and line, and fails to read code that was cached under the
package's former name. No function may therefore return to the line on which it was then.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., object])


class Arrays(NamedTuple):
    """Steps of an iteration as arrays, which the loops of dealing replay block by block.

    A step is an op or a whole all-reduce (`schedules.timing.ReplayStep`). Blocks do not wait for
    each other, except for the last one, the tail. It has the reductions and optimizer steps, which
    no other op follows.
    """

    begin: Ints
    """Index of each block's first step, then the number of steps, [blocks + 1]."""
    worker: Ints
    """Number of the first worker or link that each step occupies, [steps]."""
    name: Ints
    """Number of the micro-batch of each step, [steps]; -1 if it has none."""
    column: Ints
    """Which of its sample's costs scale the ticks of each step, [steps, 2], by index.

    B has two costs, other compute ops one; -1 stands for none.
    """
    ticks: Ints
    """Ticks of each step that each of these costs scales, [steps, 2].

    A step without micro-batch has its whole duration in the first place.
    """
    source_begin: Ints
    """Index in `source` and `hop` of the first entry of each step, [steps + 1]."""
    source: Ints
    """Numbers of the steps that each step awaits; those of the first step come first."""
    hop: Ints
    """Ticks from the end of the step in `source` until its tensor arrives."""
    other_begin: Ints
    """Index in `other` of the first entry of each step, [steps + 1]."""
    other: Ints
    """Numbers of the further workers and links that steps occupy (`ReplayStep.workers`)."""
    block_of: Ints
    """Number of the block that each micro-batch is in, [micro-batches]."""
    release: Ints
    """Tick of the first planned start of each worker and link, [workers and links]."""


def _jit(function: Function) -> Function:
    """Compile a function at its first call, to run without the GIL.

    The machine code is cached on disk if possible.
    """
    # Without the GIL, the worker's other threads continue while the next iteration is dealt. The
    # cache saves each process the seconds of compiling.
    try:
        compiled = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the installation nor the user has a writable folder
        compiled = numba.njit(nogil=True)(function)
    return cast(Function, compiled)


@_jit
def advance_block(
    arrays: Arrays, block: int, costs: Ints, sample: Ints, unit: int, free: Ints, ends: Ints
) -> None:
    """Replay the steps of one block.

    Update `free`, when each worker is free, and `ends`, when each step ends, in units of 1 / `unit`
    ticks. `costs`, [samples, columns], has the factors on the times of a sample's ops, in units of
    1 / `unit`; a column is a kind of op at a slice. `sample` has each micro-batch's sample.
    """
    for step in range(arrays.begin[block], arrays.begin[block + 1]):
        # A step waits for all workers that it occupies, and for the tensors that it takes.
        worker = arrays.worker[step]
        start = free[worker]
        for index in range(arrays.other_begin[step], arrays.other_begin[step + 1]):
            start = max(start, free[arrays.other[index]])
        for index in range(arrays.source_begin[step], arrays.source_begin[step + 1]):
            start = max(start, ends[arrays.source[index]] + arrays.hop[index] * unit)
        # From here on, `start` becomes the end of the step. Only compute ops depend on their
        # micro-batch's sample: B on two of its costs.
        name = arrays.name[step]
        if name < 0:
            start += arrays.ticks[step, 0] * unit
        else:
            start += arrays.ticks[step, 0] * costs[sample[name], arrays.column[step, 0]]
            if arrays.column[step, 1] >= 0:
                start += arrays.ticks[step, 1] * costs[sample[name], arrays.column[step, 1]]
        # All workers of an all-reduce are free at its end.
        ends[step] = start
        free[worker] = start
        for index in range(arrays.other_begin[step], arrays.other_begin[step + 1]):
            free[arrays.other[index]] = start


@_jit
def replay_iteration(arrays: Arrays, costs: Ints, sample: Ints, unit: int, free: Ints) -> None:
    """Replay a whole iteration, and update `free`, the times at which workers are free.

    Times are in units of 1 / `unit` ticks. For `costs`, the factors on the times of samples' ops,
    and `sample`, the sample of each micro-batch, see `advance_block`.
    """
    ends = np.empty(arrays.worker.shape[0], np.int64)
    for block in range(arrays.begin.shape[0] - 1):
        advance_block(arrays, block, costs, sample, unit, free, ends)


@_jit
def longest_window(arrays: Arrays, unit: int, free: Ints) -> int:
    """Return the longest time of a worker from its planned start until it is free.

    The result, and `free`, when each worker is free, are in units of 1 / `unit` ticks.
    """
    longest = 0
    for worker in range(free.shape[0]):
        longest = max(longest, free[worker] - arrays.release[worker] * unit)
    return longest


@_jit
def improve_by_swaps(arrays: Arrays, costs: Ints, unit: int, pairs: Ints, sample: Ints) -> Any:
    """Swap the samples of pairs of micro-batches where that does not lengthen the iteration.

    Updates `sample`, the sample of each micro-batch. Returns the length of the iteration before and
    after the swaps, in units of 1 / `unit` ticks. `pairs`, [swaps, 2], has the micro-batches of
    each swap, and `costs`, [samples, columns], the factors on the times of ops (`advance_block`).
    """
    # The tail is replayed after each swap, so the times at which workers begin it are kept apart.
    tail = arrays.begin.shape[0] - 2
    ends = np.empty(arrays.worker.shape[0], np.int64)
    heads = arrays.release * unit
    for block in range(tail):
        advance_block(arrays, block, costs, sample, unit, heads, ends)
    free = heads.copy()
    advance_block(arrays, tail, costs, sample, unit, free, ends)
    before = best = longest_window(arrays, unit, free)
    total = heads.sum()
    trial, old_ends = heads.copy(), ends.copy()
    # If reductions overlap, the tail waits for ops of any block, so the ends of all blocks are
    # kept.
    waits = arrays.source_begin[arrays.begin[tail + 1]] > arrays.source_begin[arrays.begin[tail]]
    for number in range(pairs.shape[0]):
        # A swap changes the blocks of its two micro-batches only, which may be the same one.
        a, b = pairs[number, 0], pairs[number, 1]
        sample[a], sample[b] = sample[b], sample[a]
        trial[:] = heads
        for side in range(2):
            block = arrays.block_of[a] if side == 0 else arrays.block_of[b]
            if side == 1 and block == arrays.block_of[a]:
                break
            for step in range(arrays.begin[block], arrays.begin[block + 1]):
                trial[arrays.worker[step]] = arrays.release[arrays.worker[step]] * unit
            advance_block(arrays, block, costs, sample, unit, trial, ends)
        free[:] = trial
        advance_block(arrays, tail, costs, sample, unit, free, ends)
        length, length_sum = longest_window(arrays, unit, free), trial.sum()
        # Swaps of equal length are kept if workers begin the tail no later in sum: this leads away
        # from plateaus, where no single swap shortens the iteration.
        better = length < best or (length == best and length_sum <= total)
        if better:
            best, total = length, length_sum
            heads[:] = trial
        else:
            sample[a], sample[b] = sample[b], sample[a]
        # The ends of a rejected swap must not remain, and those of an accepted one must.
        for side in range(2 if waits else 0):
            block = arrays.block_of[a] if side == 0 else arrays.block_of[b]
            for step in range(arrays.begin[block], arrays.begin[block + 1]):
                if better:
                    old_ends[step] = ends[step]
                else:
                    ends[step] = old_ends[step]
    return before, best
