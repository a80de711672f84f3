"""List schedules, by the compiled list scheduler where it is ready, else by `list_scheduler`: op for op the same."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from planner.model.arrays import Dense, Order
from planner.model.solution import Solution
from planner.search.list_scheduler import Policy, lane_limits, list_order, ranks, reserves

UNLIMITED = 2**40


class Lister(Protocol):
    """Makes list schedules of one problem with chosen hosts."""

    dense: Dense

    def period(self, policy: Policy) -> int:
        """The period in ticks that a policy gives. `solution` is then that of this policy."""
        ...

    def solution(self) -> Solution:
        """The last plan made."""
        ...


class PlainLister:
    """In Python."""

    def __init__(self, dense: Dense) -> None:
        self.dense = dense
        self._made: tuple[Order, Sequence[int]] = ((), ())

    def period(self, policy: Policy) -> int:
        """The period in ticks that a policy gives."""
        order = list_order(self.dense, policy)
        period, start = self.dense.timed(order)
        self._made = order, start
        return period

    def solution(self) -> Solution:
        """The last plan made."""
        return self.dense.solution(*self._made)


class CompiledLister:
    """In machine code: some hundred times faster."""

    def __init__(self, kernel: ModuleType, dense: Dense) -> None:
        self.dense = dense
        self._kernel = kernel
        problem = dense.problem
        stages = range(len(problem.grid.stages))
        memory = problem.memory
        self._lane, self._place, self._stage = _ints(dense.lane), _ints(dense.place), _ints(dense.stage)
        self._length, self._hop = _ints(dense.length), _ints(dense.hop)
        self._hold = _ints([problem.hold(stage) for stage in stages])
        self._stash = _ints([problem.stash(stage) for stage in stages])
        self._need = self._hold + _ints(reserves(problem))
        self._capacity = _ints([memory.capacity[role.column] if memory else UNLIMITED for role in dense.roles])
        self._base = _bases(dense)
        columns = _ints(dense.column)
        self._columns = columns
        self._tied = _ints(problem.tied)
        self._tail = _ints(dense.tail)
        self._order = np.zeros(len(dense.length), dtype=np.int64)
        self._start = np.zeros(len(dense.length), dtype=np.int64)
        self._free = np.zeros(len(dense.roles), dtype=np.int64)
        self._ranks: dict[str, Any] = {}

    def period(self, policy: Policy) -> int:
        """The period in ticks that a policy gives."""
        dense, last = self.dense, self.dense.depth - 1
        if policy.guests not in self._ranks:
            self._ranks[policy.guests] = _ints(ranks(dense, policy.guests))
        limits = [[UNLIMITED] * len(self._hold) if row is None else row for row in lane_limits(dense, policy)]
        hop = np.zeros_like(self._hop) if policy.ignore_transfers else self._hop
        done = self._kernel.list_order(
            dense.kinds, len(self._hold) > dense.problem.grid.columns, self._lane, self._place, self._stage, last,
            self._ranks[policy.guests], self._length, hop, self._hold, self._stash, self._need, self._capacity,
            np.array(limits, dtype=np.float64), policy.patience, policy.forward_patience,
            policy.forward_order == "deepest", policy.eager_weights, policy.make_room, self._base, self._order)
        assert done == len(dense.length), "list scheduler left ops out"
        return self._time()

    def _time(self) -> int:
        """Time the order as `Dense.timed` does; its period."""
        dense, kernel, problem = self.dense, self._kernel, self.dense.problem
        given = (dense.kinds, self._lane, self._place, dense.depth - 1, self._length, self._hop, self._order,
                 self._start, self._free)
        kernel.earliest(*given)
        ends = np.zeros(problem.grid.columns, dtype=np.int64)
        np.maximum.at(ends, self._tied[self._columns], self._free)
        ends = ends[self._tied]
        if problem.optimizer == "synchronous":
            closing = np.maximum(ends + self._tail, ends.max() + _ints(problem.times.optimizer))
            return int(closing.max() - self._start.min())
        self._free[:] = ends[self._columns]
        kernel.latest(*given)
        busy = np.bincount(self._lane, minlength=len(self._free)) > 0
        windows = (ends + self._tail)[self._columns] - self._free
        return int(windows[busy].max())

    def solution(self) -> Solution:
        """The last plan made."""
        return self.dense.solution(self._order.tolist(), self._start.tolist())


def lister(kernel: ModuleType | None, dense: Dense) -> Lister:
    """The fastest there is."""
    return CompiledLister(kernel, dense) if kernel else PlainLister(dense)


def _bases(dense: Dense) -> Any:
    """[lane, which] where each heap of each worker begins, with room for all of the worker's units; the end of all."""
    sizes = np.bincount(_ints(dense.lane), minlength=len(dense.roles))
    room = np.outer(sizes, [1, 1, 1, 2, 1])
    ends = np.cumsum(room).reshape(room.shape)
    bases = np.zeros((room.shape[0], room.shape[1] + 1), dtype=np.int64)
    bases[:, :-1], bases[:, -1] = ends - room, ends[:, -1]
    return bases


def _ints(values: Sequence[int]) -> Any:
    return np.array(values, dtype=np.int64)
