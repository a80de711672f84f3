"""What a layout is: the layers that each live worker holds, and the route of each micro-batch."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker

Held = tuple[LayerRange, ...]
"""What a worker holds: ascending ranges that do not touch."""
UNLIMITED = 2**40
"""Room of a worker where memory is unlimited."""


class LiveWorker(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that planning knows of a live worker: two that are equal may change places."""

    per_mille: int = 1000
    """Time of its compute ops as a multiple of the usual one: 1000 is normal, 2000 half speed."""
    room: int = UNLIMITED
    """Memory for weights and activations together."""
    holds: Held
    """Its layers: now, or in a layout."""


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
