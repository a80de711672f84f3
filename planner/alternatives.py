"""What else could be done about failures, beside a plan: with what throughput, and by which option."""

import time
from collections.abc import Iterator, Sequence

import msgspec

from planner.job.file import Job, JobError
from planner.model.problem import NoPlanError
from planner.normalise import normal_form
from planner.options import PlanOptions
from planner.plan import Plan, plan_only
from planner.search.baselines import BASELINES
from schedules.schedule import Schedule, Worker
from schedules.tables.relabel import relabel

LARGEST = 50_000
"""Compute ops of an iteration up to which there is time for comparisons."""


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Something else to do about the same failures."""

    what: str
    option: str | None
    """Of `slipstream plan`; None for what it does not plan."""
    period: float
    """Seconds, of the best plan found in a short time."""
    throughput: float
    """Samples a second, relative to fault-free."""
    batch: float = 1.0
    """The share of the batch that an iteration keeps."""


def alternatives(job: Job, failed: Sequence[Worker], plan: Plan, options: PlanOptions, *, normalise: bool,
                 seconds: float) -> Iterator[Alternative]:
    """What could be done instead of a plan made by these options, as far as there is time to find out."""
    if plan.fault_free is None or not failed or options.method in BASELINES:
        return
    whole = plan.fault_free.period
    if len({worker.pipeline for worker in failed}) < job.pipelines:
        yield _without_replicas(job, failed, whole)
    if job.depth * sum(job.microbatches) * 3 > LARGEST or plan.interrupted:
        return
    deadline = time.monotonic() + seconds
    quick = msgspec.structs.replace(options, method="greedy", layers="fixed", from_checkpoint=False)
    others: list[tuple[str, str, PlanOptions, bool]] = [
        ("1F1B with re-routed micro-batches", "--method 1f1b",
         msgspec.structs.replace(quick, method="1f1b", backward=None, optimizer=None), False)]
    if options.layers == "fixed":
        if not normalise:
            others.append(("roles moved", "--normalise", quick, True))
        others.append(("layers moved", "--layers move", msgspec.structs.replace(quick, layers="move"), False))
    best = plan.period  # each that moves more is at least as good as those that move less
    for number, (what, option, how, roles) in enumerate(others):
        left = max(0.01, (deadline - time.monotonic()) / (len(others) - number))
        try:
            schedule = _moved_roles(job, failed, how.within(left)) if roles else \
                plan_only(how.within(left), job, failed).schedule
        except (NoPlanError, JobError):
            continue
        if schedule is not None:
            period = schedule.seconds(schedule.period_ticks)
            if how.method != "1f1b":
                period = best = min(period, best)
            yield Alternative(what=what, option=option, period=period, throughput=whole / period)


def _without_replicas(job: Job, failed: Sequence[Worker], whole: float) -> Alternative:
    """The pipelines that have lost workers stand still, and the others go on as before, with a smaller batch."""
    broken = {worker.pipeline for worker in failed}
    kept = sum(count for pipeline, count in enumerate(job.microbatches) if pipeline not in broken)
    batch = kept / sum(job.microbatches)
    return Alternative(what="drop the replica" if len(broken) == 1 else f"drop {len(broken)} replicas", option=None,
                       period=whole, throughput=batch, batch=batch)


def _moved_roles(job: Job, failed: Sequence[Worker], options: PlanOptions) -> Schedule | None:
    return relabel(normal_form(job, len(set(failed)), options).schedule, failed)
