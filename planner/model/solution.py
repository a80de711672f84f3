"""What a scheduler decides."""

from collections.abc import Mapping

import msgspec

from slipstream.planner.model.problem import Unit
from slipstream.schedules.precedence import OpKey
from slipstream.schedules.schedule import Worker


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts and start times of the compute ops. All-reduces and optimizer steps follow from them (`assemble`)."""

    hosts: Mapping[Unit, Worker]
    """The worker that runs each unit."""
    starts: Mapping[OpKey, int]
    """Start tick of each compute op (kind, slice, pipeline, microbatch).

    Ops without duration may share an instant: they then run in the order of this mapping.
    """
