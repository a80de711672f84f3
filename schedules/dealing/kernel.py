"""The compiled loops of dealing: an iteration replayed with the lengths of its samples, and swaps that shorten it.

Everything is a whole number, so that all machines find the same. numba keeps machine code by source file, and these
functions call none of another file: it notices when they change. (By its name and line a function finds its code, and
what was kept when the package had another name cannot be read: these lines are others now.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., object])


class Arrays(NamedTuple):
    """A schedule's steps as arrays (`schedules.timing.Step`), in blocks that wait for nothing of each other.

    The last block is the tail: the reductions and optimizer steps that no other op follows.
    """

    begin: Ints
    """[blocks + 1]: the first step of each block."""
    worker: Ints
    """[steps]"""
    name: Ints
    """[steps]: which micro-batch; -1 where none."""
    column: Ints
    """[steps, 2]: the columns of costs by which a step takes longer; B has two, others have -1 there."""
    ticks: Ints
    """[steps, 2]: by column; where there is no name, the first is the length."""
    source_begin: Ints
    """[steps + 1]: of `source` and `hop`."""
    source: Ints
    hop: Ints
    """Ticks on top of the source's end."""
    other_begin: Ints
    """[steps + 1]: of `other`."""
    other: Ints
    """Workers of a step besides its first; where reductions overlap, links count as workers."""
    block_of: Ints
    """[names]"""
    release: Ints
    """[workers]: when each begins by the plan, in ticks."""


def _jit(function: Function) -> Function:
    """Compiled when it is first called, to run without the interpreter's lock; kept on disk where that can be."""
    try:
        made = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the installation nor the user has a folder that can be written
        made = numba.njit(nogil=True)(function)
    return cast(Function, made)


@_jit
def advance(arrays: Arrays, block: int, costs: Ints, sample: Ints, unit: int, free: Ints, ends: Ints) -> None:
    """Run a block: moves the times at which workers are free, in `unit` of a tick. `costs`: [samples, columns]."""
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
def replay(arrays: Arrays, costs: Ints, sample: Ints, unit: int, free: Ints) -> None:
    """Run a whole iteration: moves the times at which workers are free."""
    ends = np.empty(arrays.worker.shape[0], np.int64)
    for block in range(arrays.begin.shape[0] - 1):
        advance(arrays, block, costs, sample, unit, free, ends)


@_jit
def window(arrays: Arrays, unit: int, free: Ints) -> int:
    """The longest, over workers, from their planned begin to when they are free."""
    longest = 0
    for worker in range(free.shape[0]):
        longest = max(longest, free[worker] - arrays.release[worker] * unit)
    return longest


@_jit
def improve(arrays: Arrays, costs: Ints, unit: int, pairs: Ints, sample: Ints) -> Any:
    """Swap pairs of names in `sample` where that leaves the iteration no longer: the window before and after.

    `costs`: [samples, columns]. `pairs`: [swaps, 2]. Where windows are equal, the sum of what workers end with counts.
    """
    tail = arrays.begin.shape[0] - 2
    ends = np.empty(arrays.worker.shape[0], np.int64)
    heads = arrays.release * unit
    for block in range(tail):
        advance(arrays, block, costs, sample, unit, heads, ends)
    free = heads.copy()
    advance(arrays, tail, costs, sample, unit, free, ends)
    before = best = window(arrays, unit, free)
    total = heads.sum()
    trial, known = heads.copy(), ends.copy()
    # Where reductions overlap, the tail waits for ops of any block: of all, the ends that count are kept.
    waits = arrays.source_begin[arrays.begin[tail + 1]] > arrays.source_begin[arrays.begin[tail]]
    for number in range(pairs.shape[0]):
        a, b = pairs[number, 0], pairs[number, 1]
        sample[a], sample[b] = sample[b], sample[a]
        trial[:] = heads
        for turn in range(2):
            block = arrays.block_of[a] if turn == 0 else arrays.block_of[b]
            if turn == 1 and block == arrays.block_of[a]:
                break
            for step in range(arrays.begin[block], arrays.begin[block + 1]):
                trial[arrays.worker[step]] = arrays.release[arrays.worker[step]] * unit
            advance(arrays, block, costs, sample, unit, trial, ends)
        free[:] = trial
        advance(arrays, tail, costs, sample, unit, free, ends)
        found, sum_found = window(arrays, unit, free), trial.sum()
        better = found < best or (found == best and sum_found <= total)
        if better:
            best, total = found, sum_found
            heads[:] = trial
        else:
            sample[a], sample[b] = sample[b], sample[a]
        for turn in range(2 if waits else 0):
            block = arrays.block_of[a] if turn == 0 else arrays.block_of[b]
            for step in range(arrays.begin[block], arrays.begin[block + 1]):
                if better:
                    known[step] = ends[step]
                else:
                    ends[step] = known[step]
    return before, best
