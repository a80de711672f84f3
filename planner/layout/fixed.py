"""Make layouts in which no worker holds more than before: live holders share the work.

A *part* is a range of layers that the same workers hold; at first, a stage. Every micro-batch runs
on its own worker while that is alive and has time. The rest goes to other holders: whole
micro-batches while a holder has time for one, then slices, as in `planner.layout.division`.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from slipstream.planner.layout.division import build_route, find_least_limit
from slipstream.planner.model.problem import (
    HeldRange,
    Layout,
    MicroBatch,
    Problem,
    choose_evenly,
    iterate_held_ranges,
)
from slipstream.schedules.schedule import Worker


def fixed_layout(problem: Problem, *, sliced: bool = True, within: float = 0.0) -> Layout:
    """Return the layout in place whose busiest worker has the least load, with few slices.

    With `sliced`, a micro-batch may be cut between any two layers; otherwise, one worker runs all
    consecutive layers that the same workers hold. The load may exceed the least one by the fraction
    `within`; then fewer micro-batches are cut. Raises LookupError if no worker holds some layer.
    """
    sharing = _Sharing(problem, sliced=sliced)
    ample = problem.ample_ticks * 2
    with_ease = sharing.share_within(ample)
    assert with_ease is not None, "one holder of each part has time for everything"
    # Bisect for the least load at which all work finds a holder with time for it.
    least, best = find_least_limit(sharing.share_within, 0, ample, with_ease)
    if within:
        best = sharing.share_within(round(least * (1 + within))) or best
    routes = {batch: build_route(layers) for batch, layers in sorted(best.items())}
    return Layout(
        kind="layers fixed, " + ("slices" if sliced else "whole micro-batches"),
        holds={worker: state.holds for worker, state in problem.workers.items()},
        routes=routes,
    )


class _Sharing:
    """Shares all micro-batches among the holders of each range of layers."""

    def __init__(self, problem: Problem, *, sliced: bool) -> None:
        self._problem, self._ticks, self._sliced = problem, problem.slice_ticks, sliced
        self._parts = sorted(
            iterate_held_ranges(problem), key=lambda part: (len(part.holders), part.layers)
        )
        self._closing = {
            worker: problem.held_closing_ticks(worker) for worker in problem.live_workers
        }
        self._own = [self._by_own_worker(part) for part in self._parts]

    def share_within(self, limit: int) -> dict[MicroBatch, dict[int, Worker]] | None:
        """Return who runs each layer; None if someone would need over `limit` ticks."""
        free = {worker: limit - closing for worker, closing in self._closing.items()}
        if min(free.values()) < 0:
            return None
        where: dict[MicroBatch, dict[int, Worker]] = defaultdict(dict)
        away: list[tuple[HeldRange, list[MicroBatch]]] = []
        # own work first, of all parts
        for part, by_worker in zip(self._parts, self._own, strict=True):
            away.append((part, self._keep_own(part, by_worker, free, where)))
        if all(self._share_rest(part, batches, free, where) for part, batches in away):
            return where
        return None

    def _by_own_worker(self, part: HeldRange) -> dict[Worker | None, list[MicroBatch]]:
        """Group all micro-batches by their own pipeline's worker for `part`, None if none lives."""
        by_worker: dict[Worker | None, list[MicroBatch]] = defaultdict(list)
        for pipeline, count in enumerate(self._problem.grid.microbatches):
            for number in range(count):
                batch = MicroBatch(pipeline, number)
                by_worker[self._own_worker(part, batch)].append(batch)
        return by_worker

    def _keep_own(
        self,
        part: HeldRange,
        by_worker: Mapping[Worker | None, list[MicroBatch]],
        free: dict[Worker, int],
        where: dict[MicroBatch, dict[int, Worker]],
    ) -> list[MicroBatch]:
        """Let own workers run micro-batches while `free` ticks last; return all others."""
        away = list[MicroBatch]()
        for worker, batches in by_worker.items():
            if worker is None:
                away += batches
                continue
            whole = self._ticks(part.layers, worker)
            stay = min(len(batches), free[worker] // whole if whole else len(batches))
            free[worker] -= stay * whole
            # Those that leave are evenly spread, so that helpers get them steadily.
            leaving = choose_evenly(len(batches) - stay, len(batches))
            for index, batch in enumerate(batches):
                if index in leaving:
                    away.append(batch)
                else:
                    where[batch].update(dict.fromkeys(range(*part.layers), worker))
        return sorted(away, key=lambda batch: (batch.microbatch, batch.pipeline))

    def _own_worker(self, part: HeldRange, batch: MicroBatch) -> Worker | None:
        """Return the worker of the micro-batch's own pipeline for `part`; None: none is alive."""
        path = self._problem.path_by_chain[batch.microbatch % len(self._problem.path_by_chain)]
        column = next(column for (first, end), column in path if first <= part.layers[0] < end)
        worker = Worker(batch.pipeline, column)
        if worker in part.holders:
            return worker
        return next((other for other in part.holders if other.pipeline == batch.pipeline), None)

    def _share_rest(
        self,
        part: HeldRange,
        batches: Sequence[MicroBatch],
        free: dict[Worker, int],
        where: dict[MicroBatch, dict[int, Worker]],
    ) -> bool:
        """Enter the holders that run `batches` at `part` into `where`; False if time is short."""
        waiting = list(batches)
        while waiting:  # whole micro-batches in turn, to those with most time
            # Where a part costs nothing, all have time for it.
            worker = max(
                part.holders,
                key=lambda worker: (
                    free[worker] // (self._ticks(part.layers, worker) or 1),
                    worker,
                ),
            )
            if free[worker] < self._ticks(part.layers, worker):
                break
            free[worker] -= self._ticks(part.layers, worker)
            where[waiting.pop(0)].update(dict.fromkeys(range(*part.layers), worker))
        if not self._sliced:
            return not waiting
        # What is left is cut into layers, and holders take consecutive ones (McNaughton 1959).
        tasks = deque((batch, layer) for batch in waiting for layer in range(*part.layers))
        for worker in part.holders:
            while tasks:
                batch, layer = tasks[0]
                ticks = self._ticks((layer, layer + 1), worker)
                if ticks > free[worker]:
                    break
                free[worker] -= ticks
                where[batch][layer] = worker
                tasks.popleft()
        return not tasks
