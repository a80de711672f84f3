"""What else could be done about failures, beside a plan: with what throughput, and by which option."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from slipstream.planner.budget import Clock
from slipstream.planner.job.file import Job, JobError
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.normalise import normal_form
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import Plan, plan_only
from slipstream.planner.recompute import choose_recomputation
from slipstream.planner.search.list_scheduler import BASELINES
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.relabel import relabel

LARGEST = 50_000
"""Compute ops of an iteration up to which there is time for comparisons."""
ONE_F_ONE_B = "--method 1f1b"
ROOMIER = 1.5
MORE_MEMORY = "half as much memory again for activations"
COMPUTED_AGAIN = "activations computed again"


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Something else to do about the same failures."""

    what: str
    option: str | None
    """Of `slipstream plan`, or of the job file; None for what it does not plan."""
    period: float
    """Seconds, of the best plan found in a short time."""
    throughput: float
    """Samples a second, relative to fault-free."""
    batch: float = 1.0
    """The share of the batch that an iteration keeps."""


def alternatives(job: Job, failed: Sequence[Worker], plan: Plan, options: PlanOptions, *, normalise: bool,
                 seconds: float, clock: Clock | None = None) -> Iterator[Alternative]:
    """What could be done instead of a plan made by these options, as far as there is time by the clock to find
    out.

    With nobody down: only whether more memory would help, and layers that are divided otherwise.
    """
    if plan.fault_free is None or options.method in BASELINES:
        return
    whole = plan.fault_free.period
    if failed and len({worker.pipeline for worker in failed}) < job.pipelines:
        yield _without_replicas(job, failed, whole)
    if job.depth * sum(job.microbatches) * 3 > LARGEST or plan.interrupted:
        return
    clock = clock or options.clock()
    deadline = clock.now() + seconds
    best = plan.period  # each that moves more is at least as good as those that move less
    quick = list(_quick_plans(job, failed, options, clock, normalise=normalise))
    memory_limits = True
    for number, (what, option, attempt) in enumerate(quick):
        if what == COMPUTED_AGAIN and not memory_limits:
            continue
        left = max(0.01, (deadline - clock.now()) / (len(quick) - number))
        try:
            schedule = attempt(left)
        except (NoPlanError, JobError):
            continue
        if schedule is not None:
            period = schedule.seconds(schedule.period_ticks)
            if what in (MORE_MEMORY, COMPUTED_AGAIN):
                period = min(period, plan.period)
                memory_limits = period < plan.period
            elif option != ONE_F_ONE_B:
                period = best = min(period, best)
            yield Alternative(what=what, option=option, period=period, throughput=whole / period)


def _quick_plans(job: Job, failed: Sequence[Worker], options: PlanOptions, clock: Clock, *,
                 normalise: bool) -> Iterator[tuple[str, str | None, Callable[[float], Schedule | None]]]:
    """What it is, its option, and a plan of it by list schedules in so many seconds."""
    quick = msgspec.structs.replace(options, method="greedy", layers="fixed", from_checkpoint=False)

    def plan(job: Job, options: PlanOptions) -> Callable[[float], Schedule | None]:
        return lambda left: plan_only(options.within(left), job, failed, clock).schedule

    if failed:
        usual = msgspec.structs.replace(quick, method="1f1b", backward=None, optimizer=None)
        yield "1F1B with re-routed micro-batches", ONE_F_ONE_B, plan(job, usual)
    if job.memory is not None:
        roomier = tuple(room * ROOMIER for room in job.memory.capacity)
        more = msgspec.structs.replace(job, memory=msgspec.structs.replace(job.memory, capacity=roomier))
        yield MORE_MEMORY, None, plan(more, quick)
        if job.memory.recomputed and job.training.get("recompute", "none") == "none":
            yield COMPUTED_AGAIN, 'training.recompute = "auto"', lambda left: _computed_again(
                job, failed, quick.within(left), clock)
    if options.layers == "fixed" and (failed or max(job.layers or (1,)) > 1):
        if failed and not normalise:
            yield "roles moved", "--normalise", lambda left: _moved_roles(job, failed, quick.within(left), clock)
        yield "layers moved", "--layers move", plan(job, msgspec.structs.replace(quick, layers="move"))


def _computed_again(job: Job, failed: Sequence[Worker], options: PlanOptions, clock: Clock) -> Schedule | None:
    """None where nothing would be computed again."""
    chosen = choose_recomputation(job, options, clock)
    return plan_only(options, chosen.job, failed, clock).schedule if chosen.stages else None


def _without_replicas(job: Job, failed: Sequence[Worker], whole: float) -> Alternative:
    """The pipelines that have lost workers stand still, and the others go on as before, with a smaller batch."""
    broken = {worker.pipeline for worker in failed}
    kept = sum(count for pipeline, count in enumerate(job.microbatches) if pipeline not in broken)
    batch = kept / sum(job.microbatches)
    return Alternative(what="drop the replica" if len(broken) == 1 else f"drop {len(broken)} replicas", option=None,
                       period=whole, throughput=batch, batch=batch)


def _moved_roles(job: Job, failed: Sequence[Worker], options: PlanOptions, clock: Clock) -> Schedule | None:
    return relabel(normal_form(job, len(set(failed)), options, clock=clock).schedule, failed)
