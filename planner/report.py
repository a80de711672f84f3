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
    """Format a number of bytes in gigabytes, to three significant digits or whole ones."""
    gigabytes = count / 1e9
    if not gigabytes:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(float(f"{gigabytes:.3g}"))))
    text = f"{gigabytes:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


# --- What moves, how long that takes, and when it pays --------------------------------------------


BANDWIDTH = 12.5e9
"""Default bytes per second at which a rank copies layers: a port of 100 Gb/s."""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """Copying of the layers that workers hold in a plan, but did not hold before."""

    layers: int
    """Number of layers copied, counted once for each worker that receives them."""
    bytes: float | None
    """Bytes of all layers copied, with gradients and undo copies; None if not known.

    The bytes are not known if the job states no weights.
    """
    seconds: float | None
    """Seconds that the busiest worker sends or receives layers; None if bytes are not known."""


def compute_transition(schedule: Schedule, job: Job, bandwidth: float = BANDWIDTH) -> Transition:
    """Return how many layers to copy before a schedule can run, with bytes and seconds.

    Before, workers hold the layers of their own columns. Each rank sends or receives `bandwidth`
    bytes a second. Raises JobError if layers are copied and a stage of a job with weights has none.
    """
    # The ranks of a worker copy in parallel, each its part of every layer.
    received = layers_received(schedule)
    count = sum(map(len, received.values()))
    if not count:
        return Transition(layers=0, bytes=0.0, seconds=0.0)
    if job.memory is None or not job.memory.weights:
        return Transition(layers=count, bytes=None, seconds=None)
    size = [float(weights) * job.memory.unit_bytes for weights in layer_costs(job).weights]
    return Transition(
        layers=count,
        bytes=sum(size[layer] for layers in received.values() for layer in layers),
        seconds=_busiest_bytes(schedule, received, size) / job.ranks / bandwidth,
    )


def pays_after_iterations(plan: Plan, moved: Transition) -> int | None:
    """Return after how many iterations a plan makes up for copying its layers.

    By then, its shorter period has gained the time of copying, as if training stopped for it. None
    if the period is not shorter than with layers in place, or if the bytes are not known.
    """
    # In fact training need not stop, since layers can be streamed meanwhile.
    gained = (plan.fixed_period or plan.period) - plan.period
    return math.ceil(moved.seconds / gained) if moved.seconds is not None and gained > 0 else None


def layers_received(schedule: Schedule) -> dict[Worker, list[int]]:
    """Return, by worker, the layers that it receives; workers that receive none are left out."""
    received = {seat.worker: sorted(missing_layers(schedule, seat)) for seat in schedule.seats}
    return {worker: layers for worker, layers in received.items() if layers}


def _busiest_bytes(
    schedule: Schedule, received: dict[Worker, list[int]], size: list[float]
) -> float:
    """Return the most bytes that any worker sends or receives."""
    # Holders by layer, before the move.
    grid = schedule.grid
    holders: dict[int, list[Worker]] = defaultdict(list)
    for seat in schedule.seats:
        for stage in grid.stages_of_column(seat.worker.column):
            for layer in range(*grid.layers_of(stage)):
                holders[layer].append(seat.worker)
    sent: dict[Worker, float] = defaultdict(float)
    for worker, layers in received.items():
        for layer in layers:
            # The holder that has sent least sends it; without a holder, it is in a checkpoint.
            if senders := [holder for holder in holders[layer] if holder != worker]:
                sent[min(senders, key=lambda sender: sent[sender])] += size[layer]
    amounts = list(sent.values())
    for layers in received.values():
        amounts.append(sum(size[layer] for layer in layers))
    return max(amounts, default=0.0)


# --- What else could be done about failures: with what throughput, and by which option ------------


ONE_F_ONE_B = "--method 1f1b"
"""Option of the alternative 1F1B."""
MORE_MEMORY_FACTOR = 1.5
"""Memory for activations in the alternative with more memory, as a multiple of the job's."""
MORE_MEMORY = "50 % more memory for activations"
"""Name of the alternative with more memory."""
RECOMPUTED = "recomputed activations"
"""Name of the alternative that recomputes activations."""


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Other way to handle the failures that a plan was made for, with its throughput."""

    what: str
    option: str | None
    """Option of `slipstream plan`, or job key, that requests it; None if none does."""
    period: float
    """Period in seconds of the best plan found in a short time.

    Without the broken pipelines, it is that of the fault-free job.
    """
    throughput: float
    """Samples per second, as a multiple of those of the fault-free job."""
    batch: float = 1.0
    """Share of the samples of an iteration that are still used."""
    effort: str | None = None
    """Limit of its search, in words; None if it is a single schedule."""
    found: bool = True
    """True if its plan was shorter than all with less freedom.

    Otherwise `period` is the shortest of those. True for a single schedule, too.
    """


def find_alternatives(
    job: Job,
    failed: Sequence[Worker],
    plan: Plan,
    options: PlanOptions,
    *,
    normalise: bool,
    seconds: float,
    clock: Clock | None = None,
) -> Iterator[Alternative]:
    """Iterate over other ways to handle the same failures, mostly planned by list schedules.

    With no worker down, the only alternatives are more memory, recomputation and moved layers. If
    the job is large or `plan` interrupted, the only one is without the broken pipelines. There are
    none if `plan.fault_free` is None, or if the options' method is that of 1F1B or ReCycle. Those
    that have no plan are left out.

    Parameters
    ----------
    plan
        Plan to compare with, for the workers `failed`.
    options
        Options with which it was made.
    normalise
        Whether live workers could take other roles in it.
    seconds
        Seconds that all alternatives take together.
    clock
        Clock of a search that this one is part of; None: one of its own.
    """
    # What the fault-free job does is the unit of throughput.
    if plan.fault_free is None or options.method in BASELINES:
        return
    whole = plan.fault_free.period
    if failed and len({worker.pipeline for worker in failed}) < job.pipelines:
        yield _drop_replicas(job, failed, whole)
    # All others need plans, for which a large job takes too long.
    if (
        job.depth * sum(job.microbatches) * 3 > options.params.blocks.largest_compared
        or plan.interrupted
    ):
        return
    clock = clock or options.make_clock()
    deadline = clock.now() + seconds
    # An alternative that moves more is at least as good as those that move less: `best` is the
    # shortest of them so far.
    best = plan.period
    attempts = list(_quick_plans(job, failed, options, clock, normalise=normalise))
    memory_limits = True
    for number, (what, option, attempt) in enumerate(attempts):
        # Recomputation frees memory, which is of use only if more memory was.
        if what == RECOMPUTED and not memory_limits:
            continue
        seconds_left = max(0.01, (deadline - clock.now()) / (len(attempts) - number))
        effort = (
            f"{seconds_left:.2g} s"
            if options.steps is None
            else f"{options.with_limit(seconds_left).steps} steps"
        )
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
                yield Alternative(
                    what=what, option=option, period=period, throughput=whole / period
                )
            else:
                shorter = min(period, present)
                yield Alternative(
                    what=what,
                    option=option,
                    period=shorter,
                    throughput=whole / shorter,
                    effort=effort,
                    found=period < present,
                )


def _quick_plans(
    job: Job, failed: Sequence[Worker], options: PlanOptions, clock: Clock, *, normalise: bool
) -> Iterator[tuple[str, str | None, Callable[[float], Schedule | None]]]:
    """Yield other ways to plan: name, option that asks for it or None, and planner.

    A planner takes its seconds; without a plan it returns None or raises NoPlanError or JobError.
    """
    quick = msgspec.structs.replace(options, method="greedy", layers="fixed", from_checkpoint=False)

    def planner_of(job: Job, options: PlanOptions) -> Callable[[float], Schedule | None]:
        return lambda left: plan_only(options.with_limit(left), job, failed, clock).schedule

    # Less freedom than the plan: what others do.
    if failed:
        usual = msgspec.structs.replace(quick, method="1f1b", backward=None, optimizer=None)
        yield "1F1B with re-routed micro-batches", ONE_F_ONE_B, planner_of(job, usual)
    # What memory is worth: more of it, or less that is needed.
    if job.memory is not None:
        roomier = tuple(room * MORE_MEMORY_FACTOR for room in job.memory.capacity)
        more = msgspec.structs.replace(
            job, memory=msgspec.structs.replace(job.memory, capacity=roomier)
        )
        yield MORE_MEMORY, None, planner_of(more, quick)
        if job.memory.recomputed and job.run_keys.recompute == "none":
            yield (
                RECOMPUTED,
                'training.recompute = "auto"',
                lambda left: _plan_recomputed(job, failed, quick.with_limit(left), clock),
            )
    # More freedom than the plan. Without failures, layers can only move if stages have several.
    if options.layers == "fixed" and (failed or max(job.layers or (1,)) > 1):
        if failed and not normalise:
            yield (
                "roles moved",
                "--normalise",
                lambda left: _plan_moved_roles(job, failed, quick.with_limit(left), clock),
            )
        yield (
            "layers moved",
            "--layers move",
            planner_of(job, msgspec.structs.replace(quick, layers="move")),
        )


def _plan_recomputed(
    job: Job, failed: Sequence[Worker], options: PlanOptions, clock: Clock
) -> Schedule | None:
    """Return a schedule with recomputed activations; None if no stage is chosen for it."""
    chosen = choose_recomputation(job, options, clock)
    return plan_only(options, chosen.job, failed, clock).schedule if chosen.stages else None


def _drop_replicas(job: Job, failed: Sequence[Worker], whole: float) -> Alternative:
    """Return the alternative of training without the pipelines that have failed workers."""
    # Their micro-batches are dropped, and the period stays that of the fault-free job.
    broken = {worker.pipeline for worker in failed}
    kept = sum(count for pipeline, count in enumerate(job.microbatches) if pipeline not in broken)
    batch = kept / sum(job.microbatches)
    return Alternative(
        what="drop the replica" if len(broken) == 1 else f"drop {len(broken)} replicas",
        option=None,
        period=whole,
        throughput=batch,
        batch=batch,
    )


def _plan_moved_roles(
    job: Job, failed: Sequence[Worker], options: PlanOptions, clock: Clock
) -> Schedule | None:
    return relabel_schedule(
        normal_form(job, len(set(failed)), options, clock=clock).schedule, failed
    )


# --- The answer of `slipstream plan --json` -------------------------------------------------------


def plan_report(
    plan: Plan, job: Job, bandwidth: float = BANDWIDTH, again: Recomputation | None = None
) -> dict[str, object]:
    """Return the answer of `slipstream plan --json` about a plan, by key.

    Durations are in seconds, memory in the job's unit, bandwidth in bytes per second of each rank.
    The argument `again` is the planner's choice of the stages that recompute; None: the job states
    it.
    """
    # The keys are an interface for other programs.
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
        "peak_memory": max_memory_peak(schedule),
        "evidence": plan.evidence,
        "interrupted": plan.interrupted,
        "moves": [{"worker": str(seat.worker), "role": str(seat.role)} for seat in schedule.moves],
        "work_bound": schedule.seconds(1) * float(shared_ticks(schedule)),
        "holds": {
            str(seat.worker): list(map(list, schedule.held_layers(seat.worker)))
            for seat in schedule.seats
        },
        "layers_moved": moved.layers,
        "bytes_moved": moved.bytes,
        "seconds_to_move": moved.seconds,
        "fixed_period": plan.fixed_period or plan.period,
        "pays_after_iterations": pays_after_iterations(plan, moved),
        "recomputed_stages": None if again is None else list(again.stages),
        "quick_period": None if again is None else again.period,
        "quick_period_without_recomputation": None if again is None else again.without,
    }


def placement_report(placement: FoundPlacement) -> dict[str, object]:
    """Return what `--placement any` adds to the answer of `plan --json`; durations in seconds."""
    return {
        "placement": placement.arrangement.placement_table,
        "own_placement_period": placement.own_period,
        "with_failures": list(placement.with_failures),
        "mean_period": placement.mean_period,
        "placements_tried": placement.looked_at,
    }


def shared_ticks(schedule: Schedule) -> Fraction:
    """Return the ticks of an iteration's compute if live workers share it by their speed."""
    grid, times = schedule.grid, schedule.times
    stages = range(grid.depth)  # those of the other chains are copies
    work = sum(
        times.forward[stage] + times.backward_input[stage] + times.backward_weight[stage]
        for stage in stages
    )
    return ticks_of_work(
        work * grid.total_microbatches,
        [times.per_mille_of.get(seat.worker, 1000) for seat in schedule.seats],
    )


def max_memory_peak(schedule: Schedule) -> float | None:
    """Return the largest activation memory of any worker, in the job's unit.

    The result is None if the schedule records no memory.
    """
    if schedule.memory is None:
        return None
    return max(memory_peaks(schedule).values(), default=0) * schedule.memory.unit
