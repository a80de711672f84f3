"""What workers hold that keep whole layers, each of one element."""

from slipstream.runtime.coordinator.decisions.part_moves import Partition
from slipstream.runtime.model.state.parts import Elements
from slipstream.runtime.protocol.to_coordinator import Kept
from slipstream.runtime.protocol.to_worker import Move
from slipstream.runtime.replay.placement import Placement


def partition(cuts):
    """How the layers of a model are cut whose schedules' layers end there."""
    return Partition([Elements(1)] * cuts[-1], Placement(cuts), (), sharded=False)


def holding(*ranges):
    """What a worker holds that has these layers."""
    return Kept(ranges, tuple((layer, 0, 1) for layers in ranges for layer in range(*layers)))


def move(target, source, layer):
    """One of a whole layer."""
    return Move(target, source, layer, 0, 1)
