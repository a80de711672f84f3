"""Bound the period for any assignment of roles to the live workers.

Lemma 13 of docs/bounds.md.

A worker keeps its speed and its own memory in any role. So slow workers, and those with a capacity
of their own, may play any role, too; the others are alike. For each column, number of workers there
and number of unlike ones among them, a bound is proven with the best of these, and with the best
workers in all other columns.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.model.bounds_layouts import ticks_of_work
from slipstream.planner.model.problem import UNLIMITED, Bound, LiveWorker, Problem
from slipstream.schedules.memory import weights_of
from slipstream.schedules.schedule import Scope, Worker

MAX_WINDOWS = 2000
"""Maximum number of bounds of a column; beyond, unlike workers count as the best."""

RoomOf = Callable[[Worker, int], int]
"""Function of a worker and a column: its memory units there, for weights and activations."""


Distribution = tuple[tuple[int, int], ...]
"""Numbers of vacant roles and of unlike workers in other roles, by column."""


class _Unlike(NamedTuple):
    """Live worker with a speed or a memory of its own."""

    worker: Worker
    per_mille: int
    own_room: bool
    """True if its memory is not that of its column."""


def roles_bound(whole: Problem, failed: Collection[Worker], room_of: RoomOf | None = None) -> Bound:
    """Return a bound on the period for any roles.

    Any roles may be vacant, and any live workers may play the others. In `whole`, all workers are
    alive; `failed` ones are left out. The function `room_of` has the memory of a worker in a
    column; None: as `Memory.capacity_for` says.
    """
    return RoleBounds(whole, failed, room_of).best_bound()


def _make_room_of(whole: Problem) -> RoomOf:
    memory, layers = whole.memory, whole.grid.held_layers_by_column

    def room_of(worker: Worker, column: int) -> int:
        if memory is None:
            return UNLIMITED
        return memory.capacity_for(worker, column) + weights_of(memory, layers[column])

    return room_of


class RoleBounds:
    """Bounds by column, number of live workers in it, and of unlike ones."""

    def __init__(
        self, whole: Problem, failed: Collection[Worker], room_of: RoomOf | None = None
    ) -> None:
        """Take the arguments of `roles_bound`."""
        self._whole, self._room_of = whole, room_of or _make_room_of(whole)
        self._live = [worker for worker in whole.live_workers if worker not in failed]
        limits = (whole.memory.capacity_of if whole.memory else None) or ()
        with_room = {limit.worker for limit in limits}
        unlike = [
            _Unlike(worker, whole.slowness(worker), worker in with_room)
            for worker in self._live
            if whole.slowness(worker) != 1000 or worker in with_room
        ]
        columns, vacant = whole.grid.columns, len(whole.workers) - len(self._live)
        if columns * (vacant + 1) * (len(unlike) + 1) > MAX_WINDOWS:
            # Unlike workers count as usual ones, which are given the best speed and memory of all.
            self._unlike, self._usual = [], _best_speed(unlike)
            self._with_own_room = [other.worker for other in unlike if other.own_room]
        else:
            self._unlike, self._usual, self._with_own_room = unlike, 1000, []
        self._window: dict[tuple[int, int, int], int] = {}

    def best_bound(self) -> Bound:
        """Return the least bound that any distribution of the live workers over columns allows."""
        longest = self._distribute() if self._unlike else self._distribute_alike()
        return Bound(max(self._total_work_ticks(), longest), Scope.ROLES,
                     "the work and the waits of each column, whichever workers play its roles")

    def best_distributions(self, kept: int) -> list[Distribution]:
        """Return the best few distributions of vacant roles and unlike workers over columns, best
        first.

        They are ranked by the bound of the longest column, then by the sum of all. Empty if live
        workers are alike, or if too many are unlike.
        """
        if not self._unlike:
            return []
        return [distribution for _, _, distribution in self._rank_distributions(kept)]

    def _total_work_ticks(self) -> int:
        """Return the ticks in which all live workers together can do all work."""
        problem = self._whole
        grid, work = problem.grid, 0
        for stage in range(grid.depth):
            # Of copies of a stage, the one that takes least counts.
            ticks = []
            for copy in problem.copies_of(stage):
                ticks.append(sum(problem.usual_ticks(kind, copy) for kind in problem.op_kinds))
            work += min(ticks) * grid.total_microbatches
        closing = min(map(problem.column_closing_ticks, range(grid.columns)))
        return closing + math.floor(ticks_of_work(work, map(problem.slowness, self._live)))

    def _distribute_alike(self) -> int:
        """Return the least of the largest bounds of a column, over all distributions.

        Workers are alike. Bounds grow with the number of vacant roles. So each in turn goes to the
        column where the bound is then least.
        """
        down = [0] * self._whole.grid.columns
        longest = self._column_ticks(0, 0, 0)
        for _ in range(self._vacant):
            free = [column for column, count in enumerate(down) if count < self._most_vacant]
            if not free:
                return 0  # there is no plan
            column = min(free, key=lambda column: self._column_ticks(column, down[column] + 1, 0))
            down[column] += 1
            longest = max(longest, self._column_ticks(column, down[column], 0))
        return longest

    def _distribute(self) -> int:
        """Return the least value, over all distributions, of the largest bound of a column."""
        return next((longest for longest, _, _ in self._rank_distributions(1)), 0)

    def _rank_distributions(self, kept: int) -> list[tuple[int, int, Distribution]]:
        """Return the best few distributions, each with its bounds.

        They are the largest bound of a column and the sum of all. Dynamic programming over columns:
        best[v, u] are the least few if v roles of the columns so far are vacant, and unlike workers
        play u of the others. The first is exact.
        """
        grid, usual = self._whole.grid, len(self._live) - len(self._unlike)
        best: dict[tuple[int, int], list[tuple[int, int, Distribution]]] = {(0, 0): [(0, 0, ())]}
        for column in range(grid.columns):
            after: dict[tuple[int, int], list[tuple[int, int, Distribution]]] = {}
            for (vacant, unlike), ranked in best.items():
                usual_left = usual - (column * grid.pipelines - vacant - unlike)
                for down in range(min(self._most_vacant, self._vacant - vacant) + 1):
                    count = grid.pipelines - down
                    for some in range(
                        max(0, count - usual_left), min(count, len(self._unlike) - unlike) + 1
                    ):
                        ticks = self._column_ticks(column, down, some)
                        after.setdefault((vacant + down, unlike + some), []).extend(
                            (max(longest, ticks), total + ticks, (*before, (down, some)))
                            for longest, total, before in ranked)
            best = {key: sorted(ranked)[:kept] for key, ranked in after.items()}
        return best.get((self._vacant, len(self._unlike)), [])

    @property
    def _vacant(self) -> int:
        """Number of roles that no worker plays."""
        return self._whole.grid.pipelines * self._whole.grid.columns - len(self._live)

    @property
    def _most_vacant(self) -> int:
        """Largest number of vacant roles of a column."""
        return self._whole.grid.pipelines - int(self._whole.grid.chains == 1)

    def _column_ticks(self, column: int, down: int, unlike: int) -> int:
        """Return a bound on the period for a column with vacant roles."""
        # alike, the same problem
        key = (column, down, unlike) if self._unlike or down else (0, 0, 0)
        if key not in self._window:
            fewer = self._column_ticks(column, down - 1, unlike) if down and not self._unlike else 0
            count = self._whole.grid.pipelines - down
            self._window[key] = max(fewer, lower_bound(self._with_workers(column, count, unlike)))
        return self._window[key]

    def _with_workers(self, column: int, count: int, unlike: int) -> Problem:
        """Return the problem in which a column has these workers, the best ones."""
        problem, workers = self._whole, dict[Worker, LiveWorker]()
        for other in range(problem.grid.columns):
            if other != column:
                speed = min(self._usual, _best_speed(self._unlike))
                best = LiveWorker(per_mille=speed, room=self._best_room(other, self._unlike),
                                  holds=problem.grid.held_layers_by_column[other])
                workers |= {
                    Worker(pipeline, other): best for pipeline in range(problem.grid.pipelines)
                }
        usual = LiveWorker(per_mille=self._usual, room=self._best_room(column, ()),
                           holds=problem.grid.held_layers_by_column[column])
        properties = [usual] * (count - unlike) + [
            msgspec.structs.replace(usual, per_mille=speed, room=room)
            for speed, room in zip(*self._best_unlike(column, unlike), strict=True)]
        for pipeline, state in enumerate(properties):
            workers[Worker(pipeline, column)] = state
        return msgspec.structs.replace(problem, workers=dict(sorted(workers.items())))

    def _best_unlike(self, column: int, count: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return speeds and rooms of which any `count` unlike workers have no better.

        They are pairs, in order. If they differ in both, each has the largest room.
        """
        speeds = sorted(other.per_mille for other in self._unlike)
        rooms = [self._room_of(other.worker, column) for other in self._unlike]
        rooms.sort(reverse=True)
        if len(set(speeds)) > 1:
            rooms = rooms[:1] * len(rooms)
        return speeds[:count], rooms[:count]

    def _best_room(self, column: int, unlike: Iterable[_Unlike]) -> int:
        """Return the largest memory in a column of a usual worker or of `unlike`."""
        unlike_workers = [other.worker for other in unlike]
        workers = [*self._with_own_room, *unlike_workers, *self._usual_example]
        return max(self._room_of(worker, column) for worker in workers)

    @property
    def _usual_example(self) -> tuple[Worker, ...]:
        """A worker without a capacity of its own: one that is in no grid."""
        return (Worker(self._whole.grid.pipelines, 0),)


def _best_speed(unlike: Iterable[_Unlike]) -> int:
    """Return the least time, per mille, of the usual workers and these."""
    return min([1000, *(other.per_mille for other in unlike)])
