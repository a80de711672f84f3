"""Plan a checked schedule for a job and its failed workers.

`planner.search.engine` finds the best of the candidates (`planner.candidates`). If there is not
enough time for the whole job, `planner.blockwise` plans a part of it. `planner.reference` finds the
fault-free period to compare with.
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
    """A schedule that passed the checker, and how it was found."""

    schedule: Schedule
    fault_free: FaultFree | None = None
    """Period and bound with no worker down; None if not requested or without time."""
    solve_seconds: float = 0.0
    """Seconds spent on the plan, on the clock of its search."""
    evidence: str | None = None
    """Words that explain a period above the bound; None if optimal."""
    interrupted: bool = False
    """True if Ctrl-C stopped the search; the schedule is the best one found until then."""
    fixed_period: float | None = None
    """Period in seconds of the best plan without moved layers; set if layers move."""
    tally: Tally | None = None
    """Counts of how often each search technique was tried, and how often it helped."""
    end: SearchEnd | None = None
    """Reason why the search ended, if known."""

    @classmethod
    def from_schedule(cls, schedule: Schedule, *, evidence: str | None, **others: Any) -> "Plan":
        """Return a plan of this schedule, with more fields in `others`.

        The words `evidence`, which say why its period is above the bound, are dropped if it is
        optimal.
        """
        return cls(schedule=schedule, evidence=None if schedule.status == "optimal" else evidence, **others)

    def __repr__(self) -> str:
        """Return one line about the plan without the ops of its schedule."""
        return f"Plan({self.schedule!r})"

    @property
    def period(self) -> float:
        """Period of the schedule in seconds."""
        return self.schedule.seconds(self.schedule.period_ticks)

    @property
    def fault_free_period(self) -> float | None:
        """Period in seconds of the best plan found with no worker down."""
        return self.fault_free.period if self.fault_free else None


def plan_job(job: Job, failed: Sequence[Worker] = (), *, backward: BackwardMode | None = None,
             optimizer: OptimizerMode | None = None, method: Method = "cp-sat", time_limit: float = 10.0,
             steps: int | None = None, seed: int = 0, progress: ProgressCallback = ignore_progress) -> Plan:
    """Plan a schedule for a job with failed workers.

    The search takes about `time_limit` seconds, or `steps` counted steps, with which one seed gives
    one plan. If the inner loops are not compiled yet, another process compiles them, and this plan
    is made of list schedules; with steps, this call waits for it.

    The `method` is "cp-sat" (the whole search), "greedy" (list schedules alone), or "1f1b" or
    "recycle" for comparison. By default `backward` is split and `optimizer` staggered; for 1f1b
    they are fused and synchronous, as it is defined. Raises JobError if a failed worker is not in
    the job, NoPlanError if no schedule can exist.
    """
    options = PlanOptions(backward=backward, optimizer=optimizer, method=method, time_limit=time_limit, steps=steps,
                          seed=seed)
    return plan_with(options, job, failed, progress=progress)


def plan_with(options: PlanOptions, job: Job, failed: Sequence[Worker] = (), *, known: FaultFree | None = None,
              progress: ProgressCallback = ignore_progress, clock: Clock | None = None) -> Plan:
    """Plan a schedule for a job with failed workers, and its fault-free period.

    If an earlier search has found a fault-free period and bound, `known`, less is searched. If this
    plan is part of a larger search, `clock` is that of the search. Raises as `plan_job` does.
    """
    require_workers(failed, job)
    clock = clock or options.make_clock()
    (ensure_compiled if isinstance(clock, StepClock) else compile_in_background)(progress)
    began = time.monotonic()
    with _disable_garbage_collection(), defer_interrupts() as stop:
        budget = Budget(deadline=clock.now() + options.limit_seconds, clock=clock, seed=options.seed, stop=stop,
                        progress=SearchProgress(progress))
        speed = Speed(options.limit_seconds, clock, options.params.blocks)
        reference = ReferenceSearch(options, job, known, budget, speed, _plan_reference)
        is_reference = not failed and options.layers == "fixed"
        if not is_reference:
            reference.improve(options.params.blocks.reference_share * options.limit_seconds,
                              lambda line: progress(f"reference with no worker down: {line}"))
        plan = _plan_with_fallback(options, job, failed, budget, speed)
        plan = msgspec.structs.replace(plan, schedule=with_rounded_bound(plan.schedule, options, job, failed))
        is_comparable = is_reference_kind(plan.schedule)
        if is_reference and is_comparable:
            reference.add_schedule(plan.schedule)
        else:
            # If the search ends early, the rest of the time goes to the reference.
            reference.improve(budget.seconds_left)
            if reference.best and is_comparable:
                reference.best = reference.best.capped_at(plan.period)
        return msgspec.structs.replace(plan, solve_seconds=time.monotonic() - began, interrupted=stop.is_set(),
                                       fault_free=reference.best, tally=budget.tally)


def plan_only(options: PlanOptions, job: Job, failed: Sequence[Worker], clock: Clock | None = None,
              solved: list[SolvedPiece] | None = None) -> Plan:
    """Plan one schedule, without a fault-free plan for comparison.

    As part of a larger search, it takes that search's `clock`, and `solved`, the subproblems solved
    so far, to which its own are added. Raises NoPlanError if no schedule can exist.
    """
    ensure_compiled()
    clock = clock or options.make_clock()
    began = clock.now()
    with _disable_garbage_collection(), defer_interrupts() as stop:
        budget = Budget(deadline=began + max(0.01, options.limit_seconds), clock=clock, seed=options.seed, stop=stop,
                        solved=solved)
        plan = _plan_with_fallback(options, job, failed, budget,
                                   Speed(options.limit_seconds, clock, options.params.blocks))
        return msgspec.structs.replace(plan, schedule=with_rounded_bound(plan.schedule, options, job, failed),
                                       solve_seconds=clock.now() - began, interrupted=stop.is_set(),
                                       tally=budget.tally)


def _plan_reference(options: PlanOptions, job: Job, budget: Budget, speed: Speed) -> Schedule:
    """Return the best schedule with no worker down; `grace` is left to the plan itself."""
    return _plan_whole_or_blocks(options, job, (), budget, speed, grace=False).schedule


def _plan_with_fallback(options: PlanOptions, job: Job, failed: Sequence[Worker], budget: Budget, speed: Speed) -> Plan:
    """Return the best plan within the budget, never longer than that of simpler searches.

    If layers may move, a cp-sat search limited by the clock begins with a quick one by list
    schedules alone. With counted steps, a second search follows, with layers in place or, if they
    were, without cut micro-batches, unless its lower bound shows that it finds no shorter plan.
    """
    seconds_given = budget.seconds_left
    quick_plan = None
    if options.layers == "move" and options.method == "cp-sat" and options.steps is None:
        seconds = options.params.layouts.quick_share * seconds_given
        quick_options = msgspec.structs.replace(options, method="greedy").with_limit(seconds)
        with suppress(TooLargeError, NoPlanError):
            quick_plan = _plan_whole_or_blocks(quick_options, job, failed, budget.with_seconds(seconds), speed)
            if quick_plan.schedule.status == "optimal":
                return quick_plan
    plan = _plan_whole_or_blocks(options, job, failed, budget, speed)
    if quick_plan is not None and quick_plan.period < plan.period:
        plan = msgspec.structs.replace(quick_plan, schedule=with_bound_of(quick_plan.schedule, plan.schedule),
                                       fixed_period=min(filter(None, (quick_plan.fixed_period, plan.fixed_period)),
                                                        default=None), end=plan.end)
    cut = options.slices and plan.schedule.scope is Scope.PLACE
    if options.steps is None or options.method in BASELINES or budget.is_stopped \
            or not (options.layers == "move" or cut):
        return plan
    narrower = msgspec.structs.replace(options, layers="fixed", from_checkpoint=False,
                                       slices=options.slices and options.layers == "move")
    with suppress(NoPlanError):
        least = bounding_problem(narrower, job, failed)
        if strongest_bound(least).ticks * least.tick_seconds < plan.period:
            clock = options.make_clock()
            within = msgspec.structs.replace(budget, clock=clock, deadline=seconds_given)
            narrow_plan = _plan_with_fallback(narrower, job, failed, within,
                                              Speed(options.limit_seconds, clock, options.params.blocks))
            if narrow_plan.period < plan.period:
                return msgspec.structs.replace(narrow_plan,
                                               schedule=with_bound_of(narrow_plan.schedule, plan.schedule))
    return plan


def _plan_overlapped(options: PlanOptions, job: Job, failed: Sequence[Worker], budget: Budget,
                     search: Callable[[PlanOptions, Job, Sequence[Worker], Budget], Plan]) -> Plan:
    """Return the best plan with overlapping reductions, from plans of `search` without any."""
    params = options.params.overlap
    share = params.first_share_fixed if options.layers == "fixed" else params.first_share_move
    at_first = msgspec.structs.replace(budget.with_seconds(share * budget.seconds_left),
                                       progress=budget.progress.of_part("without reductions"))
    plain = search(options, without_reductions(job), failed, at_first)
    bound, tick = Bound(plain.schedule.lower_bound_ticks, plain.schedule.scope), plain.schedule.tick_seconds
    if Scope.PLACE.is_valid_for(bound.scope):
        problem = bounding_problem(options, job, failed)
        bound, tick = strongest_bound(problem), problem.tick_seconds
    began = budget.seconds_left
    best = _add_reductions(plain, job, bound, tick, budget, params)
    cutting = began - budget.seconds_left  # the cuts of the next plan take as long; this counts no steps
    again = best.schedule.status != "optimal" and options.method not in BASELINES
    if again and (not cutting or budget.seconds_left > cutting):
        rest = msgspec.structs.replace(
            budget.with_seconds(budget.seconds_left - cutting),
            progress=budget.progress.of_part(f"with {params.share:.0%} of each reduction"))
        plain = search(options, without_reductions(job, params.share), failed, rest)
        second = _add_reductions(plain, job, bound, tick, budget, params)
        best = second if second.period < best.period else best
    return best


def _add_reductions(found: Plan, job: Job, bound: Bound, tick_seconds: float, budget: Budget,
                    params: OverlapParams) -> Plan:
    """Return a copy of a plan with the job's overlapping reductions."""
    schedule = add_overlapping_reductions(found.schedule, job, bound, tick_seconds, budget, params)
    plan = Plan.from_schedule(schedule, evidence=found.evidence, fixed_period=found.fixed_period, end=found.end)
    # What the searches told had no reductions, or a part of them.
    budget.progress.report_plan("all reductions added", plan.period, schedule.seconds(schedule.lower_bound_ticks))
    return plan


def _plan_whole_or_blocks(options: PlanOptions, job: Job, failed: Sequence[Worker], budget: Budget, speed: Speed, *,
                          grace: bool = True) -> Plan:
    """Return the best plan of a job, in blocks if time is short."""
    if has_overlapping_reductions(job):
        return _plan_overlapped(options, job, failed, budget, partial(_plan_whole_or_blocks, speed=speed, grace=grace))
    rooms = job.memory.capacity_of if job.memory else ()
    if options.method in BASELINES and (options.holds or rooms):
        raise NoPlanError(f"{options.method} needs equal rooms and layers in place; expected --method cp-sat or "
                          "greedy")
    # Beside a problem in place with too little room, layouts that move layers had too little time: of four jobs' plans,
    # two were 4 and 7 % longer.
    if options.holds or (rooms and options.layers == "move"):
        return _solve_and_check(options, job, failed, None, budget)
    try:
        problem = options.make_problem(job, failed)
    except NoPlanError as refusal:
        if options.layers == "move" and options.method not in BASELINES:
            return _solve_and_check(options, job, failed, None, budget)
        if not (isinstance(refusal, NoRoomError) and options.slices and job.layers and max(job.layers) > 1):
            raise
        try:  # a micro-batch for which no worker has room at a whole stage may fit if it is cut
            return _solve_and_check(options, job, failed, None, budget)
        except NoPlanError as other:
            raise NoRoomError(refusal.lack, f"; for micro-batches cut by layers, {other}") from None
    in_place = msgspec.structs.replace(options, layers="fixed", slices=False)

    def plan_block(block: Job, seconds: float) -> Schedule:
        within = msgspec.structs.replace(budget.with_seconds(seconds), progress=SearchProgress())
        return _checked_schedule(find_best_candidate(in_place.make_problem(block, failed), in_place.method, within,
                                                     in_place.params))

    def ops_of(part: Job) -> int:
        part_problem = problem if part is job else in_place.make_problem(part, failed)
        return sum(piece.problem.operation_count for piece in decompose(part_problem))

    whole = (options.layers == "move" or options.steps == 1) and ops_of(job) <= options.params.blocks.largest_moved
    blocks = None if whole else choose_blocks(job, ops_of, budget.seconds_left, plan_block, speed, grace=grace)
    if blocks is None:
        return _solve_and_check(options, job, failed, problem, budget)
    label = f"{blocks.number} blocks of about {max(job.microbatches) // blocks.number} micro-batches a pipeline"
    budget.progress.report_line(f"too many micro-batches to plan at once in this time: planning {label}")
    why = f"planned as {label}, each of which fills and drains the pipelines; with more time the whole iteration is " \
          "planned at once"
    return Plan.from_schedule(plan_in_blocks(job, blocks, strongest_bound(problem), plan_block), evidence=why)


def _solve_and_check(options: PlanOptions, job: Job, failed: Sequence[Worker], problem: Problem | None,
                     budget: Budget) -> Plan:
    """Return the best plan over all candidates (problem in place, layouts) for these failures,
    checked."""
    solved = find_best_candidate(build_candidates(options, job, failed, problem), options.method, budget,
                                 options.params)
    return Plan.from_schedule(_checked_schedule(solved), fixed_period=solved.fixed_period, end=solved.end,
                              evidence=solved.evidence)


def _checked_schedule(solved: Incumbent) -> Schedule:
    """Return the schedule of a candidate's solutions, checked."""
    schedule = solved.make_schedule()
    violations = check(schedule)
    if violations:
        raise AssertionError(f"the planner made a schedule that breaks a rule: {violations[0]}")
    return schedule


@contextmanager
def _disable_garbage_collection() -> Iterator[None]:
    """Return a context without garbage collection, a quarter of a large plan's time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
