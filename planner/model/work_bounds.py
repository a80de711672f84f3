"""Lower bounds on the period of the general problem, proven for every layout that the problem allows."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import accumulate

from slipstream.planner.bound import Bound
from slipstream.planner.model.problem import Problem, parts_of
from slipstream.schedules.schedule import Worker

Unavailable = Callable[[Worker], int]
"""Ticks of every period in which a worker runs no F, I or W, if it runs any."""


def work_bound(problem: Problem) -> int:
    """No schedule has a shorter period than this many ticks, whoever holds what.

    A worker that runs any op holds a layer, so that of a period T at least the all-reduce and the optimizer step of one
    layer are not F, I or W. In the rest, a worker that takes s times the usual time does at most (T - tail) / s of the
    usual work. The sum over all live workers is at least the work of an iteration.
    """
    work = sum(problem.costs.work) * problem.grid.total_microbatches
    return min(problem.costs.closing) + math.ceil(ticks_of_work(work, map(problem.slowness, problem.live)))


def ticks_of_work(work: int, slowness: Iterable[int]) -> Fraction:
    """In how many ticks workers, each at its speed (per mille of the usual time), do so many ticks of usual work."""
    kinds = Counter(slowness)
    return work / sum((Fraction(1000 * number, slow) for slow, number in kinds.items()), start=Fraction(0))


def period_bound(problem: Problem) -> Bound:
    """The best bound known: `cell_bound`, or where layers stay where they are, `fixed_bound`; at least `work_bound`."""
    moving = problem.question.layers == "move"
    return Bound(max(work_bound(problem), cell_bound(problem) if moving else fixed_bound(problem)),
                 problem.question.scope, "the work of all layers that workers share")


def cell_bound(problem: Problem) -> int:
    """A bound for all holdings: workers run whole layers of whole micro-batches, and hold the layers that they run.

    A worker that holds h layers does no more of the usual work than all micro-batches have in h layers. Of a period the
    all-reduces and steps of h layers are not F, I or W; in the rest it does a sum of layers' work, which is a multiple
    of the greatest common divisor of these.
    """
    unit, total = math.gcd(*problem.costs.work), problem.grid.total_microbatches
    if not unit:
        return 0
    most = [total * work for work in accumulate(sorted(problem.costs.work, reverse=True))]
    tails = list(accumulate(sorted(problem.costs.closing)))
    kinds = Counter(map(problem.slowness, problem.live))

    def enough(limit: int) -> bool:
        return sum(count * max(min(work, max(0, limit - tail) * 1000 // (slow * unit) * unit)
                               for work, tail in zip(most, tails, strict=True))
                   for slow, count in kinds.items()) >= most[-1]

    return bisect_left(range(4 * problem.ample_ticks), True, key=enough)


def fixed_bound(problem: Problem) -> int:
    """A bound for the present holdings.

    The work of consecutive parts (`parts_of`) is done by those who hold any of them. Of a period they are not available
    for the all-reduces and optimizer steps of all they hold, and for what they idle by lack of memory (`fill_ticks`).
    Without slices, nobody runs a part of a micro-batch: see `whole_bound`.
    """
    def unavailable(worker: Worker) -> int:
        return problem.closing(worker) + fill_ticks(problem, worker)

    parts = list(parts_of(problem))
    idle = {worker: unavailable(worker) for worker in problem.live}
    best = 0
    for first in range(len(parts)):
        holders: set[Worker] = set()
        work = 0
        for part in parts[first:]:
            holders.update(part.holders)
            work += sum(problem.costs.work[layer] for layer in range(*part.layers)) * problem.grid.total_microbatches
            best = max(best, _least(problem, sorted(holders), work, idle.__getitem__))
    return best if problem.question.sliced else max(best, whole_bound(problem))


def whole_bound(problem: Problem) -> int:
    """A bound where a micro-batch is not cut within a part: each holder runs a whole number of them.

    A holder of a part that needs t ticks for one of its micro-batches runs at most floor((T - tail) / t) in a period T.
    """
    best = 0
    for part in parts_of(problem):
        work = sum(problem.costs.work[layer] for layer in range(*part.layers))
        kinds = Counter((problem.closing(worker), problem.slowness(worker)) for worker in part.holders)

        def enough(limit: int, work: int = work, kinds: Counter[tuple[int, int]] = kinds) -> bool:
            return not work or sum(count * (max(0, limit - tail) * 1000 // (work * slow))
                                   for (tail, slow), count in kinds.items()) >= problem.grid.total_microbatches

        best = max(best, bisect_left(range(4 * problem.ample_ticks), True, key=enough))
    return best


def fill_ticks(problem: Problem, worker: Worker) -> int:
    """Ticks of every period that a worker idles at least, before its first I: proven for its present holdings.

    Let its first F start at t, and its first I at u; that is of a slice [a, b) of some micro-batch. After the F of
    [a, b), F of all layers from b on and I of the same come before that I, at best on workers of no less than the usual
    time and with one transfer each way if b < L. The worker holds b - 1 but perhaps not b; whatever b is, at least the
    F of one layer that it holds, and F and I of all layers behind the last one that it holds, lie between t and u. In
    that time the worker runs F only, as W follows I, and each of these still holds its activation at u. So they take no
    longer than its room for activations allows, at the most ticks of F for the memory. The rest of u - t it idles.
    """
    held = problem.layers_held(worker)
    if not held or held[-1] + 1 == problem.grid.layer_count:
        return 0
    end, slow, sums = held[-1] + 1, problem.slowness(worker), problem.costs.sums
    behind = sums.forward[-1] - sums.forward[end] + sums.backward_input[-1] - sums.backward_input[end]
    fastest = min(map(problem.slowness, problem.live))
    trip = min(problem.costs.forward[layer] for layer in held) * slow // 1000 + behind * min(1000, fastest) // 1000
    trip += 2 * problem.times.transfer
    if not problem.costs.activation or not all(problem.costs.activation[layer] for layer in held):
        return 0
    room = problem.workers[worker].room - sum(problem.costs.weights[layer] for layer in held)
    rate = max(Fraction(problem.costs.forward[layer] * slow, 1000 * problem.costs.activation[layer]) for layer in held)
    rounding = len(held) * problem.grid.total_microbatches if slow != 1000 else 0  # each F is rounded up to a tick
    return max(0, trip - int(room * rate) - rounding - 1)


def _least(problem: Problem, workers: Sequence[Worker], work: int, unavailable: Unavailable) -> int:
    """The least T with which these workers can do the work: sum of (T - unavailable) / slowness >= work."""
    kinds = Counter((problem.slowness(worker), unavailable(worker)) for worker in workers)

    def enough(limit: int) -> bool:
        return sum(Fraction(max(0, limit - lost) * 1000 * count, slow) for (slow, lost), count in kinds.items()) >= work

    return bisect_left(range(problem.ample_ticks * 4), True, key=enough)
