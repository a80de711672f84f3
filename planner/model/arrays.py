"""Represent a problem as arrays of integers, for loops that read all ops many times.

The number of an op is unit x number of kinds + index of its kind. Units are numbered by pipeline,
micro-batch and place in the route, so that the unit at the next slice has the next number. An
*order* lists all ops so that each comes after the ops that it waits for; each worker runs its ops
in that order. The memory of a worker changes only when one of its own ops starts or ends, so it
depends on the order alone: once an order is known to fit, start times may be chosen freely.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.planner.model.problem import MicroBatch, Problem, Unit
from slipstream.schedules.precedence import RULES, OpKey
from slipstream.schedules.schedule import Worker

if TYPE_CHECKING:
    from slipstream.planner.kernel import Arcs, Ops, Reductions

Ints = NDArray[np.int64]


class ProblemArrays:
    """Integer arrays of a problem in which a worker is chosen for each unit.

    Searches and the computation of start times read them. Workers are numbered by row: their index
    among the live workers.
    """

    def __init__(self, problem: Problem, hosts: Mapping[Unit, Worker]) -> None:
        self.problem = problem
        self.hosts = hosts
        """Worker that runs each unit."""
        self.units = list(problem.iterate_units())
        self.unit_numbers = to_ints(self.units)
        """Slice, pipeline and micro-batch of each unit: shape [units, 3]."""
        self.workers = problem.live_workers
        """Live workers by row, which is their index in all arrays."""
        self.group = to_ints([problem.group_number(worker) for worker in self.workers])
        """Number of each worker's group, by the worker's row."""
        self.ticks_after_group = to_ints(
            [problem.ticks_after_group(worker) for worker in self.workers]
        )
        """`Problem.ticks_after_group` of each worker, by row."""
        self.reductions = build_reduction_arrays(problem)
        self.ops = self._build_ops()
        self.load = np.bincount(self.ops.worker, minlength=len(self.workers))
        """Number of units that each worker runs, by row."""

    def with_assignment(self, worker: Ints) -> "ProblemArrays":
        """Return a copy of these arrays in which other workers run the units.

        The array `worker` has the row of the worker that runs each unit.
        """
        # Only what depends on the worker is computed again; all other arrays are shared.
        other, ops = copy(self), self.ops
        other.hosts = {
            unit: self.workers[row] for unit, row in zip(self.units, worker.tolist(), strict=True)
        }
        other.ops = ops._replace(
            worker=worker,
            duration=self._op_durations(ops.slice, worker),
            predecessors=_with_hops(ops.predecessors, worker, ops),
            successors=_with_hops(ops.successors, worker, ops),
        )
        other.load = np.bincount(worker, minlength=len(self.workers))
        return other

    @cached_property
    def row_of(self) -> Mapping[Worker, int]:
        """Row of each live worker, which is its index in all arrays."""
        return {worker: row for row, worker in enumerate(self.workers)}

    @cached_property
    def home_rows(self) -> Ints:
        """Row of each unit's worker in its own pipeline; -1 if that worker is down.

        All slices must be stages.
        """
        return to_ints(
            [
                self.row_of.get(self.problem.home_worker(unit.slice, unit.pipeline), -1)
                for unit in self.units
            ]
        )

    def _build_ops(self) -> "Ops":
        from slipstream.planner.kernel import Ops  # numba takes a third of a second to load

        problem, kinds = self.problem, len(self.problem.op_kinds)
        number = to_ints([unit.slice for unit in self.units])
        worker = to_ints([self.row_of[self.hosts[unit]] for unit in self.units])
        position, length = _route_places(problem)
        predecessors, successors = _build_arcs(problem, position, length, worker)
        # Positions are layers and not slice indices, so that routes of different lengths are
        # comparable.
        # the kernel requires contiguous arrays
        position, end = to_ints(problem.layers_by_slice)[number].T.copy()
        back = end.max() - end
        depth = 1 + int(max(position.max(), back.max()))
        return Ops(
            kinds=kinds,
            depth=depth,
            mixed=len(problem.layers_by_slice) > problem.grid.columns,
            unit=np.arange(len(self.units) * kinds, dtype=np.int64) // kinds,
            slice=number,
            position=position,
            back=back,
            worker=worker,
            duration=self._op_durations(number, worker),
            predecessors=predecessors,
            successors=successors,
        )

    def _op_durations(self, number: Ints, worker: Ints) -> Ints:
        """Return the ticks of each op, from each unit's slice, `number`, and worker, a row."""
        problem, rows = self.problem, len(self.workers)
        # There are few pairs of a slice and a worker, and many units, so each pair is timed once.
        pairs, inverse = np.unique(number * rows + worker, return_inverse=True)
        costs = []
        for pair in pairs.tolist():
            slice_, worker_ = pair // rows, self.workers[pair % rows]
            costs.append([problem.op_ticks(kind, slice_, worker_) for kind in problem.op_kinds])
        return to_ints(costs)[inverse].ravel()

    def make_solution(self, order: Ints, start: Ints) -> "Solution":
        """Return the solution with these start ticks, by op.

        Ops with equal starts and ends keep their place in `order`.
        """
        return Solution(
            self, order[np.lexsort(((start + self.ops.duration)[order], start[order]))], start
        )

    def iterate_op_keys(self) -> Iterator[OpKey]:
        """Yield the keys of all ops, in the order of their numbers."""
        kinds = self.problem.op_kinds
        for slice_, pipeline, microbatch in self.units:
            for kind in kinds:
                yield OpKey(kind, slice_, pipeline, microbatch)


class Solution(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Workers and start times of all compute ops of a problem, without A and O."""

    arrays: ProblemArrays
    """Arrays of the problem with the worker of each unit."""
    order: Ints
    """Numbers of all ops, each after those it waits for, in their order on workers."""
    start: Ints
    """Start tick of each op, by its number."""

    def with_starts(self, start: Ints) -> "Solution":
        """Return a copy of the solution with other start ticks."""
        return Solution(self.arrays, self.order, start)

    @property
    def end(self) -> Ints:
        """End tick of each op, by its number."""
        return self.start + self.arrays.ops.duration

    @property
    def hosts(self) -> Mapping[Unit, Worker]:
        """Mapping of each unit to the worker that runs it."""
        return self.arrays.hosts

    @cached_property
    def start_by_key(self) -> Mapping[OpKey, int]:
        """Start tick of each op by its key; the keys are in the order `order`."""
        keys, start = list(self.arrays.iterate_op_keys()), self.start.tolist()
        return {keys[op]: start[op] for op in self.order.tolist()}


def build_reduction_arrays(problem: Problem) -> "Reductions":
    """Return the gradient reductions as arrays.

    Unless `Problem.times_each_reduction`, they have none, and `Problem.ticks_after_group` includes
    the reductions.
    """
    from slipstream.planner.kernel import Reductions

    shared = problem.groups.reductions if problem.times_each_reduction else ()
    # The reductions of each group: its workers must be idle while one of them runs.
    of_group: list[list[int]] = [[] for _ in problem.groups.linked]
    for number, (_, groups) in enumerate(shared):
        for group in groups:
            of_group[group].append(number)
    # The reductions that wait for a slice's W: those that share a layer with it.
    of_slice = []
    for first, end in problem.layers_by_slice:
        of_slice.append(
            [number for number, ((low, high), _) in enumerate(shared) if low < end and first < high]
        )
    return Reductions(
        sharers=pad_rows([groups for _, groups in shared]),
        ticks=to_ints([problem.reduction_ticks(layers) for layers, _ in shared]),
        between=pad_rows(of_group),
        awaiting=pad_rows(of_slice),
    )


def pad_rows(rows: Sequence[Sequence[int]]) -> Ints:
    """Return lists as rows of an array of at least one column, padded with -1."""
    width = max([1, *map(len, rows)])
    return to_ints([[*row, *[-1] * (width - len(row))] for row in rows]).reshape(len(rows), width)


def to_ints(values: Sequence[Any]) -> Ints:
    """Convert values to an array of 64-bit integers."""
    return np.array(values, dtype=np.int64)


def _route_places(problem: Problem) -> tuple[Ints, Ints]:
    """Return each unit's place in its route, and how many slices the route has."""
    grid = problem.grid
    lengths = to_ints(
        [
            len(problem.routes[MicroBatch(pipeline, microbatch)])
            for pipeline, count in enumerate(grid.microbatches)
            for microbatch in range(count)
        ]
    )
    # The number of the first unit of each unit's route.
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.arange(len(first), dtype=np.int64) - first, np.repeat(lengths, lengths)


def _build_arcs(
    problem: Problem, position: Ints, length: Ints, worker: Ints
) -> "tuple[Arcs, Arcs]":
    """Return the precedences as two sets of arcs: to predecessors, and to successors."""
    kinds = problem.op_kinds
    units = np.arange(len(position), dtype=np.int64)
    ops, awaited, transfers = [], [], []
    # Apply each rule to all units at once: a loop over the ops would take seconds for large jobs.
    for rule in RULES:
        if rule.kind in kinds and rule.awaited in kinds:
            where = (position + rule.step >= 0) & (position + rule.step < length)
            if rule.position != "any":
                where &= position == (0 if rule.position == "first" else length - 1)
            waiting = units[where]
            ops.append(waiting * len(kinds) + kinds.index(rule.kind))
            awaited.append((waiting + rule.step) * len(kinds) + kinds.index(rule.awaited))
            transfers.append(
                np.full(len(waiting), problem.times.transfer if rule.tensor else 0, dtype=np.int64)
            )
    # A tensor takes time only between two workers.
    later, earlier, transfer = map(np.concatenate, (ops, awaited, transfers))
    hop = transfer * (worker[later // len(kinds)] != worker[earlier // len(kinds)])
    count = len(position) * len(kinds)
    return _compress_arcs(count, later, earlier, transfer, hop), _compress_arcs(
        count, earlier, later, transfer, hop
    )


def _with_hops(arcs: "Arcs", worker: Ints, ops: "Ops") -> "Arcs":
    """Return a copy of the arcs with the hops for other workers, rows by unit."""
    waiting = np.repeat(np.arange(len(arcs.start) - 1), np.diff(arcs.start))
    return arcs._replace(
        hop=arcs.transfer * (worker[ops.unit[waiting]] != worker[ops.unit[arcs.op]])
    )


def _compress_arcs(count: int, op: Ints, other: Ints, transfer: Ints, hop: Ints) -> "Arcs":
    """Return arcs from each `op` to its `other` as `Arcs` of `count` ops."""
    from slipstream.planner.kernel import Arcs

    # Stable, so that the arcs of one op keep the order of the rules.
    order = np.argsort(op, kind="stable")
    start = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(op, minlength=count), out=start[1:])
    return Arcs(start=start, op=other[order], transfer=transfer[order], hop=hop[order])
