"""What a layout is: the layers that each live worker holds, and the route of each micro-batch."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from schedules.layers import LayerRange
from schedules.schedule import Worker


class MicroBatch(NamedTuple):
    """The micro-batch of this number that this pipeline reads in an iteration."""

    pipeline: int
    microbatch: int


class Stop(NamedTuple):
    """One slice of a route: layers, and the worker that runs their F, I and W."""

    layers: LayerRange
    worker: Worker


Route = tuple[Stop, ...]
"""Its layers tile 0..L-1 in order."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What an order in time is then searched for."""

    kind: str
    """How it was made, in a few words, e.g. "re-cut pipelines, floating layers"."""
    holds: Mapping[Worker, tuple[LayerRange, ...]]
    """Every live worker: ascending, disjoint ranges that do not touch."""
    routes: Mapping[MicroBatch, Route]
    """Every micro-batch of an iteration."""
