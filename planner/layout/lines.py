"""A line of workers, and how the work of some micro-batches is cut over it.

A line runs layers 0..L-1 of its micro-batches. Its cells are (layer, micro-batch); they are cut in order of layers into
one chunk a worker. Where a cut falls between two cells of one layer, that layer *floats*: both neighbours hold it, and
some micro-batches are cut before it, others after it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from planner.layout.problem import LayoutProblem
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


def fill_idle(problem: LayoutProblem, worker: Worker, held: Sequence[int], count: int, hops: int) -> int:
    """Ticks that a worker idles at least between its first F and its first I, by lack of memory or of micro-batches.

    It holds the layers `held` and runs `count` micro-batches, each of which has `hops` transfers to the line's end. The
    I of its first one starts after F of `held`, F and I of all layers after these, and the transfers of both ways.
    Until then the worker runs only F, of as many micro-batches as it has, and as it has room for.
    """
    forward = sum(problem.forward[layer] for layer in held)
    most = sum(problem.most(layer) for layer in held)
    room = problem.room_of(worker) - sum(problem.weight(layer) for layer in held)
    slow = problem.slowness(worker)
    ran = count * forward if not most or count * most <= room else max(0, room) * forward // most
    end = held[-1] + 1
    trip = problem.forward_from(end) + problem.backward_from(end) + 2 * hops * problem.transfer + forward * slow // 1000
    return max(0, trip - ran * slow // 1000)


def cut(problem: LayoutProblem, workers: Sequence[Worker], counts: Sequence[int], limit: int, *,
        floating: bool = True) -> list[Chunk] | None:
    """Chunks of at most `limit` ticks that cover counts[layer] cells of every layer; None if the line is too short.

    A chunk's ticks are its load and what its worker idles at least by lack of memory (`fill_idle`). From the first
    worker on, each takes as many cells as fit. Not `floating`: only whole layers.
    """
    chunks: list[Chunk] = []
    layer, left = 0, counts[0]
    for position, worker in enumerate(workers):
        hops = len(workers) - 1 - position
        chunk: Chunk = {}
        while layer < len(counts):
            if not left:
                layer += 1
                left = counts[layer] if layer < len(counts) else 0
                continue
            taken = _most_cells(problem, worker, chunk, layer, left, limit, hops)
            if not taken or not (floating or taken == left):
                break
            chunk[layer] = taken
            left -= taken
            if left:
                break
        chunks.append(chunk)
    return chunks if layer == len(counts) else None


def _most_cells(problem: LayoutProblem, worker: Worker, chunk: Chunk, layer: int, left: int, limit: int,
                hops: int) -> int:
    """Cells of one more layer that a worker can take."""
    held = [*chunk, layer]
    room = problem.room_of(worker) - sum(problem.weight(layer) + problem.most(layer) for layer in held)
    if room < 0:
        return 0
    idle = fill_idle(problem, worker, held, max(chunk.values(), default=left), hops)
    free = limit - idle - chunk_ticks(problem, worker, chunk) - problem.tail[layer]
    cell = problem.work[layer] * problem.slowness(worker)
    return max(0, min(left, free * 1000 // cell if cell else left))
