"""Bound the period for layouts, by layers' work: lemmas 7 to 11 of docs/bounds.md."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import accumulate

from slipstream.planner.model.assumptions import fills_memory_with_forwards
from slipstream.planner.model.problem import Bound, Problem, iterate_held_ranges
from slipstream.schedules.schedule import Worker


def work_bound(problem: Problem) -> int:
    """Return a bound on the period, in ticks, by total work.

    The bound holds whichever layers workers hold (lemma 7 of docs/bounds.md).
    """
    work = sum(problem.costs.work) * problem.grid.total_microbatches
    return min(problem.costs.closing) + math.ceil(
        ticks_of_work(work, map(problem.slowness, problem.live_workers))
    )


def ticks_of_work(work: int, slowness: Iterable[int]) -> Fraction:
    """Return the ticks in which workers together do `work`.

    A worker of the usual speed takes `work` ticks for it; `slowness` has the time that each worker
    takes, per mille of the usual time, for at least one worker.
    """
    kinds = Counter(slowness)
    return work / sum(
        (Fraction(1000 * number, slow) for slow, number in kinds.items()), start=Fraction(0)
    )


def period_bound(problem: Problem) -> Bound:
    """Return the best bound by work that holds for all layouts of a problem.

    The bound is the larger of `work_bound` and, if layers may move, `any_layers_bound`, else
    `fixed_bound`, which raises LookupError if some layer has no live holder.
    """
    moving = problem.question.layers == "move"
    return Bound(
        max(work_bound(problem), any_layers_bound(problem) if moving else fixed_bound(problem)),
        problem.question.bound_scope,
        "the work of all layers that workers share",
    )


def any_layers_bound(problem: Problem) -> int:
    """Return a bound on the period, in ticks, whichever layers workers hold. Lemma 8."""
    # A worker does whole layers of whole micro-batches, so its work is a multiple of `unit`.
    unit, total = math.gcd(*problem.costs.work), problem.grid.total_microbatches
    if not unit:
        return 0
    # A worker with n layers has at most the work of the n largest, and closes at least the n least.
    works = [total * work for work in accumulate(sorted(problem.costs.work, reverse=True))]
    closings = list(accumulate(sorted(problem.costs.closing)))
    kinds = Counter(map(problem.slowness, problem.live_workers))

    def is_enough(limit: int) -> bool:
        done = 0
        for slow, count in kinds.items():
            done += count * max(
                min(work, max(0, limit - closing) * 1000 // (slow * unit) * unit)
                for work, closing in zip(works, closings, strict=True)
            )
        return done >= works[-1]

    return bisect_left(range(4 * problem.ample_ticks), True, key=is_enough)


def fixed_bound(problem: Problem) -> int:
    """Return a bound on the period, in ticks, if no layers move.

    Lemma 9 of docs/bounds.md; if no micro-batch may be cut within a stage, `whole_bound` counts,
    too. Raises LookupError if some layer has no live holder.
    """
    parts = list(iterate_held_ranges(problem))
    examples = {problem.workers[worker]: worker for worker in problem.live_workers}
    # Equal workers idle for the same time, which is computed once.
    idle_of_kind = {
        kind: problem.held_closing_ticks(worker) + min_fill_ticks(problem, worker)
        for kind, worker in examples.items()
    }
    idle = {worker: idle_of_kind[problem.workers[worker]] for worker in problem.live_workers}
    # Every run of consecutive ranges: its holders do all of its work.
    best = 0
    for first in range(len(parts)):
        holders: set[Worker] = set()
        work = 0
        for part in parts[first:]:
            holders.update(part.holders)
            work += (
                sum(problem.costs.work[layer] for layer in range(*part.layers))
                * problem.grid.total_microbatches
            )
            best = max(best, _min_shared_period(problem, holders, work, idle))
    return best if problem.question.sliced else max(best, whole_bound(problem))


def whole_bound(problem: Problem) -> int:
    """Return a bound on the period if holders of the same layers cut no micro-batch.

    A micro-batch is then cut only between layers that different workers hold. The bound is in
    ticks; lemma 11 of docs/bounds.md. Raises LookupError if some layer has no live holder.
    """
    best = 0
    for part in iterate_held_ranges(problem):
        work = sum(problem.costs.work[layer] for layer in range(*part.layers))
        # Holders that close together and are as fast run as many whole micro-batches.
        kinds = Counter(
            (problem.held_closing_ticks(worker), problem.slowness(worker))
            for worker in part.holders
        )

        def is_enough(
            limit: int, work: int = work, kinds: Counter[tuple[int, int]] = kinds
        ) -> bool:
            return (
                not work
                or sum(
                    count * (max(0, limit - closing) * 1000 // (work * slow))
                    for (closing, slow), count in kinds.items()
                )
                >= problem.grid.total_microbatches
            )

        best = max(best, bisect_left(range(4 * problem.ample_ticks), True, key=is_enough))
    return best


def min_fill_ticks(problem: Problem, worker: Worker) -> int:
    """Return a worker's least idle ticks before its first I.

    0 if the worker holds no layer or the model's last one, or if the assumptions of lemma 10 of
    docs/bounds.md are not met.
    """
    layers = problem.list_held_layers(worker)
    if not layers or layers[-1] + 1 == problem.grid.layer_count:
        return 0
    end, slow, sums = layers[-1] + 1, problem.slowness(worker), problem.costs.prefix_sums
    # The way of a micro-batch to the last layer and back, on the fastest workers.
    behind = (
        sums.forward[-1] - sums.forward[end] + sums.backward_input[-1] - sums.backward_input[end]
    )
    fastest = min(1000, problem.min_slowness)
    trip = (
        min(problem.costs.forward[layer] for layer in layers) * slow // 1000
        + behind * fastest // 1000
    )
    trip += 2 * problem.times.transfer
    if not fills_memory_with_forwards(problem, worker):
        return 0
    # Meanwhile the worker runs F only as long as memory lasts.
    room = problem.workers[worker].memory - sum(problem.costs.weights[layer] for layer in layers)
    rate = max(
        Fraction(problem.costs.forward[layer] * slow, 1000 * problem.costs.activation[layer])
        for layer in layers
    )
    # each F is rounded up to a tick
    rounding = len(layers) * problem.grid.total_microbatches if slow != 1000 else 0
    return max(0, trip - int(room * rate) - rounding - 1)


def _min_shared_period(
    problem: Problem, workers: Iterable[Worker], work: int, unavailable: Mapping[Worker, int]
) -> int:
    """Return the least ticks in which workers do `work`, outside their `unavailable` ticks."""
    kinds = Counter((problem.slowness(worker), unavailable[worker]) for worker in workers)

    def is_enough(limit: int) -> bool:
        return (
            sum(
                Fraction(max(0, limit - lost) * 1000 * count, slow)
                for (slow, lost), count in kinds.items()
            )
            >= work
        )

    return bisect_left(range(problem.ample_ticks * 4), True, key=is_enough)
