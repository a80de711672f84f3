"""What workers hold that keep whole layers, each of one element."""

from slipstream.runtime.coordinator.decisions.part_moves import PartitionPlanner
from slipstream.runtime.placement import Placement
from slipstream.runtime.protocol.to_coordinator import HeldState
from slipstream.runtime.protocol.to_worker import LayerMove
from slipstream.runtime.state.parts import ElementCounts


def partition(cuts):
    """How the layers of a model are cut whose schedules' layers end there."""
    return PartitionPlanner([ElementCounts(1)] * cuts[-1], Placement(cuts), (), sharded=False)


def holding(*ranges):
    """What a worker holds that has these layers."""
    return HeldState(ranges, tuple((layer, 0, 1) for layers in ranges for layer in range(*layers)))


def move(target, source, layer):
    """One of a whole layer."""
    return LayerMove(target, source, layer, 0, 1)
