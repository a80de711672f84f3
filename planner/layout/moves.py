"""What it takes to come from the present holdings to those of a layout."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from planner.layout.problem import LayoutProblem
from planner.layout.types import LayerRange, Layout
from schedules.schedule import Worker


class LayerLoad(NamedTuple):
    """A worker loads a layer that it does not hold yet."""

    worker: Worker
    layer: int
    source: Worker | None
    """A live worker that holds it; None: a checkpoint."""


def layer_loads(problem: LayoutProblem, layout: Layout) -> list[LayerLoad]:
    """Every layer that a worker must load, from the holder that sends least so far.

    Raises LookupError where no live worker holds a layer and `problem.from_checkpoint` is not set.
    """
    holders: dict[int, list[Worker]] = {layer: [] for layer in range(problem.layer_count)}
    for worker in problem.live:
        for layer in problem.layers_held(worker):
            holders[layer].append(worker)
    sent: Counter[Worker] = Counter()
    loads = []
    for worker in sorted(layout.holds):
        for layer in sorted(_layers(layout.holds[worker]) - set(problem.layers_held(worker))):
            if not holders[layer] and not problem.from_checkpoint:
                raise LookupError(f"no live worker holds layer {layer}")
            source = min(holders[layer], key=lambda holder: (sent[holder], holder), default=None)
            if source is not None:
                sent[source] += 1
            loads.append(LayerLoad(worker, layer, source))
    return loads


def bytes_moved(loads: Sequence[LayerLoad], layer_bytes: Sequence[float]) -> float:
    """Bytes of all loads, with so many of each layer."""
    return sum(layer_bytes[load.layer] for load in loads)


def seconds_to_move(loads: Sequence[LayerLoad], layer_bytes: Sequence[float], bandwidth: float) -> float:
    """Seconds until all loads are done, where each worker sends and receives `bandwidth` bytes a second at once."""
    received: Counter[Worker] = Counter()
    sent: Counter[Worker] = Counter()
    for load in loads:
        received[load.worker] += layer_bytes[load.layer]  # type: ignore[assignment]
        if load.source is not None:
            sent[load.source] += layer_bytes[load.layer]  # type: ignore[assignment]
    return max((*received.values(), *sent.values()), default=0) / bandwidth


def new_layers(holds: Mapping[Worker, tuple[LayerRange, ...]], problem: LayoutProblem) -> int:
    """How many layers all workers load together."""
    return sum(len(_layers(ranges) - set(problem.layers_held(worker))) for worker, ranges in holds.items())


def _layers(ranges: Sequence[LayerRange]) -> set[int]:
    return {layer for first, end in ranges for layer in range(first, end)}
