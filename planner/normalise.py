"""Choose the roles that stay vacant where they cost least, and move workers.

A live worker may take over another role when it has loaded that stage's parameters from a peer. So
only the number F of failures is given; which F roles are vacant is a choice. It is made in three
steps:

  1. how many roles are vacant in each column: dynamic programming over columns, on the proven bound
     of the window of a column with this number of vacant roles, for the best few distributions
     (`WindowBounds`);
  2. which pipelines they belong to: the same or different ones (`arrange_vacancies`);
  3. plans of the best few candidates decide. On small grids every pattern is a candidate.

The result, the *normal form*, depends on the number of failures alone. `schedules.tables.relabel`
then chooses which worker plays which role, so that the fewest layers are loaded. In it, slow
workers and those with a memory of their own keep their roles; `planner.exchange` tries others.

The idea, failure normalisation by dynamic programming, is that of ReCycle (SOSP 2024, arXiv
2405.14009).
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

import msgspec

from slipstream.planner.blockwise import TooLargeError
from slipstream.planner.bounding import role_bounds
from slipstream.planner.budget import Clock, ProgressCallback, StepClock, ignore_progress
from slipstream.planner.comparison import Round, plan_in_rounds
from slipstream.planner.compiled import compile_in_background, ensure_compiled
from slipstream.planner.exchange import exchange_roles, unlike_workers
from slipstream.planner.job.file import Job
from slipstream.planner.model.assemble import with_converted_bound
from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Bound, NoPlanError, NoRoomError, Problem
from slipstream.planner.options import PlanOptions
from slipstream.planner.overlapped import bounding_problem
from slipstream.planner.params import DEFAULTS, RoleParams
from slipstream.planner.plan import Plan, plan_only, plan_with
from slipstream.planner.reference import FaultFree
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Schedule, Scope, Worker
from slipstream.schedules.tables.pattern import (
    Pattern,
    dead_column,
    failure_patterns,
    pattern_of,
    pipeline_classes,
    representative_failures,
)
from slipstream.schedules.tables.relabel import relabel_schedule

Counts = tuple[int, ...]
"""Number of vacant roles in each column."""
RankedDistribution = tuple[int, int, int, Counts]
"""Distribution of failures over columns, after the values that rank it; less is better.

It is (ticks of the longest busy window, sum of the columns' windows, sum of squared counts, vacant
roles per column).
"""

ProblemOf = Callable[[Sequence[Worker]], Problem]


class WindowBounds:
    """Lower bounds on the period by column and its vacant roles, and the best distributions.

    Results are stored, so that one object serves all numbers of failures of a job. They are a
    function of the problems and the number of failures alone, whatever was computed before.

    They rank distributions, among which the search chooses: there, slow workers and those with a
    memory of their own keep their roles. What is claimed of a plan is `bounds_roles.roles_bound`. A
    plan for some failures is also one for fewer, in which live workers stay idle; so the failures
    of one column alone give a bound. It counts the micro-batches of all pipelines and the live
    workers of that column, but not which pipelines the failures are in.
    """

    def __init__(self, problem_of: ProblemOf, params: RoleParams = DEFAULTS.roles) -> None:
        """Build the problem without failures, by `problem_of`.

        It takes the workers that are down and returns the problem in which any live holder of a
        stage may run any micro-batch.
        """
        self._problem_of, self._kept = problem_of, params.distributions
        whole = problem_of(())
        self.grid, self.tick_seconds = whole.grid, whole.tick_seconds
        self.slow = {worker for worker, live in whole.workers.items() if live.per_mille != 1000}
        """Slow workers, which are alive and therefore never leave their roles."""
        self._bound: dict[tuple[int, int], int] = {}
        self._best: dict[int, list[RankedDistribution]] = {}

    def column_bound(self, column: int, down: int) -> int:
        """Return a proven bound, in ticks, with at least `down` vacant roles in a column."""
        if down == 0:
            column = 0  # the same plan, whatever the column
        if (column, down) not in self._bound:
            self._bound[column, down] = self.column_bound(column, down - 1) if down else 0
            with suppress(NoPlanError):  # others may have room, if these roles stay vacant
                problem = self._problem_of(self.possible_vacancies(column)[:down])
                self._bound[column, down] = max(self._bound[column, down], lower_bound(problem))
        return self._bound[column, down]

    def to_seconds(self, ticks: int) -> float:
        """Convert a bound's ticks to seconds, rounded up a little for comparisons."""
        return ticks * self.tick_seconds * (1 + 1e-12)

    def possible_vacancies(self, column: int) -> list[Worker]:
        """Return the roles of a column that may be vacant: not those of slow workers."""
        return [role for pipeline in range(self.grid.pipelines)
                if (role := Worker(pipeline, column)) not in self.slow]

    def max_vacancies(self, column: int) -> int:
        """Return the most vacant roles of a column; with two directions, another has its layers."""
        return min(self.grid.pipelines - int(self.grid.chains == 1), len(self.possible_vacancies(column)))

    def best_distributions(self, failures: int) -> list[RankedDistribution]:
        """Return the best few distributions of failures over columns, best first.

        The first has the shortest longest busy window.

        With best[c][f] those of f failures over columns 0 to c, of which column c has k, and w =
        column_bound(c, k):

            best[c][f] = the smallest few (`RoleParams.distributions`) of
                { (max(longest, w), sum + w, squares + k k, counts + (k,)) :
                  k <= f, (longest, sum, squares, counts) in best[c - 1][f - k] }

        The first is exact; the others are near-best alternatives. Among equal windows, even
        distributions come first, then those with failures in later columns, whose workers wait
        less.
        """
        if failures not in self._best:
            self._best[failures] = self._rank_distributions(failures)
        return self._best[failures]

    def _rank_distributions(self, failures: int) -> list[RankedDistribution]:
        """Compute the best distributions by the recursion of `best_distributions`.

        Only counts are considered that leave no more failures than the later columns can take.
        """
        useful = self._useful_counts(failures)
        best: dict[int, list[RankedDistribution]] = {0: [(0, 0, 0, ())]}
        for column, most in enumerate(useful):
            windows = [self.column_bound(column, down) for down in range(most + 1)]
            least = max(0, failures - sum(useful[column + 1:]))
            best = {count: sorted((max(longest, window), total + window, squares + down * down, (*counts, down))
                                  for down, window in enumerate(windows[:count + 1])
                                  for longest, total, squares, counts in best.get(count - down, ()))[:self._kept]
                    for count in range(least, min(failures, sum(useful[:column + 1])) + 1)}
        return best.get(failures, [])

    def _useful_counts(self, failures: int) -> list[int]:
        """Return, for each column, the largest number of vacant roles to consider.

        Windows grow with the number of vacant roles. So the longest window is the shortest possible
        if each failure in turn goes to the column whose window is then the shortest. One more role
        of each column gives a choice.
        """
        down = [0] * self.grid.columns
        for _ in range(failures):
            free = [column for column in range(self.grid.columns) if down[column] < self.max_vacancies(column)]
            if not free:
                break
            down[min(free,
                     key=lambda column: (self.column_bound(column, down[column] + 1), down[column], -column))] += 1
        return [min(count + 1, self.max_vacancies(column)) for column, count in enumerate(down)]


def window_bounds_of(job: Job, options: PlanOptions) -> WindowBounds:
    """Return the bounds by column for a job's plans, with whole or cut micro-batches."""
    # picklable: sent to other processes
    return WindowBounds(partial(bounding_problem, options, job), options.params.roles)


def arrange_vacancies(job: Job, windows: WindowBounds, counts: Counts) -> Iterator[tuple[Worker, ...]]:
    """Iterate over sets of vacant roles, `counts[column]` of each column.

    They are in the same pipelines, which disturbs fewer and is better more often, or in different
    ones; both begin with the pipelines with the fewest micro-batches, or with the most. The bounds
    `windows` say which roles may be vacant.
    """
    ascending = sorted(range(job.pipelines), key=lambda pipeline: job.microbatches[pipeline])
    for order in (ascending, ascending[::-1]):
        for spread in (False, True):
            position, vacant = 0, list[Worker]()
            for column, count in enumerate(counts):
                allowed = {role.pipeline for role in windows.possible_vacancies(column)}
                turn = order[position % job.pipelines:] + order[:position % job.pipelines] if spread else order
                vacant += [Worker(pipeline, column) for pipeline in turn if pipeline in allowed][:count]
                position += count
            yield tuple(sorted(vacant))


def candidate_vacancies(job: Job, windows: WindowBounds, failures: int,
                        params: RoleParams = DEFAULTS.roles) -> list[tuple[Worker, ...]]:
    """Return sets of vacant roles worth planning, best first, one of each equal pattern."""
    problem = build_problem(job)
    grid, classes = problem.grid, pipeline_classes(problem.grid, problem.times, problem.memory)
    by_pattern: dict[Pattern, tuple[Worker, ...]] = {}
    for *_, counts in windows.best_distributions(failures):
        for vacant in arrange_vacancies(job, windows, counts):
            by_pattern.setdefault(pattern_of(vacant, classes), vacant)
    for pattern in _few_patterns(failures, job.stages, classes, params.exhaustive):
        vacant = representative_failures(pattern, classes)
        if dead_column(vacant, grid) is None and not windows.slow & set(vacant):
            by_pattern.setdefault(pattern, vacant)
    return list(by_pattern.values())


def _few_patterns(failures: int, columns: int, classes: Sequence[int], most: int) -> list[Pattern]:
    """Return all patterns of `failures` failed workers if at most `most`, else none."""
    if failures > most or math.comb(columns, min(failures, columns // 2)) > most:
        return []
    few = list(islice(failure_patterns(failures, columns, classes), most + 1))
    return few if len(few) <= most else []


def normal_form(job: Job, failures: int, options: PlanOptions, *, windows: WindowBounds | None = None,
                progress: ProgressCallback = ignore_progress, clock: Clock | None = None) -> Plan:
    """Return the best plan for this number of failures over all choices of vacant roles.

    The result depends on job, number and options alone. The vacant roles are the `failed` of the
    plan's schedule, in which every worker plays its own role. The lower bounds by column,
    `windows`, are those of the same job and options, passed to avoid computing them again; `clock`
    is that of a search that this one is part of. Raises NoPlanError if so many failures leave some
    stage without a live worker, however roles are assigned.
    """
    clock = clock or options.make_clock()
    if failures == 0:
        return plan_only(options, job, (), clock)
    windows = windows or window_bounds_of(job, options)
    if not windows.best_distributions(failures):
        most = sum(windows.max_vacancies(column) for column in range(job.stages))
        raise NoPlanError(f"{failures} failures leave some stage without a live worker, however roles are assigned: "
                          f"the job can lose {most} of its {job.pipelines * job.stages} workers")
    ensure_compiled(progress)
    deadline = clock.now() + options.limit_seconds
    best = _best_candidate(job, windows, failures, options, progress, clock)
    seconds_left = deadline - clock.now()
    if best.interrupted or best.schedule.status == "optimal" or seconds_left < best.solve_seconds:
        return best
    final = plan_only(options.with_limit(seconds_left), job, best.schedule.failed, clock)
    better = final.period <= best.period
    return msgspec.structs.replace(final if better else best, interrupted=final.interrupted)


def _best_candidate(job: Job, windows: WindowBounds, failures: int, options: PlanOptions,
                    progress: ProgressCallback, clock: Clock) -> Plan:
    """Return the shortest of plans for several sets of vacant roles; the first of equals."""
    params = options.params.roles
    seconds = params.compared * options.limit_seconds
    refusals, shortest = list[NoPlanError](), math.inf

    def plan_vacancies(vacant: tuple[Worker, ...], within: PlanOptions) -> Plan | None:
        nonlocal shortest
        try:
            plan = plan_only(within, job, vacant, clock)
        except TooLargeError:  # for this share of the time
            if shortest < math.inf:
                return None
            plan = plan_only(options, job, vacant, clock)
        except NoPlanError as refusal:  # others may have room
            refusals.append(refusal)
            return None
        if plan.period < shortest:
            shortest = plan.period
            progress(_describe_plan(plan.schedule))
        return plan

    candidates = candidate_vacancies(job, windows, failures, params)
    rounds = [Round(options.for_comparison, seconds)] * (2 if len(candidates) > params.finalists else 1)
    best = plan_in_rounds(candidates, rounds, plan_vacancies, clock, finalists=params.finalists,
                          floor=windows.to_seconds(windows.best_distributions(failures)[0][0]),
                          deadline=clock.now() + 2 * seconds)
    if best is None:
        raise refusals[0]
    return best


def _describe_plan(schedule: Schedule) -> str:
    down = [sum(role.column == column for role in schedule.failed) for column in range(schedule.grid.columns)]
    broken = len({role.pipeline for role in schedule.failed})
    return f"{'+'.join(map(str, down))} roles without a worker by stage, in {broken} pipeline" \
           f"{'' if broken == 1 else 's'}: period {schedule.seconds(schedule.period_ticks):g} s"


def normalised(job: Job, failed: Sequence[Worker], options: PlanOptions, *, known: FaultFree | None = None,
               progress: ProgressCallback = ignore_progress, clock: Clock | None = None) -> Plan:
    """Return the best plan for these failed workers, with other roles if they shorten it.

    Moved roles, a special case of moved layers, are tried even if layers may move. Whether layers
    may move or not, the plan is never longer than with roles in place. What an earlier search has
    found of the fault-free period may be passed as `known`. Raises JobError for unknown workers,
    NoPlanError if no plan is found, in place or moved.
    """
    clock = clock or options.make_clock()
    (ensure_compiled if isinstance(clock, StepClock) else compile_in_background)(progress)
    began = time.monotonic()
    params = options.params.roles
    share = params.share if options.layers == "fixed" else params.share_of_layers
    roles = options.limit_seconds * share if failed else 0.0
    # Counted steps of the plan with roles in place are its own, so that it is never longer with them moved.
    first = options if options.steps is not None else options.with_limit(options.limit_seconds - roles)
    best, refusals = None, list[str]()
    try:
        best = plan_with(first, job, failed, known=known, progress=progress, clock=clock)
    except NoPlanError as error:  # roles that a live worker has no room for may be played by another
        if not failed:
            raise
        refusals.append(str(error))
    in_place = msgspec.structs.replace(options.with_limit(roles), layers="fixed")
    try:
        if failed and not (best and best.interrupted):
            best = _improve_with_roles(best, job, failed, in_place, moving=options.layers == "move", progress=progress,
                                       clock=clock)
    except NoPlanError as error:
        refusals.append(str(error))
    if best is None:
        raise NoPlanError("; with roles moved: ".join(dict.fromkeys(refusals)))
    return msgspec.structs.replace(best, solve_seconds=time.monotonic() - began)


def plan_moved_roles(job: Job, failed: Sequence[Worker], options: PlanOptions) -> Plan:
    """Return the best plan found in which live workers may take other roles.

    It is not compared with a plan in place. Raises NoPlanError if none is found.
    """
    ensure_compiled()
    found = _improve_with_roles(None, job, failed, options, moving=False, progress=ignore_progress,
                                clock=options.make_clock())
    if found is None:
        raise NoPlanError(f"no live worker can take over the roles of {', '.join(map(str, failed))}")
    return found


def _improve_with_roles(best: Plan | None, job: Job, failed: Sequence[Worker], options: PlanOptions, *, moving: bool,
                        progress: ProgressCallback, clock: Clock) -> Plan | None:
    """Return the shorter of `best` and a plan in which live workers take other roles.

    None if neither exists. With `moving`, layers may move in `best`, too. Otherwise the bound of
    the result also holds for plans with moved roles.
    """
    job = _with_usual_rooms(slow_while_alive(job, failed), failed)
    try:
        windows, bounds = window_bounds_of(job, options), role_bounds(job, failed, options)
    except NoRoomError:  # in their own roles; bounds for more room hold for less
        roomy = _with_usual_rooms(job, unlike_workers(job, failed))
        windows, bounds = window_bounds_of(roomy, options), role_bounds(roomy, failed, options)
    least, tick_seconds = bounds.best_bound(), windows.tick_seconds
    if best is not None:
        own = best.schedule
        if not moving:
            best = msgspec.structs.replace(best, schedule=with_converted_bound(own, least, tick_seconds))
            if best.schedule.status == "optimal":
                return best
        elif own.scope is Scope.LAYERS:
            if own.status == "optimal":
                return best
            least, tick_seconds = Bound(own.lower_bound_ticks, own.scope), own.tick_seconds
    unlike = bool(unlike_workers(job, failed))
    half = options.with_limit(options.limit_seconds / 2) if unlike and options.steps is None else options
    interrupted = False
    try:
        normal = normal_form(job, len(set(failed)), half, windows=windows, progress=progress, clock=clock)
        schedule = relabel_schedule(normal.schedule, failed, held_elsewhere=options.from_checkpoint, nodes=job.nodes)
        if schedule is not None:
            best = _shorter_plan(best, normal, with_converted_bound(schedule, least, tick_seconds))
        interrupted = normal.interrupted
    except NoPlanError:  # workers with a room of their own keep their roles in it; other roles may suit them
        if not unlike:
            raise
    if unlike and not interrupted and (best is None or best.schedule.status != "optimal"):
        found = exchange_roles(job, failed, half, bounds, clock, windows.to_seconds(bounds.best_bound().ticks))
        if found is not None:
            best = _shorter_plan(best, found, with_converted_bound(found.schedule, least, tick_seconds))
            interrupted = found.interrupted
    return best and msgspec.structs.replace(best, interrupted=interrupted)


def _shorter_plan(best: Plan | None, found: Plan, schedule: Schedule) -> Plan:
    """Return `best`, or, if shorter, the plan `found` with roles as in `schedule`."""
    if best is not None and schedule.seconds(schedule.period_ticks) >= best.period:
        return best
    violations = check(schedule)
    assert not violations, f"relabelling broke a rule: {violations[0]}"
    return msgspec.structs.replace(best or found, schedule=schedule, evidence=None, tally=found.tally, end=None,
                                   fixed_period=best and (best.fixed_period or best.period))


def _with_usual_rooms(job: Job, workers: Collection[Worker]) -> Job:
    """Return a copy of the job whose `workers` have at least their column's memory."""
    if job.memory is None:
        return job
    rooms = tuple((worker, max(room, job.memory.capacity[worker.column]) if worker in workers else room)
                  for worker, room in job.memory.capacity_of)
    return msgspec.structs.replace(job, memory=msgspec.structs.replace(job.memory, capacity_of=rooms))


def slow_while_alive(job: Job, failed: Collection[Worker]) -> Job:
    """Return a copy of the job with failed workers at usual speed. Slow roles are never vacant."""
    alive = tuple((worker, factor) for worker, factor in job.time.slow if worker not in failed)
    return msgspec.structs.replace(job, time=msgspec.structs.replace(job.time, slow=alive))
