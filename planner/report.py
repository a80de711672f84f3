"""What a plan takes to get to, and the answer of `slipstream plan --json`."""

import math
from collections import defaultdict
from fractions import Fraction

import msgspec

from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import layer_costs
from slipstream.planner.model.bounds import ticks_of_work
from slipstream.planner.plan import Plan
from slipstream.planner.recompute import Recomputation
from slipstream.schedules.memory import memory_peaks
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.relabel import layers_lacked

# --- What moves, how long that takes, and when it pays ----------------------------------------------------------------


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


# --- The answer of `slipstream plan --json` ---------------------------------------------------------------------------


def plan_report(plan: Plan, job: Job, bandwidth: float = BANDWIDTH,
                again: Recomputation | None = None) -> dict[str, object]:
    """Durations in seconds, memory in the job's unit, bandwidth in bytes a second for each rank.

    `again`: where the planner has chosen what is computed again.
    """
    schedule, moved = plan.schedule, transition(plan.schedule, job, bandwidth)
    return {
        "period": plan.period,
        "lower_bound": schedule.seconds(schedule.lower_bound_ticks),
        "gap": schedule.gap,
        "status": schedule.status,
        "bound_scope": schedule.scope,
        "solve_seconds": round(plan.solve_seconds, 3),
        "fault_free_period": plan.fault_free_period,
        "fault_free_bound": plan.fault_free.bound if plan.fault_free else None,
        "rerouted": schedule.rerouted,
        "shed": schedule.shed,
        "peak_memory": peak_memory(schedule),
        "evidence": plan.evidence,
        "interrupted": plan.interrupted,
        "moves": [{"worker": str(seat.worker), "role": str(seat.role)} for seat in schedule.moves],
        "work_bound": schedule.seconds(1) * float(shared_ticks(schedule)),
        "holds": {str(seat.worker): [list(layers) for layers in schedule.holds(seat.worker)]
                  for seat in schedule.seats},
        "layers_moved": moved.layers,
        "bytes_moved": moved.bytes,
        "seconds_to_move": moved.seconds,
        "fixed_period": plan.fixed_period or plan.period,
        "pays_after_iterations": pays_after_iterations(plan, moved),
        "recomputed_stages": None if again is None else list(again.stages),
        "quick_period": None if again is None else again.period,
        "quick_period_without_recomputation": None if again is None else again.without,
    }


def shared_ticks(schedule: Schedule) -> Fraction:
    """In how many ticks the live workers together do the work of an iteration, each at its speed."""
    grid, times = schedule.grid, schedule.times
    stages = range(grid.depth)  # those of the other chains are copies
    work = sum(times.forward[stage] + times.backward_input[stage] + times.backward_weight[stage] for stage in stages)
    return ticks_of_work(work * grid.total_microbatches,
                         [times.per_mille_of.get(seat.worker, 1000) for seat in schedule.seats])


def peak_memory(schedule: Schedule) -> float | None:
    """The most that any worker holds at any time, in the job's unit; None where the job gives no memory."""
    if schedule.memory is None:
        return None
    return max(memory_peaks(schedule).values(), default=0) * schedule.memory.unit
