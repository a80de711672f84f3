"""Plan a checked schedule for a job and its failed workers.

`planner.search.engine` finds the best of the candidates (`planner.candidates`). If there is not
enough time for the whole job, `planner.blockwise` plans it in blocks of micro-batches.
`planner.reference` finds the fault-free period to compare with.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgspec

from slipstream.planner.blockwise import Speed, TooLargeError, choose_blocks, plan_in_blocks
from slipstream.planner.bounding import with_bound_of, with_rounded_bound
from slipstream.planner.budget import (
    Budget,
    Clock,
    ProgressCallback,
    SearchEnd,
    SearchProgress,
    StepClock,
    Tally,
    defer_interrupts,
    ignore_progress,
)
from slipstream.planner.candidates import build_candidates
from slipstream.planner.compiled import compile_in_background, ensure_compiled
from slipstream.planner.job.file import Job, require_workers
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.decompose import decompose
from slipstream.planner.model.problem import Bound, NoPlanError, NoRoomError, Problem
from slipstream.planner.options import PlanOptions
from slipstream.planner.overlapped import (
    add_overlapping_reductions,
    bounding_problem,
    has_overlapping_reductions,
    without_reductions,
)
from slipstream.planner.params import OverlapParams
from slipstream.planner.reference import FaultFree, ReferenceSearch, is_reference_kind
from slipstream.planner.search.engine import Method, find_best_candidate
from slipstream.planner.search.incumbent import Incumbent, SolvedPiece
from slipstream.planner.search.list_scheduler import BASELINES
from slipstream.schedules.check import check
from slipstream.schedules.schedule import BackwardMode, OptimizerMode, Schedule, Scope, Worker


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Valid schedule for a job and its failures, and how it was found."""

    schedule: Schedule
    fault_free: FaultFree | None = None
    """Period and bound with no worker down; None if not requested or not found."""
    solve_seconds: float = 0.0
    """Seconds spent on the plan; those of the search's clock if `plan_only` made it."""
    evidence: str | None = None
    """Words that explain a period above the bound; None or empty if there are none."""
    interrupted: bool = False
    """True if Ctrl-C stopped the search; the schedule is the best one found until then."""
    fixed_period: float | None = None
    """Period in seconds of the best plan in place; None if this is it.

    None, too, if no plan in place was found.
    """
    tally: Tally | None = None
    """Counts of how often each search technique was tried, and helped; None if not counted."""
    end: SearchEnd | None = None
    """Reason why the search ended; None if not known."""

    @classmethod
    def from_schedule(cls, schedule: Schedule, *, evidence: str | None, **others: Any) -> "Plan":
        """Return a plan of this schedule, without the `evidence` if it is optimal.

        `evidence` explains a period above the bound. The `others` are values of further fields.
        """
        return cls(
            schedule=schedule, evidence=None if schedule.status == "optimal" else evidence, **others
        )

    def __repr__(self) -> str:
        """Return one line about the plan, without the ops of its schedule."""
        return f"Plan({self.schedule!r})"

    @property
    def period(self) -> float:
        """Period of the schedule in seconds."""
        return self.schedule.seconds(self.schedule.period_ticks)

    @property
    def fault_free_period(self) -> float | None:
        """Period in seconds of the best known plan with no worker down; None without one."""
        return self.fault_free.period if self.fault_free else None


def plan_job(
    job: Job,
    failed: Sequence[Worker] = (),
    *,
    backward: BackwardMode | None = None,
    optimizer: OptimizerMode | None = None,
    method: Method = "cp-sat",
    time_limit: float = 10.0,
    steps: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = ignore_progress,
) -> Plan:
    """Plan a schedule for a job with failed workers.

    If the inner loops are not compiled yet, another process compiles them, and until then plans are
    list schedules alone; with `steps`, or if no machine code can be stored, this call compiles
    first. In the main thread, the first Ctrl-C ends the search with the best plan so far. Raises
    ValueError for a wrong option; JobError if a failed worker is not in the job, if layouts are
    tried and a stage has no layer, or if the limit is too short for the job (TooLargeError);
    NoPlanError if no schedule is found.

    Parameters
    ----------
    failed
        Workers that are down.
    backward, optimizer
        Modes; None: split and staggered, but fused and synchronous for 1f1b.
    method
        "cp-sat" (the whole search), "greedy" (list schedules alone), or "1f1b" or "recycle" for
        comparison.
    time_limit
        Seconds that the search takes at most, about.
    steps
        Number of search steps instead of `time_limit`; one seed then gives one plan.
    seed
        Seed of the random numbers.
    progress
        Function that receives lines of progress.
    """
    options = PlanOptions(
        backward=backward,
        optimizer=optimizer,
        method=method,
        time_limit=time_limit,
        steps=steps,
        seed=seed,
    )
    return plan_with(options, job, failed, progress=progress)


def plan_with(
    options: PlanOptions,
    job: Job,
    failed: Sequence[Worker] = (),
    *,
    fault_free: FaultFree | None = None,
    progress: ProgressCallback = ignore_progress,
    clock: Clock | None = None,
) -> Plan:
    """Plan a schedule for a job with failed workers, and find its fault-free period.

    Compilation, Ctrl-C and errors are as in `plan_job`; the options are valid already.

    Parameters
    ----------
    options
        Options of the plan.
    failed
        Workers that are down.
    fault_free
        Fault-free period and bound from an earlier search, improved unless close; None: unknown.
    progress
        Function that receives lines of progress.
    clock
        Clock of a larger search that this plan is part of; None: a new one.
    """
    require_workers(failed, job)
    clock = clock or options.make_clock()
    (ensure_compiled if isinstance(clock, StepClock) else compile_in_background)(progress)
    began = time.monotonic()
    with _disable_garbage_collection(), defer_interrupts() as stop:
        budget = Budget(
            deadline=clock.now() + options.limit_seconds,
            clock=clock,
            seed=options.seed,
            stop=stop,
            progress=SearchProgress(progress),
        )
        speed = Speed(options.limit_seconds, clock, options.params.blocks)
        reference = ReferenceSearch(options, job, fault_free, budget, speed, _plan_reference)
        # A plan with no worker down is its own reference; else a quick one comes first, so that the
        # period can be judged even if the search takes all the time.
        is_reference = not failed and options.layers == "fixed"
        if not is_reference:
            reference.improve(
                options.params.blocks.reference_share * options.limit_seconds,
                lambda line: progress(f"reference with no worker down: {line}"),
            )
        plan = _plan_with_fallback(options, job, failed, budget, speed)
        plan = msgspec.structs.replace(
            plan, schedule=with_rounded_bound(plan.schedule, options, job, failed)
        )
        is_comparable = is_reference_kind(plan.schedule)
        if is_reference and is_comparable:
            reference.add_schedule(plan.schedule)
        else:
            # If the search ends early, the rest of the time goes to the reference. A plan that is
            # shorter on fewer workers would do without failures, too.
            reference.improve(budget.seconds_left)
            if reference.best and is_comparable:
                reference.best = reference.best.capped_at(plan.period)
        return msgspec.structs.replace(
            plan,
            solve_seconds=time.monotonic() - began,
            interrupted=stop.is_set(),
            fault_free=reference.best,
            tally=budget.tally,
        )


def plan_only(
    options: PlanOptions,
    job: Job,
    failed: Sequence[Worker],
    clock: Clock | None = None,
    solved: list[SolvedPiece] | None = None,
) -> Plan:
    """Plan one schedule, without a fault-free plan for comparison.

    The inner loops are compiled first, if they are not. The search has at least 0.01 s; in the main
    thread, Ctrl-C ends it with the best plan so far. Raises NoPlanError if no schedule is found;
    JobError if layouts are tried and a stage has no layer, or if the limit is too short for the job
    (TooLargeError).

    Parameters
    ----------
    options
        Options of the plan.
    failed
        Workers of the job that are down.
    clock
        Clock of a larger search that this plan is part of; None: a new one.
    solved
        Subproblems that the larger search has solved, to use and add to; None: none.
    """
    ensure_compiled()
    # At least a hundredth of a second: a caller may have less than nothing left.
    clock = clock or options.make_clock()
    began = clock.now()
    with _disable_garbage_collection(), defer_interrupts() as stop:
        budget = Budget(
            deadline=began + max(0.01, options.limit_seconds),
            clock=clock,
            seed=options.seed,
            stop=stop,
            solved=solved,
        )
        plan = _plan_with_fallback(
            options, job, failed, budget, Speed(options.limit_seconds, clock, options.params.blocks)
        )
        return msgspec.structs.replace(
            plan,
            schedule=with_rounded_bound(plan.schedule, options, job, failed),
            solve_seconds=clock.now() - began,
            interrupted=stop.is_set(),
            tally=budget.tally,
        )


def _plan_reference(options: PlanOptions, job: Job, budget: Budget, speed: Speed) -> Schedule:
    """Return the best schedule found within the budget, with no worker down."""
    return _plan_whole_or_blocks(options, job, (), budget, speed, grace=False).schedule


def _plan_with_fallback(
    options: PlanOptions, job: Job, failed: Sequence[Worker], budget: Budget, speed: Speed
) -> Plan:
    """Return the best plan of the search that `options` ask for, and of simpler ones."""
    seconds_given = budget.seconds_left
    # If layers may move, a search limited by the clock begins with a quick one.
    quick_plan = None
    if options.layers == "move" and options.method == "cp-sat" and options.steps is None:
        seconds = options.params.layouts.quick_share * seconds_given
        quick_options = msgspec.structs.replace(options, method="greedy").with_limit(seconds)
        with suppress(TooLargeError, NoPlanError):
            quick_plan = _plan_whole_or_blocks(
                quick_options, job, failed, budget.with_seconds(seconds), speed
            )
            if quick_plan.schedule.status == "optimal":
                return quick_plan
    plan = _plan_whole_or_blocks(options, job, failed, budget, speed)
    if quick_plan is not None and quick_plan.period < plan.period:
        quick = quick_plan.schedule
        fixed_periods = filter(None, (quick_plan.fixed_period, plan.fixed_period))
        # If the quick plan is in place, it is the best one in place itself.
        moved = any(map(quick.has_moved_layers, quick.seats))
        plan = msgspec.structs.replace(
            quick_plan,
            schedule=with_bound_of(quick, plan.schedule),
            fixed_period=min(fixed_periods, default=None) if moved else None,
            end=plan.end,
        )
    # With counted steps, a search with layers in place or, if they were, without cut micro-batches
    # follows, unless its lower bound shows that it finds no shorter plan. So a user who allows more
    # never gets a longer plan.
    cut = options.slices and plan.schedule.scope is Scope.PLACE
    if (
        options.steps is None
        or options.method in BASELINES
        or budget.is_stopped
        or not (options.layers == "move" or cut)
    ):
        return plan
    narrower = msgspec.structs.replace(
        options,
        layers="fixed",
        from_checkpoint=False,
        slices=options.slices and options.layers == "move",
    )
    with suppress(NoPlanError):
        least = bounding_problem(narrower, job, failed)
        if strongest_bound(least).ticks * least.tick_seconds < plan.period:
            # Its steps are counted anew, so that it finds what it finds by itself.
            clock = options.make_clock()
            within = msgspec.structs.replace(budget, clock=clock, deadline=seconds_given)
            narrow_plan = _plan_with_fallback(
                narrower,
                job,
                failed,
                within,
                Speed(options.limit_seconds, clock, options.params.blocks),
            )
            if narrow_plan.period < plan.period:
                return msgspec.structs.replace(
                    narrow_plan, schedule=with_bound_of(narrow_plan.schedule, plan.schedule)
                )
    return plan


def _plan_overlapped(
    options: PlanOptions,
    job: Job,
    failed: Sequence[Worker],
    budget: Budget,
    search: Callable[[PlanOptions, Job, Sequence[Worker], Budget], Plan],
) -> Plan:
    """Return the best plan with overlapping reductions, which are added to plans of `search`."""
    params = options.params.overlap
    share = params.first_share_fixed if options.layers == "fixed" else params.first_share_move
    # First a plan as if reductions took no time, to which they are added.
    at_first = msgspec.structs.replace(
        budget.with_seconds(share * budget.seconds_left),
        progress=budget.progress.of_part("without reductions"),
    )
    plain = search(options, without_reductions(job), failed, at_first)
    # In place, reductions that no compute can hide raise the bound.
    bound = Bound(plain.schedule.lower_bound_ticks, plain.schedule.scope)
    tick = plain.schedule.tick_seconds
    if Scope.PLACE.is_valid_for(bound.scope):
        problem = bounding_problem(options, job, failed)
        bound, tick = strongest_bound(problem), problem.tick_seconds
    began = budget.seconds_left
    best = _add_reductions(plain, job, bound, tick, budget, params)
    # Then one with a part of each reduction; its cuts take as long, which counts no steps.
    cutting = began - budget.seconds_left
    again = best.schedule.status != "optimal" and options.method not in BASELINES
    if again and (not cutting or budget.seconds_left > cutting):
        rest = msgspec.structs.replace(
            budget.with_seconds(budget.seconds_left - cutting),
            progress=budget.progress.of_part(f"with {params.share:.0%} of each reduction"),
        )
        with suppress(NoPlanError):  # in what time is left, it may find none
            plain = search(options, without_reductions(job, params.share), failed, rest)
            second = _add_reductions(plain, job, bound, tick, budget, params)
            best = second if second.period < best.period else best
    return best


def _add_reductions(
    plan_without: Plan,
    job: Job,
    bound: Bound,
    tick_seconds: float,
    budget: Budget,
    params: OverlapParams,
) -> Plan:
    """Return a copy of a plan with the job's overlapping reductions, after a check."""
    schedule = add_overlapping_reductions(
        plan_without.schedule, job, bound, tick_seconds, budget, params
    )
    _require_valid(schedule)
    plan = Plan.from_schedule(
        schedule,
        evidence=plan_without.evidence,
        fixed_period=plan_without.fixed_period,
        end=plan_without.end,
    )
    # The searches reported periods without reductions, or with a part of them.
    budget.progress.report_plan(
        "all reductions added", plan.period, schedule.seconds(schedule.lower_bound_ticks)
    )
    return plan


def _plan_whole_or_blocks(
    options: PlanOptions,
    job: Job,
    failed: Sequence[Worker],
    budget: Budget,
    speed: Speed,
    *,
    grace: bool = True,
) -> Plan:
    """Return the best plan of a job, in blocks of micro-batches if time is short."""
    if has_overlapping_reductions(job):
        return _plan_overlapped(
            options, job, failed, budget, partial(_plan_whole_or_blocks, speed=speed, grace=grace)
        )
    # Problems with layers elsewhere, or with unequal rooms, are searched over layouts alone.
    rooms = job.memory.capacity_of if job.memory else ()
    if options.method in BASELINES and (options.holds or rooms):
        raise NoPlanError(
            f"{options.method} needs equal rooms and layers in place; expected --method cp-sat or "
            "greedy"
        )
    # Beside a problem in place with too little room, layouts that move layers had too little time:
    # of four jobs' plans, two were 4 and 7 % longer.
    if options.holds or (rooms and options.layers == "move"):
        return _solve_and_check(options, job, failed, None, budget)
    try:
        problem = options.make_problem(job, failed)
    except NoPlanError as refusal:
        if options.layers == "move" and options.method not in BASELINES:
            return _solve_and_check(options, job, failed, None, budget)
        if not (
            isinstance(refusal, NoRoomError)
            and options.slices
            and job.layers
            and max(job.layers) > 1
        ):
            raise
        try:  # a micro-batch for which no worker has room at a whole stage may fit if it is cut
            return _solve_and_check(options, job, failed, None, budget)
        except NoPlanError as other:
            raise NoRoomError(refusal.lack, f"; for micro-batches cut by layers, {other}") from None
    # Too many micro-batches for the time are planned in blocks of as many as fit.
    in_place = msgspec.structs.replace(options, layers="fixed", slices=False)

    def plan_block(block: Job, seconds: float) -> Schedule:
        within = msgspec.structs.replace(budget.with_seconds(seconds), progress=SearchProgress())
        return _checked_schedule(
            find_best_candidate(
                in_place.make_problem(block, failed), in_place.method, within, in_place.params
            )
        )

    def ops_of(part: Job) -> int:
        part_problem = problem if part is job else in_place.make_problem(part, failed)
        return sum(piece.problem.operation_count for piece in decompose(part_problem))

    # Jobs whose layers may move, and single list schedules, are planned whole up to a larger size.
    as_a_whole = options.layers == "move" or options.steps == 1
    blocks = None
    if not (as_a_whole and ops_of(job) <= options.params.blocks.largest_moved):
        blocks = choose_blocks(job, ops_of, budget.seconds_left, plan_block, speed, grace=grace)
    if blocks is None:
        return _solve_and_check(options, job, failed, problem, budget)
    size = max(job.microbatches) // blocks.number
    label = f"{blocks.number} blocks of about {size} micro-batches a pipeline"
    budget.progress.report_line(
        f"too many micro-batches to plan at once in this time: planning {label}"
    )
    evidence = (
        f"planned as {label}, each of which fills and drains the pipelines; with more time the "
        "whole iteration is planned at once"
    )
    schedule = plan_in_blocks(job, blocks, strongest_bound(problem), plan_block)
    return Plan.from_schedule(schedule, evidence=evidence)


def _solve_and_check(
    options: PlanOptions,
    job: Job,
    failed: Sequence[Worker],
    problem: Problem | None,
    budget: Budget,
) -> Plan:
    """Return the best plan of `problem` (None: left out) and layouts, after a check."""
    solved = find_best_candidate(
        build_candidates(options, job, failed, problem), options.method, budget, options.params
    )
    return Plan.from_schedule(
        _checked_schedule(solved),
        fixed_period=solved.fixed_period,
        end=solved.end,
        evidence=solved.evidence,
    )


def _checked_schedule(solved: Incumbent) -> Schedule:
    """Return the schedule of a candidate's solved subproblems, after it passed the checker."""
    schedule = solved.make_schedule()
    _require_valid(schedule)
    return schedule


def _require_valid(schedule: Schedule) -> None:
    """Raise AssertionError unless a schedule passes the checker."""
    violations = check(schedule)
    if violations:
        raise AssertionError(f"the planner made a schedule that breaks a rule: {violations[0]}")


@contextmanager
def _disable_garbage_collection() -> Iterator[None]:
    """Return a context without garbage collection, which takes a quarter of a large plan's time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
