"""Bound the period for any assignment of roles to the live workers (lemma 13).

A worker keeps its speed, and a memory of its own, in any role; all other workers are alike. A bound
is proven for each column, each number of workers there, and each number of unlike ones among them:
with the best unlike workers, and with the best workers in all other columns.
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
"""Largest number of combinations of column, vacant roles and unlike workers to bound.

If there are more, unlike workers count as usual ones, all with the best speed and memory of all.
"""

MemoryOf = Callable[[Worker, int], int]
"""Function of a worker and a column: its memory units there, for weights and activations."""


Distribution = tuple[tuple[int, int], ...]
"""For each column, the numbers of its vacant roles and of unlike workers in it."""


class _Unlike(NamedTuple):
    """Live worker whose speed or memory differs from the usual."""

    worker: Worker
    per_mille: int
    own_memory: bool
    """True if the worker has a memory of its own rather than its column's."""


def roles_bound(
    whole: Problem, failed: Collection[Worker], memory_of: MemoryOf | None = None
) -> Bound:
    """Return a bound on the period, whichever roles the live workers play.

    In `whole`, all workers are alive; those in `failed` are left out, and any roles may be vacant.
    The function `memory_of` returns the memory units that a worker has in a column, for weights and
    activations; None: they follow from the memory in `whole`.
    """
    return RoleBounds(whole, failed, memory_of).best_bound()


def _make_memory_of(whole: Problem) -> MemoryOf:
    memory, layers = whole.memory, whole.grid.held_layers_by_column
    limits = (memory.capacity_of if memory else None) or ()
    limited = {limit.worker for limit in limits}

    def memory_of(worker: Worker, column: int) -> int:
        if memory is None:
            return UNLIMITED
        largest = memory.capacity_for(worker, column) + weights_of(memory, layers[column])
        # In a file with weights, lighter layers leave a worker more than its capacity.
        if memory.weights:
            homes = (worker.column,) if worker in limited else range(len(layers))
            for home in homes:
                total = memory.capacity_for(worker, home) + weights_of(memory, layers[home])
                largest = max(largest, total)
        return largest

    return memory_of


class RoleBounds:
    """Bounds on the period for every distribution of the live workers over columns.

    The bounds are proven column by column, for each number of vacant roles and of unlike workers
    there.
    """

    def __init__(
        self, whole: Problem, failed: Collection[Worker], memory_of: MemoryOf | None = None
    ) -> None:
        """Take the problem with all workers alive, and the failed workers.

        The function `memory_of` returns the memory units that a worker has in a column; None: they
        follow from the memory in `whole`.
        """
        self._whole, self._memory_of = whole, memory_of or _make_memory_of(whole)
        self._live = [worker for worker in whole.live_workers if worker not in failed]
        limits = (whole.memory.capacity_of if whole.memory else None) or ()
        with_own_memory = {limit.worker for limit in limits}
        unlike = [
            _Unlike(worker, whole.slowness(worker), worker in with_own_memory)
            for worker in self._live
            if whole.slowness(worker) != 1000 or worker in with_own_memory
        ]
        columns, vacant = whole.grid.columns, len(whole.workers) - len(self._live)
        if columns * (vacant + 1) * (len(unlike) + 1) > MAX_WINDOWS:
            # Unlike workers count as usual ones, which are given the best speed and memory of all.
            self._unlike, self._usual = [], _best_speed(unlike)
            self._with_own_memory = [other.worker for other in unlike if other.own_memory]
        else:
            self._unlike, self._usual, self._with_own_memory = unlike, 1000, []
        self._window: dict[tuple[int, int, int], int] = {}

    def best_bound(self) -> Bound:
        """Return the bound that holds for every distribution of live workers over columns.

        This is the least of the bounds of all distributions, or that by total work if it is larger
        or if no distribution leaves every column a worker.
        """
        longest = self._distribute() if self._unlike else self._distribute_alike()
        return Bound(
            max(self._total_work_ticks(), longest),
            Scope.ROLES,
            "the work and the waits of each column, whichever workers play its roles",
        )

    def best_distributions(self, kept: int) -> list[Distribution]:
        """Return the best `kept` distributions of vacant roles and unlike workers over columns.

        The bound of the longest column ranks them, then the sum of all columns' bounds. There may
        be fewer, and are none if live workers are alike, or if there are more combinations than
        `MAX_WINDOWS`.
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
        """Return the longest column's least bound, in ticks, if workers are alike; 0: no plan."""
        # A column's bound grows with its vacant roles. So it is exact to give each vacant role in
        # turn to the column whose bound is then least.
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
        """Return the least, over all distributions, of the longest column's bound."""
        return next((longest for longest, _, _ in self._rank_distributions(1)), 0)

    def _rank_distributions(self, kept: int) -> list[tuple[int, int, Distribution]]:
        """Return the best `kept` distributions, best first, with the bounds that rank them.

        An entry is (largest bound of a column, sum of all columns' bounds, distribution); bounds
        are in ticks.
        """
        # Dynamic programming over columns: best[v, u] are the best few distributions in which v
        # roles of the columns so far are vacant, and unlike workers play u of the others (ReCycle,
        # SOSP 2024).
        grid, usual = self._whole.grid, len(self._live) - len(self._unlike)
        best: dict[tuple[int, int], list[tuple[int, int, Distribution]]] = {(0, 0): [(0, 0, ())]}
        for column in range(grid.columns):
            after: dict[tuple[int, int], list[tuple[int, int, Distribution]]] = {}
            for (vacant, unlike), ranked in best.items():
                # The columns so far must not take more usual workers than there are.
                usual_left = usual - (column * grid.pipelines - vacant - unlike)
                for down in range(min(self._most_vacant, self._vacant - vacant) + 1):
                    count = grid.pipelines - down
                    for some in range(
                        max(0, count - usual_left), min(count, len(self._unlike) - unlike) + 1
                    ):
                        ticks = self._column_ticks(column, down, some)
                        after.setdefault((vacant + down, unlike + some), []).extend(
                            (max(longest, ticks), total + ticks, (*before, (down, some)))
                            for longest, total, before in ranked
                        )
            best = {key: sorted(ranked)[:kept] for key, ranked in after.items()}
        return best.get((self._vacant, len(self._unlike)), [])

    @property
    def _vacant(self) -> int:
        """Number of roles that no worker plays."""
        return self._whole.grid.pipelines * self._whole.grid.columns - len(self._live)

    @property
    def _most_vacant(self) -> int:
        """Largest number of roles of a column that can be vacant."""
        return self._whole.grid.pipelines - int(self._whole.grid.chains == 1)

    def _column_ticks(self, column: int, down: int, unlike: int) -> int:
        """Return a column's bound for `down` vacant roles and `unlike` unlike workers, in ticks."""
        # alike, the same problem
        key = (column, down, unlike) if self._unlike or down else (0, 0, 0)
        # More vacant roles never shorten a plan, even where lemmas with other assumptions apply.
        if key not in self._window:
            fewer = self._column_ticks(column, down - 1, unlike) if down and not self._unlike else 0
            count = self._whole.grid.pipelines - down
            self._window[key] = max(fewer, lower_bound(self._with_workers(column, count, unlike)))
        return self._window[key]

    def _with_workers(self, column: int, count: int, unlike: int) -> Problem:
        """Return the problem with `count` workers in a column, `unlike` of them unlike."""
        # More and better workers only make a bound lower, so it holds for any real ones.
        problem, workers = self._whole, dict[Worker, LiveWorker]()
        for other in range(problem.grid.columns):
            if other != column:
                speed = min(self._usual, _best_speed(self._unlike))
                best = LiveWorker(
                    per_mille=speed,
                    memory=self._best_memory(other, self._unlike),
                    holds=problem.grid.held_layers_by_column[other],
                )
                workers |= {
                    Worker(pipeline, other): best for pipeline in range(problem.grid.pipelines)
                }
        usual = LiveWorker(
            per_mille=self._usual,
            memory=self._best_memory(column, ()),
            holds=problem.grid.held_layers_by_column[column],
        )
        properties = [usual] * (count - unlike) + [
            msgspec.structs.replace(usual, per_mille=speed, memory=memory)
            for speed, memory in zip(*self._best_unlike(column, unlike), strict=True)
        ]
        for pipeline, state in enumerate(properties):
            workers[Worker(pipeline, column)] = state
        return msgspec.structs.replace(problem, workers=dict(sorted(workers.items())))

    def _best_unlike(self, column: int, count: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return compute times and memories in a column that no `count` unlike workers can beat.

        Both have `count` values, the best first: times per mille of the usual, and memory units for
        weights and activations together.
        """
        speeds = sorted(other.per_mille for other in self._unlike)
        amounts = [self._memory_of(other.worker, column) for other in self._unlike]
        amounts.sort(reverse=True)
        # Unlike in both, the fastest need not have the most memory: give each the largest amount.
        if len(set(speeds)) > 1:
            amounts = amounts[:1] * len(amounts)
        return speeds[:count], amounts[:count]

    def _best_memory(self, column: int, unlike: Iterable[_Unlike]) -> int:
        """Return the most memory that a worker, usual or in `unlike`, has in a column."""
        unlike_workers = [other.worker for other in unlike]
        workers = [*self._with_own_memory, *unlike_workers, *self._usual_example]
        return max(self._memory_of(worker, column) for worker in workers)

    @property
    def _usual_example(self) -> tuple[Worker, ...]:
        """Worker outside the grid, alone in a tuple, as an example of usual memory."""
        return (Worker(self._whole.grid.pipelines, 0),)


def _best_speed(unlike: Iterable[_Unlike]) -> int:
    """Return the least `per_mille` of a usual worker (1000) and of `unlike`."""
    return min([1000, *(other.per_mille for other in unlike)])
