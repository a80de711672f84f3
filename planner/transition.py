"""What it takes to get to a plan in which layers change hands: what moves, how long that takes, and when it pays."""

import math
from collections import defaultdict

import msgspec

from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import layer_costs
from slipstream.planner.plan import Plan
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.moves import layers_lacked

BANDWIDTH = 12.5e9
"""Bytes a second that each rank of a worker sends or receives: a port of 100 Gb/s."""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """From the layers that live workers held before anything failed to those that they hold in a plan."""

    layers: int
    """Copies of layers that workers receive."""
    bytes: float | None
    """Their weights: all that is held of them, of which gradients and undo copies need not be sent. None where the job
    gives no weights."""
    seconds: float | None
    """Until the busiest worker has sent or received its share."""


def transition(schedule: Schedule, job: Job, bandwidth: float = BANDWIDTH) -> Transition:
    """What a schedule moves, at `bandwidth` bytes a second for each rank of a worker; all ranks at the same time."""
    received = layers_received(schedule)
    count = sum(map(len, received.values()))
    if not count:
        return Transition(layers=0, bytes=0.0, seconds=0.0)
    if job.memory is None or not job.memory.weights:
        return Transition(layers=count, bytes=None, seconds=None)
    size = [float(weights) * job.memory.unit_bytes for weights in layer_costs(job).weights]
    return Transition(layers=count, bytes=sum(size[layer] for layers in received.values() for layer in layers),
                      seconds=_busiest(schedule, received, size) / job.ranks / bandwidth)


def pays_after_iterations(plan: Plan, moved: Transition) -> int | None:
    """From how many iterations on a plan has gained more time than moving took, if training stood still so long.

    It need not, for layers can be streamed while it goes on. None where nothing is gained or the bytes are not known.
    """
    gained = (plan.fixed_period or plan.period) - plan.period
    return math.ceil(moved.seconds / gained) if moved.seconds is not None and gained > 0 else None


def layers_received(schedule: Schedule) -> dict[Worker, list[int]]:
    """The layers that each live worker holds and did not hold before, of those that receive some."""
    received = {seat.worker: sorted(layers_lacked(schedule, seat)) for seat in schedule.seats}
    return {worker: layers for worker, layers in received.items() if layers}


def _busiest(schedule: Schedule, received: dict[Worker, list[int]], size: list[float]) -> float:
    """Bytes that the busiest worker sends or receives, where each layer comes from its least busy live holder."""
    grid = schedule.grid
    holders: dict[int, list[Worker]] = defaultdict(list)
    for seat in schedule.seats:
        for stage in grid.stages_of(seat.worker.column):
            for layer in range(*grid.layers_of(stage)):
                holders[layer].append(seat.worker)
    sent: dict[Worker, float] = defaultdict(float)
    for worker, layers in received.items():
        for layer in layers:
            if senders := [holder for holder in holders[layer] if holder != worker]:  # else from a checkpoint
                sent[min(senders, key=lambda sender: sent[sender])] += size[layer]
    return max([*sent.values(), *(sum(size[layer] for layer in layers) for layers in received.values())], default=0.0)
