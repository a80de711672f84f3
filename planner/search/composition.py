"""Pipelines that share no worker are ordered each by the rule that is best for it, and put on one clock.

They meet only at the all-reduces: who begins late may delay the reductions that others wait for. So orders are compared
by the period that each set of pipelines would have alone; then the sets are shifted against each other in time.
"""

from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.planner.model.arrays import Ints, ProblemArrays, ints
from slipstream.planner.model.start_times import NEVER, earliest, late_ends, latest, reduced
from slipstream.planner.model.unions import joined

SHIFTS = (-64, -32, -16, -8, 8, 16, 32, 64)
"""By how much a set is shifted at once, in 64ths of a mean op and its transfer."""
ROUNDS = 4


class _Part(msgspec.Struct):
    """Workers that share no micro-batch with others, and their best order so far."""

    rows: Ints
    ops: NDArray[np.bool_]
    """[op] whether its workers run it"""
    order: Ints
    """Its ops; empty until there is one."""
    ends: Ints
    """[group] when its last op ends, if it begins at 0; NEVER for groups without any"""
    period: int = -NEVER
    """Alone."""


class Composition:
    """The best orders so far of an assignment with several independent sets of workers, staggered."""

    def __init__(self, arrays: ProblemArrays) -> None:
        self._arrays = arrays
        none = np.zeros(0, dtype=np.int64)
        self._parts = [_Part(rows, np.isin(arrays.ops.worker[arrays.ops.unit], rows), none, none)
                       for rows in _independent(arrays)]

    @property
    def worthwhile(self) -> bool:
        """Whether there is more than one set."""
        return len(self._parts) > 1

    def offer(self, order: Ints) -> bool:
        """Take of an order what is better. Whether something is."""
        arrays = self._arrays
        done = earliest(arrays, order) + arrays.ops.duration
        better = False
        for part in self._parts:
            own = order[part.ops[order]]
            ends = np.full(len(arrays.problem.linked), NEVER, dtype=np.int64)
            np.maximum.at(ends, arrays.group[arrays.ops.worker[arrays.ops.unit[own]]], done[own])
            late, closed = self._closed(ends)
            found = self._longest(latest(arrays, own, late), closed, own)
            if found < part.period:
                part.period, part.order, part.ends, better = found, own, ends, True
        return better

    def best(self) -> tuple[int, Ints, Ints]:
        """(period, order, [op] start ticks) of the best orders, shifted against each other so that it is short."""
        order = np.concatenate([part.order for part in self._parts])
        shifts = np.zeros(len(self._parts), dtype=np.int64)
        least, start = self._at(order, shifts)
        for _ in range(ROUNDS):
            before = least
            for index in range(1, len(shifts)):
                for share in SHIFTS:
                    changed = shifts.copy()
                    changed[index] += share * self._pace() // 64
                    ticks, late = self._at(order, changed)
                    if ticks < least:
                        least, start, shifts = ticks, late, changed
            if least == before:
                break
        return least, order, start

    def _pace(self) -> int:
        """Ticks of a mean op and its transfer."""
        ops = self._arrays.ops
        return int(ops.duration.mean()) + ops.transfer

    def _at(self, order: Ints, shifts: Ints) -> tuple[int, Ints]:
        """Period and start ticks where every set begins so much later."""
        arrays = self._arrays
        late, done = self._closed(np.max([np.where(part.ends > NEVER, part.ends + shift, NEVER)
                                          for part, shift in zip(self._parts, shifts, strict=True)], axis=0))
        start = latest(arrays, order, late)
        return self._longest(start, done, order), start

    def _longest(self, start: Ints, ends: Ints, order: Ints) -> int:
        """The longest window of the workers of these ops, where the reductions of groups end at these ticks."""
        arrays = self._arrays
        first = np.full(len(arrays.workers), -NEVER)
        np.minimum.at(first, arrays.ops.worker[arrays.ops.unit[order]], start[order])
        here = first < -NEVER
        return int((ends[arrays.group[here]] + arrays.tail[here] - first[here]).max())

    def _closed(self, ends: Ints) -> tuple[Ints, Ints]:
        """([group] deadlines of compute ops that end at these ticks at the earliest, [group] when reductions are done).
        """
        arrays = self._arrays
        if not arrays.problem.interleaved:
            late = late_ends(arrays, ends)
            return late, reduced(arrays, late)[1]
        # As late as the last of those that a group reduces gradients with; without any, never.
        late = ints([ends[list(groups)].max() for groups in arrays.problem.linked])
        late = np.where(late > NEVER, late, -NEVER)
        return late, late


def _independent(arrays: ProblemArrays) -> list[Ints]:
    """Sets of workers (rows) that run something, those together that share a micro-batch."""
    worker, same = arrays.ops.worker, [one[1:] == other[1:] for one, other in pairwise(arrays.units)]
    pairs = np.stack([worker[:-1], worker[1:]])[:, same]
    tops = np.array(joined(len(arrays.workers), np.unique(pairs, axis=1).T.tolist()))
    return [np.flatnonzero((tops == one) & (arrays.load > 0)) for one in np.unique(tops[arrays.load > 0]).tolist()]
