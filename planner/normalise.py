"""Choose the roles that stay vacant where they cost least, and move workers.

A live worker may take over another role when it has loaded that stage's parameters from a peer. So
only the number F of failures is given; which F roles are vacant is a choice. The choice is made in
three steps:

  1. how many roles are vacant in each column: dynamic programming over columns, on the proven bound
     of the window of a column with this number of vacant roles, for the best few distributions
     (`WindowBounds`);
  2. which pipelines they belong to: the same or different ones (`arrange_vacancies`);
  3. plans of the best few candidates decide. On small grids every pattern is a candidate.

The result, the *normal form*, depends on the number of failures alone. `schedules.tables.relabel`
then chooses which worker plays which role, so that the fewest layers are loaded. In the normal
form, roles of slow workers are not vacant; `planner.exchange` tries other roles for them.

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

The values are: ticks of the longest busy window, sum of the columns' windows, sum of squared
counts, vacant roles of each column.
"""

ProblemOf = Callable[[Sequence[Worker]], Problem]
"""Function that returns the problem in which these workers are down."""


class WindowBounds:
    """Calculator of lower bounds on the period, given one column's number of vacant roles.

    By these bounds it ranks distributions of the failures over columns, among which the search
    chooses. In these distributions slow workers keep their roles; the bound that a plan states is
    `bounds_roles.roles_bound` instead.

    A plan for some failures is also one for fewer, in which live workers stay idle; so the failures
    of one column alone give a bound. This bound counts the micro-batches of all pipelines and the
    live workers of the column, but not which pipelines the failures are in. Results are stored, so
    that one object serves all numbers of failures of a job.
    """

    def __init__(self, problem_of: ProblemOf, params: RoleParams = DEFAULTS.roles) -> None:
        """Build the problem without failures, by calling `problem_of`, whose errors pass.

        In the problems that `problem_of` returns, any live holder of a stage may run any
        micro-batch.
        """
        self._problem_of, self._kept = problem_of, params.distributions
        whole = problem_of(())
        self.grid, self.tick_seconds = whole.grid, whole.tick_seconds
        self.slow = {worker for worker, live in whole.workers.items() if live.per_mille != 1000}
        """Slow workers, which are alive and therefore never leave their roles."""
        self._memory = whole.memory
        self._bound: dict[tuple[int, int], int] = {}
        self._best: dict[int, list[RankedDistribution]] = {}

    def column_bound(self, column: int, down: int) -> int:
        """Return a bound in ticks if `down` or more roles of a column are vacant."""
        if down == 0:
            column = 0  # the same plan, whatever the column
        # With more vacant roles the period is never shorter: the bound for fewer holds, too.
        if (column, down) not in self._bound:
            self._bound[column, down] = self.column_bound(column, down - 1) if down else 0
            # The bound must hold for any of the column's roles: those with most memory are filled.
            roles = sorted(self.possible_vacancies(column), key=self._capacity)
            with suppress(NoPlanError):
                problem = self._problem_of(roles[:down])
                self._bound[column, down] = max(self._bound[column, down], lower_bound(problem))
        return self._bound[column, down]

    def _capacity(self, role: Worker) -> int:
        """Return the memory for activations of a role's own worker; 0 for all if unlimited."""
        return 0 if self._memory is None else self._memory.capacity_for(role, role.column)

    def to_seconds(self, ticks: int) -> float:
        """Convert a bound's ticks to seconds, and round up a little for comparisons."""
        return ticks * self.tick_seconds * (1 + 1e-12)

    def possible_vacancies(self, column: int) -> list[Worker]:
        """Return the roles of a column that may be vacant: not those of slow workers."""
        return [
            role
            for pipeline in range(self.grid.pipelines)
            if (role := Worker(pipeline, column)) not in self.slow
        ]

    def max_vacancies(self, column: int) -> int:
        """Return the largest number of roles of a column that may be vacant.

        Slow workers keep their roles, and at least one role stays filled, except in bidirectional
        pipelines, where another column has the same layers.
        """
        return min(
            self.grid.pipelines - int(self.grid.chains == 1), len(self.possible_vacancies(column))
        )

    def best_distributions(self, failures: int) -> list[RankedDistribution]:
        """Return the best few distributions of failures over columns, best first.

        In the first, the longest busy window is as short as possible. With best[c][f] those of f
        failures over columns 0 to c, of which column c has k, and w = column_bound(c, k):

            best[c][f] = the smallest few (`RoleParams.distributions`) of
                { (max(longest, w), sum + w, squares + k k, counts + (k,)) :
                  k <= f, (longest, sum, squares, counts) in best[c - 1][f - k] }

        The first is exact; the others are near-best alternatives. Among equal windows, even
        distributions come first, then those with failures in later columns, whose workers wait
        less. The list is empty if so many roles cannot be vacant.
        """
        if failures not in self._best:
            self._best[failures] = self._rank_distributions(failures)
        return self._best[failures]

    def _rank_distributions(self, failures: int) -> list[RankedDistribution]:
        # By the recursion of `best_distributions`, over the counts that leave no more failures than
        # the later columns can take.
        useful = self._useful_counts(failures)
        best: dict[int, list[RankedDistribution]] = {0: [(0, 0, 0, ())]}
        for column, limit in enumerate(useful):
            windows = [self.column_bound(column, down) for down in range(limit + 1)]
            least = max(0, failures - sum(useful[column + 1 :]))
            extended = {}
            for count in range(least, min(failures, sum(useful[: column + 1])) + 1):
                # `down` of the `count` failures are in this column, the others before it.
                ranked = sorted(
                    (max(longest, window), total + window, squares + down * down, (*counts, down))
                    for down, window in enumerate(windows[: count + 1])
                    for longest, total, squares, counts in best.get(count - down, ())
                )
                extended[count] = ranked[: self._kept]
            best = extended
        return best.get(failures, [])

    def _useful_counts(self, failures: int) -> list[int]:
        """Return, by column, the largest number of vacant roles that is worth considering."""
        # Windows grow with the number of vacant roles. So the longest window is the shortest
        # possible if each failure in turn goes to the column whose window is then the shortest. One
        # more role of each column gives a choice.
        down = [0] * self.grid.columns
        for _ in range(failures):
            free = [
                column
                for column in range(self.grid.columns)
                if down[column] < self.max_vacancies(column)
            ]
            if not free:
                break
            shortest = min(
                free,
                key=lambda column: (
                    self.column_bound(column, down[column] + 1),
                    down[column],
                    -column,
                ),
            )
            down[shortest] += 1
        return [min(count + 1, self.max_vacancies(column)) for column, count in enumerate(down)]


def window_bounds_of(job: Job, options: PlanOptions) -> WindowBounds:
    """Return the calculator of lower bounds on the period by a column's vacant roles.

    It is for plans of `job` with `options`. Raises NoPlanError if the job has no schedule even
    without failures.
    """
    # picklable: sent to other processes
    return WindowBounds(partial(bounding_problem, options, job), options.params.roles)


def arrange_vacancies(
    job: Job, windows: WindowBounds, counts: Counts
) -> Iterator[tuple[Worker, ...]]:
    """Iterate over sets of vacant roles, with `counts[column]` roles of each column.

    Some sets have their roles in the same pipelines, which disturbs fewer pipelines and is better
    more often; other sets have them in different pipelines. Pipelines are taken from the fewest
    micro-batches up, for further sets from the most down. The bounds `windows` say which roles may
    be vacant.
    """
    ascending = sorted(range(job.pipelines), key=lambda pipeline: job.microbatches[pipeline])
    for order in (ascending, ascending[::-1]):
        for spread in (False, True):
            position, vacant = 0, list[Worker]()
            for column, count in enumerate(counts):
                allowed = {role.pipeline for role in windows.possible_vacancies(column)}
                turn = order
                # Begin with the pipelines in which no role is vacant yet.
                if spread:
                    first = position % job.pipelines
                    turn = order[first:] + order[:first]
                roles = [Worker(pipeline, column) for pipeline in turn if pipeline in allowed]
                vacant += roles[:count]
                position += count
            yield tuple(sorted(vacant))


def candidate_vacancies(
    job: Job, windows: WindowBounds, failures: int, params: RoleParams = DEFAULTS.roles
) -> list[tuple[Worker, ...]]:
    """Return sets of vacant roles worth planning, promising ones first, one of each pattern."""
    # Those of the best distributions, then, on small grids, one of every pattern.
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


def _few_patterns(failures: int, columns: int, classes: Sequence[int], limit: int) -> list[Pattern]:
    """Return all patterns of `failures` failed workers; an empty list if there are over `limit`."""
    # A lower limit of their number is known at once; only if it is small are they listed.
    if failures > limit or math.comb(columns, min(failures, columns // 2)) > limit:
        return []
    few = list(islice(failure_patterns(failures, columns, classes), limit + 1))
    return few if len(few) <= limit else []


def normal_form(
    job: Job,
    failures: int,
    options: PlanOptions,
    *,
    windows: WindowBounds | None = None,
    progress: ProgressCallback = ignore_progress,
    clock: Clock | None = None,
) -> Plan:
    """Return the best plan found for this number of failures, over choices of vacant roles.

    The choice does not depend on which workers fail. The plan's schedule has the vacant roles as
    its `failed`, and every other worker in its own role. The inner loops are compiled first. Raises
    NoPlanError if so many failures leave some stage without a live worker, however roles are
    assigned, or if nothing fits; JobError as `plan_only`.

    Parameters
    ----------
    job
        Job to plan.
    failures
        Number of roles that are vacant.
    options
        Options of the plans.
    windows
        Lower bounds by column of the same job and options, to avoid computing them again.
    progress
        Receives a line of text for each shorter plan.
    clock
        Clock of a search that this one is part of; None: one of its own.
    """
    clock = clock or options.make_clock()
    if failures == 0:
        return plan_only(options, job, (), clock)
    windows = windows or window_bounds_of(job, options)
    if not windows.best_distributions(failures):
        largest = sum(windows.max_vacancies(column) for column in range(job.stages))
        raise NoPlanError(
            f"{failures} failures leave some stage without a live worker, however roles are "
            f"assigned: the job can lose {largest} of its {job.pipelines * job.stages} workers"
        )
    # The best of several candidates, then the same vacant roles in the rest of the time.
    ensure_compiled(progress)
    deadline = clock.now() + options.limit_seconds
    best = _best_candidate(job, windows, failures, options, progress, clock)
    seconds_left = deadline - clock.now()
    if best.interrupted or best.schedule.status == "optimal" or seconds_left < best.solve_seconds:
        return best
    final = plan_only(options.with_limit(seconds_left), job, best.schedule.failed, clock)
    better = final.period <= best.period
    return msgspec.structs.replace(final if better else best, interrupted=final.interrupted)


def _best_candidate(
    job: Job,
    windows: WindowBounds,
    failures: int,
    options: PlanOptions,
    progress: ProgressCallback,
    clock: Clock,
) -> Plan:
    """Return the shortest plan over several sets of vacant roles; the first of equals."""
    params = options.params.roles
    seconds = params.compared * options.limit_seconds
    refusals, shortest = list[NoPlanError](), math.inf

    # A candidate too large for its share of the time gets the whole limit until one has a plan.
    def plan_vacancies(vacant: tuple[Worker, ...], within: PlanOptions) -> Plan | None:
        nonlocal shortest
        try:
            plan = plan_only(within, job, vacant, clock)
        except TooLargeError:
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

    # Few candidates need no second round: the caller plans the best once more.
    candidates = candidate_vacancies(job, windows, failures, params)
    rounds = [Round(options.for_comparison, seconds)] * (
        2 if len(candidates) > params.finalists else 1
    )
    best = plan_in_rounds(
        candidates,
        rounds,
        plan_vacancies,
        clock,
        finalists=params.finalists,
        floor=windows.to_seconds(windows.best_distributions(failures)[0][0]),
        deadline=clock.now() + 2 * seconds,
    )
    if best is None:
        raise refusals[0]
    return best


def _describe_plan(schedule: Schedule) -> str:
    down = [0] * schedule.grid.columns
    for role in schedule.failed:
        down[role.column] += 1
    broken = len({role.pipeline for role in schedule.failed})
    return (
        f"{'+'.join(map(str, down))} roles without a worker by stage, in {broken} pipeline"
        f"{'' if broken == 1 else 's'}: period {schedule.seconds(schedule.period_ticks):g} s"
    )


def normalised(
    job: Job,
    failed: Sequence[Worker],
    options: PlanOptions,
    *,
    reference: FaultFree | None = None,
    progress: ProgressCallback = ignore_progress,
    clock: Clock | None = None,
) -> Plan:
    """Return the best plan for these failed workers, with other roles if they shorten it.

    Moved roles are tried even if layers may move, although they are a special case of that; without
    failures, only if no plan in place is found. The plan is never longer than the one with roles in
    place. Compilation and Ctrl-C are as in `plan_job`. Raises JobError for unknown workers, if
    layouts are tried and a stage has no layer, or if the limit is too short for the job
    (TooLargeError); NoPlanError if no plan is found, in place or moved.

    Parameters
    ----------
    job
        Job to plan.
    failed
        Workers that are down.
    options
        Options of the plan.
    reference
        Fault-free period and bound that an earlier search has found; None if there was none.
    progress
        Receives lines of text about the search.
    clock
        Clock of a search that this one is part of; None: one of its own.
    """
    clock = clock or options.make_clock()
    (ensure_compiled if isinstance(clock, StepClock) else compile_in_background)(progress)
    began = time.monotonic()
    params = options.params.roles
    share = params.share if options.layers == "fixed" else params.share_of_layers
    roles = options.limit_seconds * share if failed else 0.0
    # Counted steps of the plan with roles in place are its own, so that it is never longer with
    # them moved.
    first = options
    if options.steps is None:
        first = options.with_limit(options.limit_seconds - roles)
    # With roles in place.
    best, refusals = None, list[str]()
    try:
        best = plan_with(first, job, failed, fault_free=reference, progress=progress, clock=clock)
    # Roles that a live worker has no room for may be played by another.
    except NoPlanError as error:
        refusals.append(str(error))
    # With roles moved. Without failures this is done for room alone.
    in_place = msgspec.structs.replace(
        options.with_limit(roles or options.limit_seconds * share), layers="fixed"
    )
    try:
        if best is None or (failed and not best.interrupted):
            best = _improve_with_roles(
                best,
                job,
                failed,
                in_place,
                moving=options.layers == "move",
                progress=progress,
                clock=clock,
            )
    except NoPlanError as error:
        refusals.append(str(error))
    if best is None:
        raise NoPlanError("; with roles moved: ".join(dict.fromkeys(refusals)))
    return msgspec.structs.replace(best, solve_seconds=time.monotonic() - began)


def plan_moved_roles(job: Job, failed: Sequence[Worker], options: PlanOptions) -> Plan:
    """Return the best plan found in which live workers may take other roles.

    No plan in place is made for comparison. The inner loops are compiled first. Raises NoPlanError
    if none is found, JobError as `plan_only`.
    """
    ensure_compiled()
    plan = _improve_with_roles(
        None,
        job,
        failed,
        options,
        moving=False,
        progress=ignore_progress,
        clock=options.make_clock(),
    )
    if plan is None:
        raise NoPlanError(
            f"no live worker can take over the roles of {', '.join(map(str, failed))}"
        )
    return plan


def _improve_with_roles(
    best: Plan | None,
    job: Job,
    failed: Sequence[Worker],
    options: PlanOptions,
    *,
    moving: bool,
    progress: ProgressCallback,
    clock: Clock,
) -> Plan | None:
    """Return the shorter of `best` and a plan with moved roles; None without either."""
    # Bounds: of distributions, and of all assignments of roles.
    job = _with_usual_rooms(slow_while_alive(job, failed), failed)
    try:
        windows, bounds = window_bounds_of(job, options), role_bounds(job, failed, options)
    except NoRoomError:  # in their own roles; bounds for more room hold for less
        roomy = _with_usual_rooms(job, unlike_workers(job, failed))
        windows, bounds = window_bounds_of(roomy, options), role_bounds(roomy, failed, options)
    # `moving` says whether layers may move in `best`. If not, its bound must hold for plans with
    # moved roles, too; if so, its bound holds for them already.
    least, tick_seconds = bounds.best_bound(), windows.tick_seconds
    if best is not None:
        schedule = best.schedule
        if not moving:
            schedule = with_converted_bound(schedule, least, tick_seconds)
            best = msgspec.structs.replace(best, schedule=schedule)
            if schedule.status == "optimal":
                return best
        elif schedule.scope is Scope.LAYERS:
            if schedule.status == "optimal":
                return best
            least = Bound(schedule.lower_bound_ticks, schedule.scope)
            tick_seconds = schedule.tick_seconds
    # Two searches share the time if workers are unlike.
    unlike = bool(unlike_workers(job, failed))
    half = options
    if unlike and options.steps is None:
        half = options.with_limit(options.limit_seconds / 2)
    # Vacant roles where they cost least; slow workers keep theirs.
    interrupted = False
    try:
        normal = normal_form(
            job, len(set(failed)), half, windows=windows, progress=progress, clock=clock
        )
        relabelled = relabel_schedule(
            normal.schedule, failed, held_elsewhere=options.from_checkpoint, nodes=job.nodes
        )
        if relabelled is not None:
            bounded = with_converted_bound(relabelled, least, tick_seconds)
            best = _shorter_plan(best, normal, bounded)
        interrupted = normal.interrupted
    # Each role had the room of its own worker; unlike workers in other roles may have enough.
    except NoPlanError:
        if not unlike:
            raise
    # Any roles for unlike workers.
    if unlike and not interrupted and (best is None or best.schedule.status != "optimal"):
        floor = windows.to_seconds(bounds.best_bound().ticks)
        exchanged = exchange_roles(job, failed, half, bounds, clock, floor)
        if exchanged is not None:
            bounded = with_converted_bound(exchanged.schedule, least, tick_seconds)
            best = _shorter_plan(best, exchanged, bounded)
            interrupted = exchanged.interrupted
    return best and msgspec.structs.replace(best, interrupted=interrupted)


def _shorter_plan(best: Plan | None, plan: Plan, schedule: Schedule) -> Plan:
    if best is not None and schedule.seconds(schedule.period_ticks) >= best.period:
        return best
    violations = check(schedule)
    assert not violations, f"relabelling broke a rule: {violations[0]}"
    # Evidence and end of a search with roles in place say nothing about this one.
    return msgspec.structs.replace(
        best or plan,
        schedule=schedule,
        evidence=None,
        tally=plan.tally,
        end=None,
        fixed_period=best and (best.fixed_period or best.period),
    )


def _with_usual_rooms(job: Job, workers: Collection[Worker]) -> Job:
    """Return a copy of the job in which `workers` have at least their column's memory."""
    if job.memory is None:
        return job
    rooms = []
    for worker, room in job.memory.capacity_of:
        usual = job.memory.capacity[worker.column]
        rooms.append((worker, max(room, usual) if worker in workers else room))
    memory = msgspec.structs.replace(job.memory, capacity_of=tuple(rooms))
    return msgspec.structs.replace(job, memory=memory)


def slow_while_alive(job: Job, failed: Collection[Worker]) -> Job:
    """Return a copy of the job in which failed workers count as not slow.

    Otherwise their roles would never be vacant, since slow workers keep their roles.
    """
    alive = tuple((worker, factor) for worker, factor in job.time.slow if worker not in failed)
    return msgspec.structs.replace(job, time=msgspec.structs.replace(job.time, slow=alive))
