"""Divide the work of an iteration over the live workers, and derive the routes.

A *replica* is a row of workers that runs layers 0..L-1 of whole micro-batches: a pipeline as it is
or, *re-cut*, the rest of one or several pipelines, over which the layers are divided again. Its
tasks are (layer, micro-batch). They are divided in order of layers into one workload for each
worker. If a cut falls between two tasks of one layer, that layer *floats*: both neighbours hold it,
and some micro-batches are cut before it, others after it.

Every replica takes as many whole micro-batches as the longest load allows. The tasks of the
remaining micro-batches form one row, micro-batch after micro-batch, layers ascending. Each re-cut
replica takes one segment of it; the workers of replicas that keep their stages take the rest, stage
by stage (the wrap-around rule of McNaughton 1959). Since every worker takes consecutive tasks, in
one order of workers, no two routes pass two workers in opposite order.

With `anywhere`, that order does not hold: a re-cut replica first takes the tasks that the workers
of each stage have no time for, so that loads are more even by up to a layer; with little memory,
such a layout may have no valid order in time.

With `separate`, each of the remaining micro-batches has a few replicas of its own that keep their
stages, and re-cut replicas take none. So the replicas form small sets that share no micro-batch,
most of them equal, whose orders are soon found.
"""

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

from slipstream.planner.model.bounds_layouts import ticks_of_work, work_bound
from slipstream.planner.model.problem import (
    Layout,
    MicroBatch,
    Problem,
    Route,
    RouteSlice,
    choose_evenly,
)
from slipstream.planner.params import DEFAULTS, LayoutParams
from slipstream.schedules.layers import LayerRange, merge_ranges
from slipstream.schedules.schedule import Worker

T = TypeVar("T")
Workload = dict[int, int]
"""Number of micro-batches that a worker runs of each layer, by layer, ascending."""


class Replica(NamedTuple):
    """Live workers, in order of their layers, that together run whole micro-batches."""

    workers: tuple[Worker, ...]
    is_recut: bool
    """True if the layers are divided anew over the workers; else they keep their stages."""


def make_idle_function(
    problem: Problem, worker: Worker, hops: int
) -> Callable[[int, int, int], int]:
    """Return a function that gives a worker's least idle time, in ticks.

    The idle time is that between the worker's first F and its first I. The function's arguments are
    the first layer that the worker holds, the end of these layers, and the number of micro-batches
    that it runs. Each micro-batch has `hops` transfers to the end of the replica.
    """
    sums = problem.costs.prefix_sums
    forward = sums.forward
    backward = sums.backward_input
    weights = sums.weights
    peaks = sums.peak_memory
    slow, memory = problem.slowness(worker), problem.workers[worker].memory
    # The I of the first micro-batch starts after F of the held layers, F and I of all layers after
    # them, and the transfers of both ways.
    trip = forward[-1] + backward[-1] + 2 * hops * problem.times.transfer

    def idle_ticks(first: int, end: int, count: int) -> int:
        forward_ticks, peak = forward[end] - forward[first], peaks[end] - peaks[first]
        # Until then the worker runs only F, of the micro-batches that its memory has room for.
        ran = count * forward_ticks
        if peak and count * peak > (free := memory - weights[end] + weights[first]):
            ran = max(0, free) * forward_ticks // peak
        return max(0, trip - forward[end] - backward[end] + (forward_ticks - ran) * slow // 1000)

    return idle_ticks


def pack_workloads(
    problem: Problem,
    workers: Sequence[Worker],
    counts: Sequence[int],
    limit: int,
    *,
    floating: bool = True,
    staggered: bool = False,
) -> list[Workload] | None:
    """Return the work of each worker of a replica; None if it does not fit.

    A worker's work is the number of micro-batches that it runs of each layer. In order of layers,
    each worker takes as much as the limit and its memory allow (McNaughton 1959).

    Parameters
    ----------
    problem
        Problem whose work is packed.
    workers
        Workers of the replica, in order of layers.
    counts
        Number of micro-batches of each layer that they run together.
    limit
        Ticks that no worker exceeds: its work, all-reduces and optimizer step, and its least idle
        time (`make_idle_function`).
    floating
        False if workers take whole layers only.
    staggered
        True if the limit also counts F and a transfer for each of a worker's stages but its last:
        the delay between the reductions of its first and its last stage.
    """
    workloads: list[Workload] = []
    sums, work = problem.costs.prefix_sums, problem.costs.work
    stages: list[LayerRange] = []
    if staggered:
        stages = [layers for layers, _ in problem.path_by_chain[0]]
    # As in McNaughton's wrap-around rule (1959): fill one worker after the other.
    layer, left = 0, counts[0]
    for position, worker in enumerate(workers):
        idle = make_idle_function(problem, worker, len(workers) - 1 - position)
        slow, memory = problem.slowness(worker), problem.workers[worker].memory
        load, first = 0, layer
        workload: Workload = {}
        while layer < len(counts):
            if not left:
                layer += 1
                left = counts[layer] if layer < len(counts) else 0
                # A worker without work yet begins at this layer.
                first = first if workload else layer
                continue
            # Room for the weights of layers [first, end), and for one micro-batch in all of them.
            end = layer + 1
            if (
                sums.weights[end]
                - sums.weights[first]
                + sums.peak_memory[end]
                - sums.peak_memory[first]
                > memory
            ):
                break
            # Time that the worker cannot compute: idle, in all-reduces and in optimizer steps.
            beside = idle(first, end, counts[layer]) + sums.closing[end] - sums.closing[first]
            beside += sum(
                sums.forward[high] - sums.forward[low] + problem.times.transfer
                for low, high in stages
                if first < high <= layer
            )
            # As many micro-batches of this layer as fit into the rest of the limit.
            ticks, free = work[layer] * slow, (limit - beside) * 1000 - load
            taken = left if left * ticks <= free or not ticks else max(0, free // ticks)
            if not taken or not (floating or taken == left):
                break
            workload[layer] = taken
            load += taken * ticks
            left -= taken
            if left:
                break
        workloads.append(workload)
    return workloads if layer == len(counts) else None


def find_least_limit(
    attempt: Callable[[int], T | None], low: int, high: int, best: T, within: float = 0.0
) -> tuple[int, T]:
    """Return the least limit at which `attempt` succeeds, and its result there.

    The function `attempt` returns None if it fails. The limit is above `low` and at most `high`,
    for which the result is `best`. It may exceed the least one by the fraction `within`.
    """
    while high - low > max(1, within * high):
        middle = (low + high) // 2
        result = attempt(middle)
        if result is None:
            low = middle
        else:
            high, best = middle, result
    return high, best


# --- How many micro-batches each replica runs, and how the rest is spread over several ------------


Task = tuple[int, int]
"""One layer of a micro-batch that replicas share: (number among the shared ones, layer)."""


class Slice(NamedTuple):
    """Layers [first, end) of a micro-batch that several replicas share, and who runs them.

    The field `item` is the number of the micro-batch among the shared ones, and `replica` the
    number of the replica. The worker is None where layers are divided again: it is chosen later.
    """

    item: int
    first: int
    end: int
    replica: int
    worker: Worker | None


class Division(NamedTuple):
    """Division of an iteration's work over replicas.

    A replica runs micro-batches as a whole, or slices of micro-batches that it shares with others.
    """

    whole: tuple[int, ...]
    """Number of micro-batches that each replica runs as a whole."""
    workloads: tuple[tuple[Workload, ...], ...]
    """Work of each worker of each replica; () for replicas that keep their stages."""
    slices: tuple[Slice, ...]
    items: int
    """Number of micro-batches that several replicas share."""


class Divider:
    """Divides a problem's work over replicas so that the busiest worker has least load."""

    def __init__(
        self,
        problem: Problem,
        replicas: Sequence[Replica],
        *,
        floating: bool = True,
        spread: bool = True,
        anywhere: bool = False,
        separate: bool = False,
        staggered: bool = False,
        params: LayoutParams = DEFAULTS.layouts,
    ) -> None:
        """Store how work may be divided.

        Parameters
        ----------
        problem
            Problem whose work is divided.
        replicas
            Replicas that run it.
        floating
            Let two neighbours hold one layer and take turns with it.
        spread
            Let a micro-batch visit several replicas.
        anywhere
            Let a micro-batch return to a replica that it has left.
        separate
            Form sets of replicas as small as possible; a shared micro-batch visits only those of
            one set.
        staggered
            Count in a load the delay between a worker's first and last reduction, too.
        params
            Limits of the division.
        """
        self._problem, self._replicas, self._params = problem, tuple(replicas), params
        self._spread, self._anywhere, self._separate = spread, anywhere, separate
        self._cut = partial(pack_workloads, floating=floating, staggered=staggered)
        self._kinds = [self._capacity_key(replica) for replica in replicas]
        self._known: dict[tuple[object, int], int] = {}

    def find_division(self, within: float = 0.0) -> tuple[int, Division] | None:
        """Return the least load of the busiest worker, in ticks, and a division with it.

        None if nothing fits. The load may exceed the least one by the fraction `within`. Raises
        LookupError if workers have no room for the layers of shared micro-batches.
        """
        # Double the step above the bound until a limit is met, then bisect.
        low = work_bound(self._problem) - 1
        high, best = low + low // 16 + 1, None
        while (best := self._divide_within(high)) is None:
            if high > self._problem.ample_ticks * 4:
                return None
            low, high = high, high + 2 * (high - low)
        limit, division = find_least_limit(self._divide_within, low, high, best, within)
        return limit, self._with_workloads(division, limit)

    def _divide_within(self, limit: int) -> Division | None:
        """Return a division in which no load exceeds `limit` ticks; None if there is none."""
        # Each replica runs as many whole micro-batches as it has time for.
        shared = self._problem.grid.total_microbatches
        whole = []
        for index in range(len(self._replicas)):
            count = min(shared, self._max_microbatches(index, limit))
            whole.append(count)
            shared -= count
        if shared and not self._spread:
            return None
        # The others share the rest: first re-cut replicas, then those that keep their stages.
        segments: list[Slice] = []
        if self._separate:
            slices = self._spread_over_sets(whole, shared, limit)
        else:
            segments = self._take_segments(whole, shared, limit)
            slices = self._spread_over_workers(whole, shared, segments, limit)
        if slices is None:
            return None
        return Division(tuple(whole), (), (*segments, *slices), shared)

    def _with_workloads(self, division: Division, limit: int) -> Division:
        """Return a copy of the division with the `workloads` of all re-cut replicas filled in."""
        segments = [slice_ for slice_ in division.slices if slice_.worker is None]
        counts = self._task_counts(division.whole, segments)
        workloads: list[tuple[Workload, ...]] = []
        for replica, tasks_per_layer in zip(self._replicas, counts, strict=True):
            if replica.is_recut:
                workloads.append(tuple(self._balance_workloads(replica, tasks_per_layer, limit)))
            else:
                workloads.append(())
        return division._replace(workloads=tuple(workloads))

    def _capacity_key(self, replica: Replica) -> tuple[object, ...]:
        """Return a key, equal for replicas that run equally many micro-batches in any time."""
        problem = self._problem
        return (
            replica.is_recut,
            *(
                (worker.column, problem.slowness(worker), problem.workers[worker].memory)
                for worker in replica.workers
            ),
        )

    def _max_microbatches(self, index: int, limit: int) -> int:
        """Return how many whole micro-batches replica number `index` can run in `limit` ticks."""
        key = self._kinds[index], limit
        if key not in self._known:
            replica, low, step = self._replicas[index], 0, 0
            high = self._microbatch_limit(replica, limit)
            while low < high:
                # most often it is little less than all time takes
                middle = max((low + high + 1) // 2, high - step)
                if self._can_run(replica, [middle] * self._problem.grid.layer_count, limit):
                    low = middle
                else:
                    high, step = middle - 1, 2 * step + 1
            self._known[key] = low
        return self._known[key]

    def _microbatch_limit(self, replica: Replica, limit: int) -> int:
        """Return an upper bound on the micro-batches that a replica runs in `limit` ticks."""
        rate = sum(1000 / self._problem.slowness(worker) for worker in replica.workers)
        work = sum(self._problem.costs.work)
        return min(
            self._problem.grid.total_microbatches, int(limit * rate / work) + 1 if work else 1 << 30
        )

    def _can_run(self, replica: Replica, counts: Sequence[int], limit: int) -> bool:
        if replica.is_recut:
            return self._cut(self._problem, replica.workers, counts, limit) is not None
        return all(
            self._unchanged_load(replica, position, counts[0]) <= limit
            for position in range(len(replica.workers))
        )

    def _unchanged_load(self, replica: Replica, position: int, count: int) -> int:
        """Return the ticks that a worker needs in place, with A, O and idle time."""
        problem, worker = self._problem, replica.workers[position]
        # Compute at its speed, closing ops, and idle time, 0 if its layers are not consecutive.
        compute = count * sum(
            problem.costs.work[layer] for layer in problem.list_held_layers(worker)
        )
        idle, ranges = 0, problem.workers[worker].holds
        if len(ranges) <= 1:
            hops = len(replica.workers) - 1 - position
            idle = make_idle_function(problem, worker, hops)(*ranges[0], count)
        # Rounded up to whole ticks.
        ticks = -(-compute * problem.slowness(worker) // 1000)
        return ticks + problem.held_closing_ticks(worker) + idle

    def _take_segments(self, whole: Sequence[int], items: int, limit: int) -> list[Slice]:
        """Return what re-cut replicas can run of `items` shared micro-batches in `limit` ticks."""
        count = self._problem.grid.layer_count
        tasks = ((item, layer) for item in range(items) for layer in range(count))
        if self._anywhere:
            free = self._free_ticks(whole, limit)
            # The tasks that a stage's own workers have no time for come first.
            short = {
                task
                for stage in self._problem.path_by_chain[0]
                for task in self._overflow_tasks(items, *stage, free)
            }
            row = sorted(tasks, key=lambda task: task not in short)
        else:
            row = list(islice(tasks, (count - 1) * len(self._replicas)))
        # Each re-cut replica takes the longest segment of the row that it can run.
        slices: list[Slice] = []
        for index, replica in enumerate(self._replicas):
            if not replica.is_recut:
                continue
            taken = bisect_left(
                range(1, min(count - 1, len(row)) + 1),
                True,
                key=lambda length: (
                    not self._can_run(
                        replica, _tasks_per_layer(count, whole[index], row[:length]), limit
                    )
                ),
            )
            slices += _join_tasks(sorted(row[:taken]), index, None)
            row = row[taken:]
        return slices

    def _free_ticks(self, whole: Sequence[int], limit: int) -> dict[Worker, int]:
        """Return the ticks of `limit` that whole micro-batches leave workers not re-cut."""
        return {
            worker: limit - self._unchanged_load(replica, position, whole[index])
            for index, replica in enumerate(self._replicas)
            if not replica.is_recut
            for position, worker in enumerate(replica.workers)
        }

    def _overflow_tasks(
        self, items: int, layers: LayerRange, column: int, free: dict[Worker, int]
    ) -> list[Task]:
        """Return the first tasks of a stage for which its workers have no ticks left."""
        tasks = [(item, layer) for item in range(items) for layer in range(*layers)]
        # Counted by the longest layer, so that the others certainly fit.
        longest = max(self._problem.costs.work[layer] for layer in range(*layers))
        room = sum(
            max(0, ticks) * 1000 // max(1, longest * self._problem.slowness(worker))
            for worker, ticks in free.items()
            if worker.column == column
        )
        return tasks[: max(0, len(tasks) - room)]

    def _spread_over_workers(
        self, whole: Sequence[int], items: int, segments: Sequence[Slice], limit: int
    ) -> list[Slice] | None:
        """Return slices of shared tasks not in `segments`, in place; None without time."""
        problem = self._problem
        taken = {
            (segment.item, layer)
            for segment in segments
            for layer in range(segment.first, segment.end)
        }
        slices: list[Slice] = []
        free = self._free_ticks(whole, limit) if items else {}
        for (first, end), column in problem.path_by_chain[0]:
            tasks = [
                (item, layer)
                for item in range(items)
                for layer in range(first, end)
                if (item, layer) not in taken
            ]
            placed = 0
            for index, replica in enumerate(self._replicas):
                for worker in replica.workers:
                    if replica.is_recut or worker.column != column or placed == len(tasks):
                        continue
                    # A worker takes the next tasks of the stage until its time is up.
                    run = placed
                    while run < len(tasks):
                        layer = tasks[run][1]
                        ticks = problem.slice_ticks((layer, layer + 1), worker)
                        if ticks > free[worker]:
                            break
                        free[worker] -= ticks
                        run += 1
                    slices += _join_tasks(tasks[placed:run], index, worker)
                    placed = run
            # The workers of this stage have too little time.
            if placed < len(tasks):
                return None
        return slices

    def _spread_over_sets(self, whole: Sequence[int], items: int, limit: int) -> list[Slice] | None:
        """Return slices that spread `items` micro-batches over sets; None if they do not fit."""
        free, slices = self._free_ticks(whole, limit) if items else {}, []
        for batches, replicas in self._form_sets(items):
            for layers, column in self._problem.path_by_chain[0]:
                workers = [
                    (index, worker)
                    for index in replicas
                    for worker in self._replicas[index].workers
                    if worker.column == column
                ]
                # The workers of a stage in one set share its micro-batches evenly.
                for (index, worker), tasks in zip(
                    workers, self._even_shares(batches, layers, len(workers)), strict=True
                ):
                    parts = _join_tasks(tasks, index, worker)
                    free[worker] -= sum(
                        self._problem.slice_ticks((part.first, part.end), worker) for part in parts
                    )
                    if free[worker] < 0:
                        return None
                    slices += parts
        return slices if slices or not items else None

    def _form_sets(self, items: int) -> Iterator[tuple[range, list[int]]]:
        """Divide `items` shared micro-batches over sets of replicas; yield the numbers of both."""
        # As many sets as is possible with hardly longer loads, each of equally many micro-batches.
        kept = [index for index, replica in enumerate(self._replicas) if not replica.is_recut]
        counts = [count for count in range(1, min(items, len(kept)) + 1) if items % count == 0]
        if not counts:
            return
        largest = {
            count: self._max_stage_work(items // count, len(kept) // count) for count in counts
        }
        enough = min(largest.values()) + Fraction(self._params.fewer_sets) * max(
            self._problem.grid.microbatches
        )
        count = max(count for count in counts if largest[count] <= enough)
        # Each set has as few replicas as that load allows.
        each = items // count
        size = next(
            size
            for size in itertools.count(1)
            if self._max_stage_work(each, size) <= largest[count]
        )
        for number in range(count):
            yield (
                range(number * each, (number + 1) * each),
                kept[number * size : (number + 1) * size],
            )

    def _max_stage_work(self, items: int, replicas: int) -> Fraction:
        """Return the most work of a worker if so many `replicas` share `items` micro-batches.

        The unit is a whole stage for one micro-batch.
        """
        # They share by whole layers. Slices below `least_share` of a stage wait longer than they
        # take, so that more replicas would not help.
        counts = [end - first for (first, end), _ in self._problem.path_by_chain[0]]
        least = Fraction(self._params.least_share)
        return max(least, *(Fraction(-(-items * count // replicas), count) for count in counts))

    def _even_shares(self, items: range, layers: LayerRange, count: int) -> list[list[Task]]:
        """Divide a stage's tasks of micro-batches `items` into `count` shares of even work."""
        work = self._problem.costs.work
        total, before = sum(work[slice(*layers)]) * len(items), 0
        shares: list[list[Task]] = [[] for _ in range(count)]
        for item in items:
            for layer in range(*layers):
                # A task goes to the share in which the middle of its work lies.
                shares[
                    min(count - 1, (2 * before + work[layer]) * count // max(1, 2 * total))
                ].append((item, layer))
                before += work[layer]
        return shares

    def _task_counts(self, whole: Sequence[int], segments: Sequence[Slice]) -> list[list[int]]:
        """Return how many micro-batches run each layer in each replica: [replica][layer]."""
        counts = [[count] * self._problem.grid.layer_count for count in whole]
        for slice_ in segments:
            for layer in range(slice_.first, slice_.end):
                counts[slice_.replica][layer] += 1
        return counts

    def _balance_workloads(
        self, replica: Replica, counts: Sequence[int], limit: int
    ) -> list[Workload]:
        """Return a replica's most even workloads for `counts` micro-batches of each layer."""
        # Whole layers if they fit, since floating ones are held twice.
        whole_layers = partial(self._cut, floating=False)
        cut_within = (
            self._cut
            if whole_layers(self._problem, replica.workers, counts, limit) is None
            else whole_layers
        )
        problem, slowness = self._problem, map(self._problem.slowness, replica.workers)
        work = sum(ticks * count for ticks, count in zip(problem.costs.work, counts, strict=True))
        attempt = partial(cut_within, problem, replica.workers, counts)
        workloads = attempt(limit)
        # shared tasks may leave less room than the limit that whole micro-batches allow
        if workloads is None:
            limit, workloads = 4 * problem.ample_ticks, attempt(4 * problem.ample_ticks)
        if workloads is None:
            raise LookupError(
                "the live workers have no room for the layers of shared micro-batches"
            )
        return find_least_limit(
            attempt, max(0, math.ceil(ticks_of_work(work, slowness)) - 1), limit, workloads
        )[1]


def _tasks_per_layer(count: int, whole: int, more: Sequence[Task]) -> list[int]:
    """Return each layer's number of micro-batches: `whole`, and one for each task in `more`."""
    counts = [whole] * count
    for _, layer in more:
        counts[layer] += 1
    return counts


def _join_tasks(tasks: Sequence[Task], replica: int, worker: Worker | None) -> list[Slice]:
    """Join sorted tasks of a replica into slices of consecutive layers, run by `worker`."""
    slices: list[Slice] = []
    for item, layer in tasks:
        if slices and slices[-1].item == item and slices[-1].end == layer:
            slices[-1] = slices[-1]._replace(end=layer + 1)
        else:
            slices.append(Slice(item, layer, layer + 1, replica, worker))
    return slices


# --- From a division to routes, one for each micro-batch ------------------------------------------


GOLDEN_FRACTION = 0.6180339887498949
"""Golden ratio minus 1; the fractional parts of its first n multiples are evenly spread."""


def build_layout(
    problem: Problem, replicas: Sequence[Replica], division: Division, kind: str
) -> Layout:
    """Return the layout of a division; `kind` says in words how the layout was made."""
    whole, items = _name_microbatches(problem, replicas, division)
    # The worker of each layer, for each micro-batch.
    where: dict[MicroBatch, dict[int, Worker]] = {
        batch: {} for names in (*whole, items) for batch in names
    }
    for index, replica in enumerate(replicas):
        parts = [
            slice_
            for slice_ in division.slices
            if slice_.replica == index and slice_.worker is None
        ]
        if replica.is_recut:
            _choose_cuts(
                division.workloads[index],
                replica,
                whole[index],
                [(items[slice_.item], slice_.first, slice_.end) for slice_ in parts],
                where,
            )
        else:
            for worker in replica.workers:
                for layer in problem.list_held_layers(worker):
                    for batch in whole[index]:
                        where[batch][layer] = worker
    # Shared micro-batches at replicas that keep their stages.
    for slice_ in division.slices:
        if slice_.worker is not None:
            where[items[slice_.item]].update(
                dict.fromkeys(range(slice_.first, slice_.end), slice_.worker)
            )
    routes = {batch: build_route(layers) for batch, layers in sorted(where.items())}
    return Layout(kind=kind, holds=_layers_held(problem, replicas, routes), routes=routes)


def _name_microbatches(
    problem: Problem, replicas: Sequence[Replica], division: Division
) -> tuple[list[list[MicroBatch]], list[MicroBatch]]:
    """Return the micro-batches that each replica runs as a whole, and the shared ones."""
    whole: list[list[MicroBatch]] = []
    rest: list[MicroBatch] = []
    of_pipeline = {
        replica.workers[0].pipeline: index for index, replica in reversed(list(enumerate(replicas)))
    }
    # A replica runs its own first; those that leave it are evenly spread over the iteration.
    staying: dict[int, list[MicroBatch]] = defaultdict(list)
    for pipeline, count in enumerate(problem.grid.microbatches):
        batches = [MicroBatch(pipeline, number) for number in range(count)]
        stay = min(count, division.whole[of_pipeline[pipeline]]) if pipeline in of_pipeline else 0
        leaving = choose_evenly(count - stay, count)
        rest += [batch for batch in batches if batch.microbatch in leaving]
        if stay:
            staying[of_pipeline[pipeline]] = [
                batch for batch in batches if batch.microbatch not in leaving
            ]
    # Replicas with time left take them in turn; what nobody takes is shared.
    rest.sort(key=_turn_key)
    taken = 0
    for index, count in enumerate(division.whole):
        more = count - len(staying[index])
        whole.append(sorted(staying[index] + rest[taken : taken + more], key=_turn_key))
        taken += more
    return whole, rest[taken:]


def _turn_key(batch: MicroBatch) -> tuple[int, int]:
    return batch.microbatch, batch.pipeline


def _choose_cuts(
    workloads: Sequence[dict[int, int]],
    replica: Replica,
    batches: Sequence[MicroBatch],
    parts: Iterable[tuple[MicroBatch, int, int]],
    where: dict[MicroBatch, dict[int, Worker]],
) -> None:
    """Enter into `where` the worker of each layer of a replica's micro-batches."""
    # With x_k the number of layers before the k-th cut, a real number, micro-batch i is cut at
    # floor(x_k + phase(i)). All cuts of a micro-batch share its phase, so that every worker runs
    # the same number of layers of each micro-batch, give or take one; and phases of successive
    # micro-batches are spread evenly.
    phase = {batch: GOLDEN_FRACTION * number % 1 for number, batch in enumerate(batches)}
    spans = [(batch, 0, len(workloads) and 1 << 30) for batch in batches] + list(parts)
    for number, (batch, _, _) in enumerate(parts):
        phase[batch] = GOLDEN_FRACTION * (len(batches) + number) % 1
    # In each layer, micro-batches of large phases are cut later, and run on the earlier worker.
    order = sorted(spans, key=lambda span: -phase[span[0]])
    # Workers that run each layer, in order, and how many micro-batches each.
    sharers: dict[int, list[tuple[Worker, int]]] = defaultdict(list)
    for worker, workload in zip(replica.workers, workloads, strict=True):
        for layer, count in workload.items():
            sharers[layer].append((worker, count))
    for layer, shares in sharers.items():
        present = [batch for batch, first, end in order if first <= layer < end]
        assert len(present) == sum(count for _, count in shares), (
            "a layer's tasks are its micro-batches"
        )
        at = 0
        for worker, count in shares:
            for batch in present[at : at + count]:
                where[batch][layer] = worker
            at += count


def build_route(layers: dict[int, Worker]) -> Route:
    """Return a route from each layer's worker; consecutive layers of one become a slice."""
    slices: list[RouteSlice] = []
    for layer in sorted(layers):
        worker = layers[layer]
        if slices and slices[-1].worker == worker and slices[-1].layers[1] == layer:
            slices[-1] = RouteSlice((slices[-1].layers[0], layer + 1), worker)
        else:
            slices.append(RouteSlice((layer, layer + 1), worker))
    return tuple(slices)


def _layers_held(
    problem: Problem, replicas: Sequence[Replica], routes: dict[MicroBatch, Route]
) -> dict[Worker, tuple[LayerRange, ...]]:
    """Return each worker's held layers: where layers are divided again, those it runs."""
    anew = {worker for replica in replicas if replica.is_recut for worker in replica.workers}
    run: dict[Worker, set[int]] = defaultdict(set)
    for route in routes.values():
        for slice_ in route:
            run[slice_.worker].update(range(*slice_.layers))
    holds = {worker: problem.workers[worker].holds for worker in problem.live_workers}
    for worker in anew & holds.keys():
        holds[worker] = merge_ranges((layer, layer + 1) for layer in run[worker])
    return holds
