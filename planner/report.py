"""Report what a plan moves, its alternatives, and the answer of `slipstream plan --json`."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import msgspec

from slipstream.planner.budget import Clock
from slipstream.planner.job.file import Job, JobError
from slipstream.planner.job.layers import layer_costs
from slipstream.planner.model.bounds_layouts import ticks_of_work
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.normalise import normal_form
from slipstream.planner.options import PlanOptions
from slipstream.planner.placement import FoundPlacement
from slipstream.planner.plan import Plan, plan_only
from slipstream.planner.recompute import Recomputation, choose_recomputation
from slipstream.planner.search.list_scheduler import BASELINES
from slipstream.schedules.memory import memory_peaks
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.relabel import missing_layers, relabel_schedule


def format_gigabytes(count: float) -> str:
    """Format a number of bytes in gigabytes: to three significant digits, and without an
    exponent."""
    gigabytes = count / 1e9
    if not gigabytes:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(float(f"{gigabytes:.3g}"))))
    text = f"{gigabytes:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


# --- What moves, how long that takes, and when it pays ----------------------------------------------------------------


BANDWIDTH = 12.5e9
"""Default bytes per second of each rank for layers: a port of 100 Gb/s."""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """Copying of layers to workers that hold them in a plan and did not before."""

    layers: int
    """Number of layers copied, counted once for each worker that receives them."""
    bytes: float | None
    """Bytes of all layers copied, with gradients and undo copies; None without weights."""
    seconds: float | None
    """Seconds until the busiest worker has its layers; None if bytes are not known."""


def compute_transition(schedule: Schedule, job: Job, bandwidth: float = BANDWIDTH) -> Transition:
    """Return what layers a schedule copies, at `bandwidth` bytes a second and rank."""
    received = layers_received(schedule)
    count = sum(map(len, received.values()))
    if not count:
        return Transition(layers=0, bytes=0.0, seconds=0.0)
    if job.memory is None or not job.memory.weights:
        return Transition(layers=count, bytes=None, seconds=None)
    size = [float(weights) * job.memory.unit_bytes for weights in layer_costs(job).weights]
    return Transition(layers=count, bytes=sum(size[layer] for layers in received.values() for layer in layers),
                      seconds=_busiest_bytes(schedule, received, size) / job.ranks / bandwidth)


def pays_after_iterations(plan: Plan, moved: Transition) -> int | None:
    """Return the number of iterations that make up for copying a plan's layers.

    It is compared with layers in place, if training stops for the copying; it need not, since
    layers can be streamed meanwhile. None if nothing is gained or the bytes are not known.
    """
    gained = (plan.fixed_period or plan.period) - plan.period
    return math.ceil(moved.seconds / gained) if moved.seconds is not None and gained > 0 else None


def layers_received(schedule: Schedule) -> dict[Worker, list[int]]:
    """Return, by worker that receives some, the layers that it did not hold before."""
    received = {seat.worker: sorted(missing_layers(schedule, seat)) for seat in schedule.seats}
    return {worker: layers for worker, layers in received.items() if layers}


def _busiest_bytes(schedule: Schedule, received: dict[Worker, list[int]], size: list[float]) -> float:
    """Return the most bytes that a worker sends or receives, from least busy holders."""
    grid = schedule.grid
    holders: dict[int, list[Worker]] = defaultdict(list)
    for seat in schedule.seats:
        for stage in grid.stages_of_column(seat.worker.column):
            for layer in range(*grid.layers_of(stage)):
                holders[layer].append(seat.worker)
    sent: dict[Worker, float] = defaultdict(float)
    for worker, layers in received.items():
        for layer in layers:
            if senders := [holder for holder in holders[layer] if holder != worker]:  # else from a checkpoint
                sent[min(senders, key=lambda sender: sent[sender])] += size[layer]
    return max([*sent.values(), *(sum(size[layer] for layer in layers) for layers in received.values())], default=0.0)


# --- What else could be done about failures: with what throughput, and by which option --------------------------------


ONE_F_ONE_B = "--method 1f1b"
MORE_MEMORY_FACTOR = 1.5
MORE_MEMORY = "50 % more memory for activations"
RECOMPUTED = "recomputed activations"


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Another way to handle the failures that a plan was made for, with its throughput."""

    what: str
    option: str | None
    """Option of `slipstream plan`, or job key, that requests it; None if none does."""
    period: float
    """Period in seconds of the best plan found in a short time."""
    throughput: float
    """Samples per second, as a multiple of those of the fault-free job."""
    batch: float = 1.0
    """Share of the samples of an iteration that are still used."""
    effort: str | None = None
    """Most time or steps of its search, in words; None for a single plan."""
    found: bool = True
    """False if no shorter plan was found; the period is one of less freedom."""


def find_alternatives(job: Job, failed: Sequence[Worker], plan: Plan, options: PlanOptions, *, normalise: bool,
                      seconds: float, clock: Clock | None = None) -> Iterator[Alternative]:
    """Iterate over other ways to handle the same failures, each by list schedules.

    All take `seconds` together. They are compared with `plan`, made with these options; `normalise`
    is True if live workers could take other roles in it. With no worker down, the only other ways
    are more memory, recomputation and moved layers.
    """
    if plan.fault_free is None or options.method in BASELINES:
        return
    whole = plan.fault_free.period
    if failed and len({worker.pipeline for worker in failed}) < job.pipelines:
        yield _drop_replicas(job, failed, whole)
    if job.depth * sum(job.microbatches) * 3 > options.params.blocks.largest_compared or plan.interrupted:
        return
    clock = clock or options.make_clock()
    deadline = clock.now() + seconds
    best = plan.period  # each that moves more is at least as good as those that move less
    attempts = list(_quick_plans(job, failed, options, clock, normalise=normalise))
    memory_limits = True
    for number, (what, option, attempt) in enumerate(attempts):
        if what == RECOMPUTED and not memory_limits:
            continue
        seconds_left = max(0.01, (deadline - clock.now()) / (len(attempts) - number))
        effort = f"{seconds_left:.2g} s" if options.steps is None else f"{options.with_limit(seconds_left).steps} steps"
        try:
            schedule = attempt(seconds_left)
        except (NoPlanError, JobError):
            continue
        if schedule is not None:
            period, present = schedule.seconds(schedule.period_ticks), plan.period
            if what in (MORE_MEMORY, RECOMPUTED):
                memory_limits = period < present
            elif option != ONE_F_ONE_B:
                present, best = best, min(period, best)
            if option == ONE_F_ONE_B:
                yield Alternative(what=what, option=option, period=period, throughput=whole / period)
            else:
                shorter = min(period, present)
                yield Alternative(what=what, option=option, period=shorter, throughput=whole / shorter, effort=effort,
                                  found=period < present)


def _quick_plans(job: Job, failed: Sequence[Worker], options: PlanOptions, clock: Clock, *,
                 normalise: bool) -> Iterator[tuple[str, str | None, Callable[[float], Schedule | None]]]:
    """Iterate over alternatives as (name, option, function that plans it within seconds)."""
    quick = msgspec.structs.replace(options, method="greedy", layers="fixed", from_checkpoint=False)

    def planner_of(job: Job, options: PlanOptions) -> Callable[[float], Schedule | None]:
        return lambda left: plan_only(options.with_limit(left), job, failed, clock).schedule

    if failed:
        usual = msgspec.structs.replace(quick, method="1f1b", backward=None, optimizer=None)
        yield "1F1B with re-routed micro-batches", ONE_F_ONE_B, planner_of(job, usual)
    if job.memory is not None:
        roomier = tuple(room * MORE_MEMORY_FACTOR for room in job.memory.capacity)
        more = msgspec.structs.replace(job, memory=msgspec.structs.replace(job.memory, capacity=roomier))
        yield MORE_MEMORY, None, planner_of(more, quick)
        if job.memory.recomputed and job.run_keys.recompute == "none":
            yield RECOMPUTED, 'training.recompute = "auto"', lambda left: _plan_recomputed(
                job, failed, quick.with_limit(left), clock)
    if options.layers == "fixed" and (failed or max(job.layers or (1,)) > 1):
        if failed and not normalise:
            yield "roles moved", "--normalise", lambda left: _plan_moved_roles(job, failed, quick.with_limit(left),
                                                                               clock)
        yield "layers moved", "--layers move", planner_of(job, msgspec.structs.replace(quick, layers="move"))


def _plan_recomputed(job: Job, failed: Sequence[Worker], options: PlanOptions, clock: Clock) -> Schedule | None:
    """Return a schedule with recomputed activations; None if the planner chooses no stage to
    recompute."""
    chosen = choose_recomputation(job, options, clock)
    return plan_only(options, chosen.job, failed, clock).schedule if chosen.stages else None


def _drop_replicas(job: Job, failed: Sequence[Worker], whole: float) -> Alternative:
    """Return the alternative that stops all pipelines with failed workers."""
    broken = {worker.pipeline for worker in failed}
    kept = sum(count for pipeline, count in enumerate(job.microbatches) if pipeline not in broken)
    batch = kept / sum(job.microbatches)
    return Alternative(what="drop the replica" if len(broken) == 1 else f"drop {len(broken)} replicas", option=None,
                       period=whole, throughput=batch, batch=batch)


def _plan_moved_roles(job: Job, failed: Sequence[Worker], options: PlanOptions, clock: Clock) -> Schedule | None:
    return relabel_schedule(normal_form(job, len(set(failed)), options, clock=clock).schedule, failed)


# --- The answer of `slipstream plan --json` ---------------------------------------------------------------------------


def plan_report(plan: Plan, job: Job, bandwidth: float = BANDWIDTH,
                again: Recomputation | None = None) -> dict[str, object]:
    """Return the answer of `slipstream plan --json` about a plan, by key.

    Durations are in seconds, memory in the job's unit, bandwidth in bytes per second for each rank.
    `again` is the planner's choice of recomputed stages, if it made one.
    """
    schedule, moved = plan.schedule, compute_transition(plan.schedule, job, bandwidth)
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
        "holds": {str(seat.worker): [list(layers) for layers in schedule.held_layers(seat.worker)]
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


def placement_report(found: FoundPlacement) -> dict[str, object]:
    """Return what `--placement any` adds to `plan --json`, by key, in seconds."""
    return {
        "placement": found.arrangement.placement_table,
        "own_placement_period": found.own_period,
        "with_failures": list(found.with_failures),
        "mean_period": found.mean_period,
        "placements_tried": found.looked_at,
    }


def shared_ticks(schedule: Schedule) -> Fraction:
    """Return the ticks of an iteration's compute ops if all live workers shared them evenly."""
    grid, times = schedule.grid, schedule.times
    stages = range(grid.depth)  # those of the other chains are copies
    work = sum(times.forward[stage] + times.backward_input[stage] + times.backward_weight[stage] for stage in stages)
    return ticks_of_work(work * grid.total_microbatches,
                         [times.per_mille_of.get(seat.worker, 1000) for seat in schedule.seats])


def peak_memory(schedule: Schedule) -> float | None:
    """Return the largest memory that any worker holds, in the job's unit; None without memory."""
    if schedule.memory is None:
        return None
    return max(memory_peaks(schedule).values(), default=0) * schedule.memory.unit
