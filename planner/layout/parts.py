"""Ranges of layers that the same workers hold."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from slipstream.planner.layout.problem import LayoutProblem
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker


class Part(NamedTuple):
    """Consecutive layers and those who hold all of them."""

    layers: LayerRange
    holders: tuple[Worker, ...]


def parts_of(problem: LayoutProblem) -> Iterator[Part]:
    """The parts, in order of layers. Raises LookupError where no live worker holds a layer."""
    cuts = {end for path in problem.paths for layers, _ in path for end in layers}
    cuts |= {end for held in problem.holds.values() for layers in held for end in layers}
    edges = sorted(cuts)
    for first, end in itertools.pairwise(edges):
        holders = tuple(worker for worker in problem.live
                        if any(low <= first and end <= high for low, high in problem.holds[worker]))
        if not holders:
            raise LookupError(f"no live worker holds layer {first}")
        yield Part((first, end), holders)
