"""Run the compiled loops of dealing.

They replay an iteration with the costs of its samples, and swap samples to shorten it.

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
    """Steps of an iteration (`schedules.timing.ReplayStep`: an op, or a whole all-reduce) as
    arrays, in blocks.

    Blocks do not wait for each other, except for the last, the tail: reductions and optimizer steps
    that no other op follows.
    """

    begin: Ints
    """Index of each block's first step, then the number of steps, [blocks + 1]."""
    worker: Ints
    """Number of the first worker of each step, [steps]."""
    name: Ints
    """Number of the micro-batch of each step, [steps]; -1 if it has none."""
    column: Ints
    """Indices of a sample's costs that scale the step's ticks, [steps, 2].

    -1 if there is no such cost.
    """
    ticks: Ints
    """Ticks of the step by the cost that scales them, [steps, 2].

    For a step without micro-batch, its duration.
    """
    source_begin: Ints
    """Index in `source` and `hop` of the first entry of each step, [steps + 1]."""
    source: Ints
    hop: Ints
    """Ticks from the end of the step in `source` until its tensor arrives."""
    other_begin: Ints
    """Index in `other` of the first entry of each step, [steps + 1]."""
    other: Ints
    """Numbers of the workers that each step occupies besides its first.

    If reductions overlap compute, links count as workers.
    """
    block_of: Ints
    """Number of the block that the micro-batch is in, [micro-batches]."""
    release: Ints
    """Tick at which the worker starts its first op as planned, [workers]."""


def _jit(function: Function) -> Function:
    """Compile a function at its first call, to run without the GIL.

    The machine code is cached on disk if possible.
    """
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

    They reach from `arrays.begin[block]` to before `arrays.begin[block + 1]`; each is an op or a
    whole all-reduce.

    Update `free`, the time at which each worker is free, and `ends`, the end of each step, both in
    multiples of 1 / `unit` ticks. The array `costs`, [samples, columns], has the factor on the time
    of a sample's ops, multiplied by `unit`, for each kind of op at a slice (a column); `sample` is
    the sample of each micro-batch.
    """
    for step in range(arrays.begin[block], arrays.begin[block + 1]):
        worker = arrays.worker[step]
        start = free[worker]
        for index in range(arrays.other_begin[step], arrays.other_begin[step + 1]):
            start = max(start, free[arrays.other[index]])
        for index in range(arrays.source_begin[step], arrays.source_begin[step + 1]):
            start = max(start, ends[arrays.source[index]] + arrays.hop[index] * unit)
        name = arrays.name[step]
        if name < 0:
            start += arrays.ticks[step, 0] * unit
        else:
            start += arrays.ticks[step, 0] * costs[sample[name], arrays.column[step, 0]]
            if arrays.column[step, 1] >= 0:
                start += arrays.ticks[step, 1] * costs[sample[name], arrays.column[step, 1]]
        ends[step] = start
        free[worker] = start
        for index in range(arrays.other_begin[step], arrays.other_begin[step + 1]):
            free[arrays.other[index]] = start


@_jit
def replay_iteration(arrays: Arrays, costs: Ints, sample: Ints, unit: int, free: Ints) -> None:
    """Replay a whole iteration, and update `free`, when each worker is free.

    Times are in multiples of 1 / `unit` ticks. The arrays `costs` (factors on the op times of
    samples) and `sample` (by micro-batch) are as in `advance_block`.
    """
    ends = np.empty(arrays.worker.shape[0], np.int64)
    for block in range(arrays.begin.shape[0] - 1):
        advance_block(arrays, block, costs, sample, unit, free, ends)


@_jit
def longest_window(arrays: Arrays, unit: int, free: Ints) -> int:
    """Return the longest time of a worker from its planned start until it is free.

    It is in multiples of 1 / `unit` ticks; `free` has the time at which each worker is free.
    """
    longest = 0
    for worker in range(free.shape[0]):
        longest = max(longest, free[worker] - arrays.release[worker] * unit)
    return longest


@_jit
def improve_by_swaps(arrays: Arrays, costs: Ints, unit: int, pairs: Ints, sample: Ints) -> Any:
    """Swap the samples of pairs of micro-batches where that does not lengthen the iteration.

    Updates `sample`, the sample of each micro-batch. Returns the length of the iteration before and
    after, in multiples of 1 / `unit` ticks. Shapes: `costs` [samples, columns], factors on op times
    as in `advance_block`; `pairs` [swaps, 2], micro-batches. If the length stays equal, a swap must
    not increase the sum of the times at which workers begin reductions and optimizer steps.
    """
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
        better = length < best or (length == best and length_sum <= total)
        if better:
            best, total = length, length_sum
            heads[:] = trial
        else:
            sample[a], sample[b] = sample[b], sample[a]
        for side in range(2 if waits else 0):
            block = arrays.block_of[a] if side == 0 else arrays.block_of[b]
            for step in range(arrays.begin[block], arrays.begin[block + 1]):
                if better:
                    old_ends[step] = ends[step]
                else:
                    ends[step] = old_ends[step]
    return before, best
