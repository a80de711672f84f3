"""From a job and its failures to a checked schedule."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from slipstream.planner.bound import Bound
from slipstream.planner.budget import (
    Budget,
    Clock,
    End,
    ProgressCallback,
    SearchProgress,
    StepClock,
    Tally,
    interruptible,
    quiet,
)
from slipstream.planner.compiled import begin, ready
from slipstream.planner.job.file import Job, require_known
from slipstream.planner.model.assemble import build_schedule
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.decompose import decompose
from slipstream.planner.model.problem import NoPlanError, Problem
from slipstream.planner.options import PlanOptions
from slipstream.planner.overlapped import AT_FIRST, HALF, beside_compute, bounding_problem, overlaps, without_reductions
from slipstream.planner.portfolio import proposed
from slipstream.planner.reference import FaultFree, is_alike, reference_options
from slipstream.planner.repetition import Speed, TooLargeError, blocks_within, repeated
from slipstream.planner.search.engine import Method, Solved, solve
from slipstream.planner.search.list_scheduler import BASELINES
from slipstream.schedules.check import check
from slipstream.schedules.schedule import BackwardMode, OptimizerMode, Schedule, Scope, Worker

FAULT_FREE_SHARE = 0.15
"""Share of the time limit that the fault-free plan, needed for comparison, may take."""

LARGEST_MOVED = 500_000
"""Compute ops up to which a job is never cut into blocks where layers may move: in blocks they could not."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that passed the checker, and how it came about."""

    schedule: Schedule
    fault_free: FaultFree | None = None
    """By the same method with no worker down; None where that was not asked for, or there was no time for it."""
    solve_seconds: float = 0.0
    """Spent on it, by the clock of its search."""
    evidence: str | None = None
    """Where the period is above the bound: which of the two is likely to blame, and why."""
    interrupted: bool = False
    """The search was stopped by Ctrl-C; the schedule is the best one found until then."""
    fixed_period: float | None = None
    """Seconds, of the best plan in which no layers change hands, where they do in this one."""
    tally: Tally | None = None
    """How often each technique was tried for this schedule, and how often it helped."""
    end: End | None = None
    """Why the search ended, where that is known."""

    @property
    def period(self) -> float:
        """Seconds."""
        return self.schedule.seconds(self.schedule.period_ticks)

    @property
    def fault_free_period(self) -> float | None:
        """Seconds, of the best plan found with no worker down."""
        return self.fault_free.period if self.fault_free else None


def plan_job(job: Job, failed: Sequence[Worker] = (), *, backward: BackwardMode | None = None,
             optimizer: OptimizerMode | None = None, method: Method = "cp-sat", time_limit: float = 10.0,
             steps: int | None = None, seed: int = 0, progress: ProgressCallback = quiet) -> Plan:
    """Plan one schedule within about `time_limit` seconds, or within so many steps, in which one seed gives one plan.

    Where the inner loops are not compiled yet, another process compiles them, and this plan is made of list schedules;
    with steps it waits.

    `backward` and `optimizer` are split and staggered unless given; fused and synchronous for 1f1b, which is defined
    so. Raises JobError when a failed worker is not in the job, NoPlanError when no schedule can exist.
    """
    options = PlanOptions(backward=backward, optimizer=optimizer, method=method, time_limit=time_limit, steps=steps,
                          seed=seed)
    return plan_with(options, job, failed, progress=progress)


def plan_with(options: PlanOptions, job: Job, failed: Sequence[Worker] = (), *, known: FaultFree | None = None,
              progress: ProgressCallback = quiet, clock: Clock | None = None) -> Plan:
    """As `plan_job`, by options. `known` is what earlier plans say about the fault-free period.

    `clock`: of a search that this plan is part of.
    """
    require_known(failed, job)
    clock = clock or options.clock()
    (ready if isinstance(clock, StepClock) else begin)(progress)
    began = time.monotonic()
    with _garbage_collection_off(), interruptible() as stop:
        budget = Budget(deadline=clock.now() + options.seconds, clock=clock, seed=options.seed, stop=stop)
        speed = Speed(options.seconds, clock)
        told = msgspec.structs.replace(budget, progress=SearchProgress(progress))
        # Counted steps of the reference are its own, so that no plan depends on what is known of it.
        other = options.clock()
        aside = Budget(deadline=other.now() + FAULT_FREE_SHARE * options.seconds, clock=other, seed=options.seed,
                       stop=stop, progress=SearchProgress(
                           lambda line: progress(f"with no worker down, to compare with: {line}")))
        other_speed = speed if options.steps is None else Speed(options.seconds, other)
        itself = not failed and options.layers == "fixed"
        fault_free = known if itself else _fault_free(options, job, known, aside, other_speed)
        found, why = _search(options, job, failed, told, speed)
        schedule = found.schedule
        alike = is_alike(schedule)
        if itself and alike:
            fault_free = _reference(schedule, options).better(known)
        else:
            # Where the search is over early, the rest of the time goes to the reference.
            rest = msgspec.structs.replace(aside.within(budget.seconds), progress=SearchProgress())
            fault_free = _fault_free(options, job, fault_free, rest, other_speed)
            if fault_free and alike:
                fault_free = fault_free.at_most(schedule.seconds(schedule.period_ticks))
        evidence = None if schedule.status == "optimal" else why() or None
        return msgspec.structs.replace(found, solve_seconds=time.monotonic() - began, interrupted=stop.is_set(),
                                       evidence=evidence, fault_free=fault_free, tally=budget.tally)


def _fault_free(options: PlanOptions, job: Job, known: FaultFree | None, budget: Budget,
                speed: Speed) -> FaultFree | None:
    """What is known of the fault-free period after as much time as it is worth. The grace is for the plan itself."""
    if (known and known.close) or (budget.seconds < 0.0 and known):
        return known
    try:
        schedule = _search(reference_options(options), job, (), budget, speed, grace=False)[0].schedule
        return _reference(schedule, options).better(known)
    except TooLargeError:
        return known


def _reference(schedule: Schedule, options: PlanOptions) -> FaultFree:
    """Of a plan with no worker down. What others run is what it is: there is no better one by the same method."""
    period = schedule.seconds(schedule.period_ticks)
    bound = period if options.method in BASELINES else schedule.seconds(schedule.lower_bound_ticks)
    return FaultFree(period=period, bound=bound)


def plan_only(options: PlanOptions, job: Job, failed: Sequence[Worker], clock: Clock | None = None) -> Plan:
    """One schedule, without a fault-free one to compare it with. `clock`: of a search that it is part of.

    Raises NoPlanError.
    """
    ready()
    clock = clock or options.clock()
    began = clock.now()
    with _garbage_collection_off(), interruptible() as stop:
        budget = Budget(deadline=began + max(0.01, options.seconds), clock=clock, seed=options.seed, stop=stop)
        found, _ = _search(options, job, failed, budget, Speed(options.seconds, clock))
        return msgspec.structs.replace(found, solve_seconds=clock.now() - began, interrupted=stop.is_set(),
                                       tally=budget.tally)


Found = tuple[Plan, Callable[[], str]]
"""A plan by itself, and what tells of its gap: few ask."""


def _overlapped(options: PlanOptions, job: Job, failed: Sequence[Worker], budget: Budget,
                search: Callable[[PlanOptions, Job, Sequence[Worker], Budget], Found]) -> Found:
    """The best schedule whose reductions overlap compute. Micro-batches are cut for them: of bounds only those hold
    that allow it, and count no reductions."""
    at_first = budget.within(AT_FIRST[options.layers] * budget.seconds)
    found, why = search(options, without_reductions(job), failed, at_first)
    bound, tick = Bound(found.schedule.lower_bound_ticks, found.schedule.scope), found.schedule.tick_seconds
    if Scope.PLACE.holds_for(bound.scope):
        problem = bounding_problem(options, job, failed)
        bound, tick = strongest_bound(problem), problem.tick_seconds
    best = msgspec.structs.replace(found, schedule=beside_compute(found.schedule, job, bound, tick))
    if best.schedule.status != "optimal" and options.method not in BASELINES:
        found, other = search(options, without_reductions(job, HALF), failed, budget)
        made = msgspec.structs.replace(found, schedule=beside_compute(found.schedule, job, bound, tick))
        if made.period < best.period:
            return made, other
    return best, why


def _search(options: PlanOptions, job: Job, failed: Sequence[Worker], budget: Budget, speed: Speed, *,
            grace: bool = True) -> Found:
    """The best schedule of a job within the budget; where that is too little for the whole job, of its blocks."""
    if overlaps(job):
        return _overlapped(options, job, failed, budget, partial(_search, speed=speed, grace=grace))
    rooms = job.memory.capacity_of if job.memory else ()
    if options.method in BASELINES and (options.holds or rooms):
        raise NoPlanError(f"{options.method} takes all workers to have the same room; expected --method cp-sat or "
                          "greedy")
    # Beside a problem in place with too little room, layouts that move layers had too little time: of four jobs' plans,
    # two were 4 and 7 % longer.
    if options.holds or (rooms and options.layers == "move"):
        return _answered(options, job, failed, None, budget)
    try:
        problem = options.problem(job, failed)
    except NoPlanError:
        if options.layers != "move":
            raise
        return _answered(options, job, failed, None, budget)
    in_place = msgspec.structs.replace(options, layers="fixed", slices=False)

    def plan_block(block: Job, seconds: float) -> Schedule:
        within = msgspec.structs.replace(budget.within(seconds), progress=SearchProgress())
        return _checked(solve(in_place.problem(block, failed), in_place.method, within, in_place.params))

    def ops_of(part: Job) -> int:
        given = problem if part is job else in_place.problem(part, failed)
        return sum(piece.problem.operations for piece in decompose(given))

    whole = options.layers == "move" and ops_of(job) <= LARGEST_MOVED
    blocks = None if whole else blocks_within(job, ops_of, budget.seconds, plan_block, speed, grace=grace)
    if blocks is None:
        return _answered(options, job, failed, problem, budget)
    said = f"{blocks.number} blocks of about {max(job.microbatches) // blocks.number} micro-batches a pipeline"
    budget.progress.line(f"too many micro-batches to plan at once in this time: planning {said}")
    schedule = repeated(job, blocks, strongest_bound(problem), plan_block)
    return Plan(schedule=schedule), (lambda: f"planned as {said}, each of which fills and drains the pipelines; with "
                                     "more time the whole iteration is planned at once")


def _answered(options: PlanOptions, job: Job, failed: Sequence[Worker], problem: Problem | None,
              budget: Budget) -> Found:
    """The best schedule of whatever answers these failures."""
    solved = solve(proposed(options, job, failed, problem), options.method, budget, options.params)
    return Plan(schedule=_checked(solved), fixed_period=solved.fixed_period, end=solved.end), solved.evidence


def _checked(solved: Solved) -> Schedule:
    """The schedule of what was solved. That it passes the checker is made sure."""
    schedule = build_schedule(solved.problem, solved.pieces, bound=solved.bound, method=solved.ran,
                              deadlines=solved.deadlines)
    violations = check(schedule)
    if violations:
        raise AssertionError(f"the planner made a schedule that breaks a rule: {violations[0]}")
    return schedule


@contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """A large plan is millions of small objects without a cycle; looking for one takes a quarter of the time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
