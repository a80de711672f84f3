"""Proven lower bounds on the period where any live holder of a stage may run any micro-batch of it, or a slice.

They are those of `planner.model.bounds` with two changes. No worker has micro-batches of its own, so that only the sum
over all holders of a stage counts. And what is counted are *cells*: one of the p equal layers of a stage for one
micro-batch, p = 1 where micro-batches are not cut. A slice is one cell or more, so that a wait which starts or ends
with a unit starts or ends with one cell at least.

To stay in whole numbers, times of a stage are multiplied by p: then a cell takes F, I and W ticks. A schedule with
slices may have times that are no whole number of the problem's ticks, so neither are the bounds.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from slipstream.planner.model.drain import Room, most_left
from slipstream.planner.model.problem import Problem
from slipstream.planner.model.work_bounds import ticks_of_work
from slipstream.schedules.schedule import OpKind, Worker

Named = tuple[Fraction, str]
"""A bound in ticks, and in words what it counts."""


class _Cells(NamedTuple):
    """The cells of a stage on one of its holders; times in ticks / p."""

    parts: int
    """p: cells of a micro-batch."""
    forward: int
    gradient: int
    """Of an I, or B."""
    weight: int
    """Of a W; 0 when fused."""
    round_trip: int
    """From the end of an F to the start of its I."""
    room: Room
    """Memory that a cell takes / p, and that of the holder."""
    waiting: int
    """Cells that memory holds between F and I;"""
    held: int
    """between F and W;"""
    stashed: int
    """between I and W."""
    late: int = 0
    """How much later than after its round trip the first I starts."""

    @property
    def work(self) -> int:
        """F, I and W."""
        return self.forward + self.gradient + self.weight

    def fill(self, count: int) -> int:
        """Idle time before the first I of a worker that runs so many cells; see `bounds.window_bound`."""
        return max(0, self.round_trip + self.late - (min(count, self.waiting) - 1) * self.forward)

    def drain(self, count: int, *, until_weight: bool) -> int:
        """Idle time from the last F on, until the last I has ended, or its W, too; see `bounds._drain_idle`."""
        if count <= self.waiting:
            return 0
        idle = self.round_trip + self.gradient
        if until_weight:
            left = most_left(self.room, self.waiting, count, self.gradient, self.weight)
            return max(0, idle + self.weight - left)
        return max(0, idle - self.waiting * self.gradient)

    def window(self, count: int) -> int:
        """Time from the first to the last op."""
        return count * self.work + self.fill(count) + self.drain(count, until_weight=True) if count else 0


def shared_bounds(problem: Problem) -> list[Named]:
    """Each valid on its own."""
    bounds = [(_group_work(problem, columns), f"the work of column {columns[0]}, shared by its live workers")
              for columns in _tied_columns(problem)]
    for stage in _single(problem):
        column = problem.column_of[stage]
        window = _window(problem, stage)
        bounds.append((window, f"work and round trips of the busiest worker of column {column}"))
        bounds.append((_crowded(problem, stage), f"the wait of column {column} for fewer workers at other stages"))
        bounds.append((_chain(problem, stage), f"the way to stage {stage}, its work, and the way back"))
        if problem.optimizer == "synchronous":
            bounds.append((problem.least_ways[0][stage] + window, f"the way to column {column}, and its work"))
    return bounds


def _tied_columns(problem: Problem) -> list[list[int]]:
    """Columns that hold the same layers."""
    return [[column for column, tied in enumerate(problem.tied) if tied == first]
            for first in sorted(set(problem.tied))]


def _single(problem: Problem) -> Sequence[int]:
    """The stages whose workers hold no other layers, and whose layers, if they can be told apart, are equal."""
    grid = problem.grid
    if grid.chains > 1:
        return ()
    return [stage for stage in range(len(grid.stages))
            if len(grid.stages_of(problem.column_of[stage])) == 1 and problem.parts_of(stage)]


def _group_work(problem: Problem, columns: Sequence[int]) -> Fraction:
    """All work of some columns at the rates of all their live workers, with the shortest of their tails."""
    grid = problem.grid
    work = sum(sum(problem.usual(kind, stage) for kind in problem.kinds) * _along(problem, stage)
               for column in columns for stage in grid.stages_of(column))
    slowness = (problem.workers[Worker(pipeline, column)].per_mille for column in columns
                for pipeline in problem.live_by_column[column])
    return ticks_of_work(work, slowness) + min(map(problem.column_tail, columns))


def _along(problem: Problem, stage: int) -> int:
    """Micro-batches that visit a stage in an iteration."""
    grid = problem.grid
    return sum(len(range(stage // grid.depth, count, grid.chains)) for count in grid.microbatches)


def _cells(problem: Problem, stage: int, worker: Worker) -> _Cells:
    parts = problem.parts_of(stage)
    forward, gradient, *weight = (problem.cost(kind, stage, worker) for kind in problem.kinds)
    there, back = problem.least_ways
    hops = 2 * problem.least_hop(stage) if stage + 1 < len(problem.grid.stages) else 0
    trip = there[-1] - there[stage + 1] + back[-1] - back[stage + 1] + hops
    activation, stash = problem.activation(stage), problem.stash(stage)
    total = _along(problem, stage) * parts

    def most(amount: int) -> int:
        return problem.room(worker) * parts // amount if problem.memory and amount else total

    room = Room(activation, stash, problem.room(worker) * parts)
    return _Cells(parts=parts, forward=forward, gradient=gradient, weight=sum(weight), round_trip=trip * parts,
                  room=room, waiting=most(activation), held=most(min(activation, stash)), stashed=most(stash))


def _kinds(problem: Problem, stage: int) -> Counter[_Cells]:
    """How many holders of a stage run its cells in which times and room."""
    column = problem.column_of[stage]
    workers = [Worker(pipeline, column) for pipeline in problem.live_by_column[column]]
    one = {problem.workers[worker]: worker for worker in workers}
    found: Counter[_Cells] = Counter()
    for like, number in Counter(problem.workers[worker] for worker in workers).items():
        found[_cells(problem, stage, one[like])] += number
    return found


def _window(problem: Problem, stage: int) -> Fraction:
    """The least T such that the holders of a stage can run all of its cells in windows of T ticks.

    T is a whole number of ticks / p, as all times of cells are.

    A worker that runs n cells has a window of at least n (F + I + W) and the idle time while it fills and drains, which
    do not fall with n. So in T it runs no more than the n with which that is T.
    """
    total = _along(problem, stage) * problem.parts_of(stage)
    kinds = _kinds(problem, stage)

    def enough(ticks: int) -> bool:
        return sum(number * _most(cells, ticks, total) for cells, number in kinds.items()) >= total

    least = bisect_left(range(max(cells.window(total) for cells in kinds)), True, key=enough)
    return Fraction(least, problem.parts_of(stage)) + problem.column_tail(problem.column_of[stage])


def _crowded(problem: Problem, stage: int) -> Fraction:
    """As `_window`, where a later stage has fewer live workers; see `bounds._crowded_bound`. 0 with slices.

    The I that come first on the n holders are of n micro-batches. At a stage with k < n holders no more than k of these
    have the first F of their worker; the others get it at least one F late, and n - k holders idle that much longer.
    With fewer holders in use, fewer idle longer, but those that do not run no more than with all.
    """
    kinds = _kinds(problem, stage)
    if problem.sliced or len(kinds) > 1:
        return Fraction(0)
    cells, = kinds
    total, holders, best = _along(problem, stage), len(problem.holders[stage]), 0
    for later in range(stage + 1, len(problem.grid.stages)):
        in_time = len(problem.holders[later])
        if in_time >= holders:
            continue
        late = cells._replace(late=problem.fastest(OpKind.F, later))

        def enough(ticks: int, in_time: int = in_time, late: _Cells = late) -> bool:
            return in_time * _most(cells, ticks, total) + (holders - in_time) * _most(late, ticks, total) >= total

        best = max(best, bisect_left(range(late.window(total)), True, key=enough))
    return Fraction(best) + problem.column_tail(problem.column_of[stage])


def _most(cells: _Cells, ticks: int, total: int) -> int:
    """The most cells, up to all, that fit in a window."""
    return bisect_right(range(1, total + 1), ticks, key=cells.window)


def _chain(problem: Problem, stage: int) -> Fraction:
    """Fill and drain bound, through the busiest worker of a stage; see `bounds._chain_bound`. 0 where speeds differ."""
    kinds = _kinds(problem, stage)
    if len(kinds) > 1:
        return Fraction(0)
    cells, = kinds
    parts = cells.parts
    count = -(-_along(problem, stage) * parts // len(problem.holders[stage]))
    left = max((count - min(count, cells.stashed)) * cells.weight,
               (count - min(count, cells.held)) * cells.weight + cells.drain(count, until_weight=False))
    inside = count * (cells.forward + cells.gradient) + cells.fill(count) + left
    there, back = problem.least_ways
    last = Fraction(0)
    if problem.backward == "split" and stage and problem.parts_of(0):
        last = Fraction(problem.fastest(OpKind.W, 0), problem.parts_of(0))
    tail = problem.column_tail(problem.column_of[0])
    ways = there[stage] + back[stage] + last
    return Fraction(inside, parts) + ways + (tail if problem.optimizer == "staggered" else
                                         max(tail, *problem.times.optimizer))
