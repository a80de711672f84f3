"""Make orders in which F and I of a worker's stages take turns.

The orders suit any durations, transfers and memory. Interleaved stages: micro-batches go in groups.
A worker runs the F of a group at its first stage, then at its next, and so on, and the I (or B)
from its last stage to its first. After some F, its warm-up, F and I alternate (Narayanan et al.
2021, arXiv 2104.04473). A group of all micro-batches is breadth-first (Lamy-Poirier 2023, arXiv
2211.05953).

Two stages as a V: F of the first stage, F of both, F and I of the second, then F and I of the first
and of the second in turn; at the end I of both, then I of the first and W in turn (Qi et al. 2024,
arXiv 2401.10241).

W run directly after their I, or a fixed number of I later, as with zero bubble, or wherever a
worker would be idle or needs memory.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Literal, get_args

import msgspec
import numpy as np

from slipstream.planner.loops import kernel_loops
from slipstream.planner.model.arrays import Ints, ProblemArrays, Solution, to_ints
from slipstream.planner.model.memory import activation_memory
from slipstream.planner.model.problem import Problem
from slipstream.planner.model.start_times import time_order
from slipstream.planner.search.list_scheduler import (
    StuckError,
    make_memory_limits,
    without_reserves,
)

Waiting = Literal["none", "column", "any"]
WAITING: tuple[Waiting, ...] = get_args(Waiting)


class InterleavedRule(msgspec.Struct, frozen=True, kw_only=True):
    """Rule by which a worker's F and I take turns after a warm-up of F."""

    group: int
    """Number of micro-batches that pass a worker's stages together; 0: the order of a V."""
    slope: float
    """Number of F by which a worker's warm-up is longer than the next column's."""
    extra: int = 0
    """Number of additional F in the warm-up of each worker."""
    waiting: Waiting = "any"
    """Number of W that may wait: none, that of columns before the worker's, or any."""
    late_drain: bool = False
    """True if any number of W may wait after a worker's last F."""
    patience: float = 1.0
    """Least idle time, in durations of a W, that a worker fills with W."""


def iterate_interleaved_rules(problem: Problem) -> Iterator[InterleavedRule]:
    """Iterate over the rules to try.

    There are none unless each worker has several stages of one direction, interleaved or as a V, or
    if the problem has a layout.
    """
    # The order suits placements in which the second stages follow the first: back from the last
    # column (a V), or from the first column again (interleaved).
    grid = problem.grid
    if grid.depth < 2 * grid.columns or grid.chains > 1 or problem.assigned:
        return
    after_first = problem.column_of[grid.columns]
    if after_first == problem.column_of[grid.columns - 1] and grid.depth == 2 * grid.columns:
        yield from (
            InterleavedRule(group=0, slope=2.0, waiting=waiting, late_drain=True)
            for waiting in WAITING
        )
    if after_first != problem.column_of[0]:
        return
    # The usual groups, with short or long warm-ups; at last all micro-batches as one group.
    whole = max(grid.microbatches)
    turns: tuple[tuple[float, Waiting], ...] = (
        (1.0, "column"),
        (2.0, "any"),
        (1.0, "any"),
        (2.0, "none"),
    )
    for slope, waiting in turns:
        yield InterleavedRule(group=grid.columns, slope=slope, waiting=waiting)
    yield InterleavedRule(group=whole, slope=whole)


def change_interleaved_rule(rule: InterleavedRule, random: random.Random) -> InterleavedRule:
    """Return a copy of a rule with one field changed at random."""
    name, step = random.choice(rule.__struct_fields__), random.choice((-2, -1, 1, 2))
    values = {
        "group": rule.group and max(1, rule.group + step),
        "extra": max(0, rule.extra + step),
        "slope": random.choice((0.5, 1.0, 1.5, 2.0)),
        "waiting": random.choice(WAITING),
        "late_drain": not rule.late_drain,
        "patience": random.choice((0.3, 0.5, 0.7, 0.9, 1.0)),
    }
    return msgspec.structs.replace(rule, **{name: values[name]})


class InterleavedScheduler:
    """Builder of interleaved orders of one problem, given the worker of each unit."""

    def __init__(self, arrays: ProblemArrays) -> None:
        self.arrays = arrays
        self._kernel = kernel_loops()
        self._memory = without_reserves(make_memory_limits(arrays)[0])
        self._last: tuple[Ints, Ints] | None = None

    def evaluate_rule(self, rule: InterleavedRule) -> int:
        """Make the order of a rule, and return its period in ticks.

        `last_solution` then returns the order. Raises StuckError if the rule's sequences of F and I
        wait for each other, or for memory.
        """
        # The F and I of all workers one after the other, and how many W each may let wait.
        arrays = self.arrays
        turns = [self._turn_of(row, rule) for row in range(len(arrays.workers))]
        begin = np.cumsum([0, *map(len, turns)])
        waiting = to_ints(
            [
                {"none": 0, "column": worker.column, "any": len(arrays.units)}[rule.waiting]
                for worker in arrays.workers
            ]
        )
        # Whether the ops of different workers fit together shows only when they are placed.
        order = np.zeros_like(arrays.ops.duration)
        done = self._kernel.order_in_turn(
            arrays.ops,
            self._memory,
            begin,
            np.concatenate(turns),
            waiting,
            rule.late_drain,
            rule.patience,
            order,
        )
        if done < len(order):
            raise StuckError
        period, start = time_order(arrays, order)
        self._last = order, start
        return period

    def last_solution(self) -> Solution:
        """Return the order of the last call of `evaluate_rule`, with its start ticks."""
        assert self._last is not None
        return self.arrays.make_solution(*self._last)

    def _turn_of(self, row: int, rule: InterleavedRule) -> Ints:
        """Return the numbers of the F and I of worker number `row`, in their order."""
        # Groups of micro-batches, through the worker's stages and back.
        arrays = self.arrays
        units = np.flatnonzero(arrays.ops.worker == row)
        number, pipeline, microbatch = arrays.unit_numbers[units].T
        slices, chunk = np.unique(arrays.ops.position[units], return_inverse=True)
        forward, gradient = (
            units[np.lexsort((pipeline, microbatch, place, microbatch // max(rule.group, 1)))]
            * arrays.ops.kinds
            for place in (chunk, -chunk)
        )
        # F of the warm-up, as many as memory allows.
        column, columns = arrays.workers[row].column, arrays.problem.grid.columns
        warm = (
            max(len(slices) - 1, 0) * rule.group
            + int(rule.slope * (columns - 1 - column))
            + rule.extra
        )
        if arrays.problem.memory is not None and len(units):
            largest = max(activation_memory(arrays.problem, each) for each in set(number.tolist()))
            warm = min(warm, int(self._memory.capacity[row]) // max(largest, 1) - 1)
        # Then F and I in turn, and the last I.
        if not rule.group:
            out, back = (units[chunk == place] * arrays.ops.kinds for place in (0, 1))
            return _turn_of_v(out, back, warm + 1, column, columns)
        warm = min(max(warm, 0), len(units) - 1)
        pairs = np.column_stack((forward[warm:], gradient[: len(units) - warm] + 1)).ravel()
        return np.concatenate((forward[:warm], pairs, gradient[len(units) - warm :] + 1))


def _turn_of_v(first: Ints, second: Ints, warm: int, column: int, columns: int) -> Ints:
    """Return the F and I, in order, of a worker in `column` of a V."""
    # The arrays have the F of its first stage, on the way out, and of its second, on the way back;
    # the number of an I is that of its F plus 1. `warm` F of the first stage come before any other
    # op. Once all I of the second stage are done, a -1, for the oldest W that waits, follows each I
    # of the first; other W are left out.
    turn = [*first[:warm]]
    # Numbers that are done of 0, 1: F of both stages; 2, 3: I of both.
    done, count = [len(turn), 0, 0, 0], max(len(first), len(second))
    # The later the column, the more F of both stages come before the first I.
    steps = [
        *[(1, 0)] * column,
        *[(1, 3)] * (columns - column),
        *[(0, 2, 1, 3)] * count,
        *[(2, 3)] * count,
    ]
    for kind in itertools.chain.from_iterable(steps):
        ops = (first, second)[kind % 2]
        if done[kind] < len(ops):
            turn.append(ops[done[kind]] + kind // 2)
            done[kind] += 1
            if kind == 2 and done[3] == len(second):
                turn.append(-1)
    return to_ints(turn)
