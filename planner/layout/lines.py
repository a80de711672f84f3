"""A line of workers, and how the work of some micro-batches is cut over it.

A line runs layers 0..L-1 of its micro-batches. Its cells are (layer, micro-batch); they are cut in order of layers into
one chunk a worker. Where a cut falls between two cells of one layer, that layer *floats*: both neighbours hold it, and
some micro-batches are cut before it, others after it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from planner.layout.problem import UNLIMITED, LayoutProblem
from planner.layout.types import LayerRange
from schedules.schedule import Worker

Chunk = dict[int, int]
"""Cells of one worker: layer -> micro-batches. The layers are consecutive, ascending."""


class Line(NamedTuple):
    """Live workers that run whole micro-batches, in order of layers."""

    workers: tuple[Worker, ...]
    cut: bool
    """Whether its layers are cut anew; else its workers keep the stages they hold."""


def chunk_ticks(problem: LayoutProblem, worker: Worker, chunk: Chunk) -> int:
    """A worker's load: its compute ops at its speed, then all-reduce and optimizer of the layers it holds."""
    compute = sum(problem.work[layer] * count for layer, count in chunk.items())
    return -(-compute * problem.slowness(worker) // 1000) + sum(problem.tail[layer] for layer in chunk)


def fill_idle(problem: LayoutProblem, worker: Worker, layers: LayerRange, count: int, hops: int) -> int:
    """Ticks that a worker idles at least between its first F and its first I, by lack of memory or of micro-batches.

    It holds these layers and runs `count` micro-batches, each of which has `hops` transfers to the line's end. The I of
    its first one starts after F of what it holds, F and I of all layers after these, and the transfers of both ways.
    Until then the worker runs only F, of as many micro-batches as it has, and as it has room for.
    """
    sums, (first, end), slow = problem.sums, layers, problem.slowness(worker)
    forward = sums.forward[end] - sums.forward[first]
    most = sums.most[end] - sums.most[first]
    room = problem.room_of(worker) - sums.weight[end] + sums.weight[first]
    ran = count * forward if not most or count * most <= room else max(0, room) * forward // most
    behind = sums.forward[-1] - sums.forward[end] + sums.backward[-1] - sums.backward[end]
    return max(0, behind + 2 * hops * problem.transfer + (forward - ran) * slow // 1000)


def cut(problem: LayoutProblem, workers: Sequence[Worker], counts: Sequence[int], limit: int, *,
        floating: bool = True, staggered: bool = False) -> list[Chunk] | None:
    """Chunks of at most `limit` ticks that cover counts[layer] cells of every layer; None if the line is too short.

    A chunk's ticks are its load and what its worker idles at least by lack of memory (`fill_idle`). From the first
    worker on, each takes as many cells as fit. Not `floating`: only whole layers. `staggered`: a worker
    loses the time between the reductions of the stages it has a part in (`LayoutProblem.stagger`).
    """
    chunks: list[Chunk] = []
    layer, left = 0, counts[0]
    for position, worker in enumerate(workers):
        chunk: Chunk = {}
        load = 0
        while layer < len(counts):
            if not left:
                layer += 1
                left = counts[layer] if layer < len(counts) else 0
                continue
            first = min(chunk, default=layer)
            beside = _beside(problem, worker, (first, layer + 1), counts[layer], len(workers) - 1 - position)
            lost = problem.stagger(first, layer) if staggered else 0
            cell = problem.work[layer] * problem.slowness(worker)
            free = (limit - beside - lost) * 1000 - load
            taken = max(0, min(left, free // cell if cell else left))
            if not taken or not (floating or taken == left):
                break
            chunk[layer] = taken
            load += taken * cell
            left -= taken
            if left:
                break
        chunks.append(chunk)
    return chunks if layer == len(counts) else None


def _beside(problem: LayoutProblem, worker: Worker, layers: LayerRange, count: int, hops: int) -> int:
    """Ticks that a worker with these layers has beside its cells; more than any limit where they have no room."""
    sums, (first, end) = problem.sums, layers
    if sums.weight[end] - sums.weight[first] + sums.most[end] - sums.most[first] > problem.room_of(worker):
        return UNLIMITED
    return fill_idle(problem, worker, layers, count, hops) + sums.tail[end] - sums.tail[first]
