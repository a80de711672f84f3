"""A line of workers, and how the work of some micro-batches is cut over it.

A line runs layers 0..L-1 of its micro-batches. Its cells are (layer, micro-batch); they are cut in order of layers into
one chunk a worker. Where a cut falls between two cells of one layer, that layer *floats*: both neighbours hold it, and
some micro-batches are cut before it, others after it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from slipstream.planner.model.problem import Problem
from slipstream.schedules.schedule import Worker

T = TypeVar("T")
Chunk = dict[int, int]
"""Cells of one worker: layer -> micro-batches. The layers are consecutive, ascending."""


class Line(NamedTuple):
    """Live workers that run whole micro-batches, in order of layers."""

    workers: tuple[Worker, ...]
    cut: bool
    """Whether its layers are cut anew; else its workers keep the stages they hold."""


def chunk_ticks(problem: Problem, worker: Worker, chunk: Chunk) -> int:
    """A worker's load: its compute ops at its speed, then all-reduce and optimizer of the layers it holds."""
    compute = sum(problem.costs.work[layer] * count for layer, count in chunk.items())
    return -(-compute * problem.slowness(worker) // 1000) + sum(problem.costs.closing[layer] for layer in chunk)


def fill_idle(problem: Problem, worker: Worker, hops: int) -> Callable[[int, int, int], int]:
    """Ticks that a worker idles at least between its first F and its first I, by lack of memory or of micro-batches.

    Of the first layer that it holds, the end of what it holds, and how many micro-batches it runs, each of which has
    `hops` transfers to the line's end. The I of its first one starts after F of what it holds, F and I of all layers
    after these, and the transfers of both ways. Until then the worker runs only F, of as many micro-batches as it has,
    and as it has room for.
    """
    sums = problem.costs.sums
    forward, backward, weights, most = sums.forward, sums.backward_input, sums.weights, sums.most
    slow, room = problem.slowness(worker), problem.workers[worker].room
    trip = forward[-1] + backward[-1] + 2 * hops * problem.times.transfer

    def idle(first: int, end: int, count: int) -> int:
        own, held = forward[end] - forward[first], most[end] - most[first]
        ran = count * own
        if held and count * held > (free := room - weights[end] + weights[first]):
            ran = max(0, free) * own // held
        return max(0, trip - forward[end] - backward[end] + (own - ran) * slow // 1000)

    return idle


def cut(problem: Problem, workers: Sequence[Worker], counts: Sequence[int], limit: int, *,
        floating: bool = True, staggered: bool = False) -> list[Chunk] | None:
    """Chunks of at most `limit` ticks that cover counts[layer] cells of every layer; None if the line is too short.

    A chunk's ticks are its load and what its worker idles at least by lack of memory (`fill_idle`). From the first
    worker on, each takes as many cells as fit. Not `floating`: only whole layers. `staggered`: a worker
    loses the time between the reductions of the stages it has a part in (`Problem.stagger`).
    """
    chunks: list[Chunk] = []
    sums, work = problem.costs.sums, problem.costs.work
    layer, left = 0, counts[0]
    for position, worker in enumerate(workers):
        idle = fill_idle(problem, worker, len(workers) - 1 - position)
        slow, room, load, first = problem.slowness(worker), problem.workers[worker].room, 0, layer
        chunk: Chunk = {}
        while layer < len(counts):
            if not left:
                layer += 1
                left = counts[layer] if layer < len(counts) else 0
                first = first if chunk else layer
                continue
            end = layer + 1
            if sums.weights[end] - sums.weights[first] + sums.most[end] - sums.most[first] > room:
                break
            beside = idle(first, end, counts[layer]) + sums.closing[end] - sums.closing[first]
            lost = problem.stagger(first, layer) if staggered else 0
            cell, free = work[layer] * slow, (limit - beside - lost) * 1000 - load
            taken = left if left * cell <= free or not cell else max(0, free // cell)
            if not taken or not (floating or taken == left):
                break
            chunk[layer] = taken
            load += taken * cell
            left -= taken
            if left:
                break
        chunks.append(chunk)
    return chunks if layer == len(counts) else None


def least_limit(attempt: Callable[[int], T | None], low: int, high: int, best: T, within: float = 0.0) -> tuple[int, T]:
    """The least limit from `low` + 1 to `high` for which an attempt gives something, and what it gives.

    `best` is what it gives for `high`. `within`: how far from the least the answer may be, as a share of it.
    """
    while high - low > max(1, within * high):
        middle = (low + high) // 2
        found = attempt(middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return high, best
