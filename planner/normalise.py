"""Failure normalisation: let failures fall where they cost least, by moving live workers to other roles.

A live worker may take over another role once it has loaded that stage's parameters from a peer. So of F failures only
the number is given; which F roles are down is a choice. It is made in three steps:

1. how many roles are down in each column: dynamic programming over columns, on the proven bound of the window of a
   column with so many roles down, for the best few distributions (`Windows`);
2. which pipelines they belong to: spread or stacked (`arrangements`);
3. real plans of the best few candidates decide. On small grids every pattern is a candidate.

The result, the *normal form*, depends on the number of failures alone. `schedules.tables.relabel` then chooses who
plays which role, at the fewest layers to load.

The idea, failure normalisation by dynamic programming, is that of ReCycle (SOSP 2024, arXiv 2405.14009).
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

import msgspec

from slipstream.planner.budget import Clock, ProgressCallback, StepClock, quiet
from slipstream.planner.compiled import begin, ready
from slipstream.planner.job.file import Job
from slipstream.planner.model.assemble import claiming
from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Bound, NoPlanError, Problem
from slipstream.planner.options import PlanOptions
from slipstream.planner.overlapped import bounding_problem
from slipstream.planner.params import DEFAULTS, RoleParams
from slipstream.planner.plan import FaultFree, Plan, plan_only, plan_with
from slipstream.planner.repetition import TooLargeError
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Schedule, Scope, Worker
from slipstream.schedules.tables.pattern import (
    Pattern,
    dead_column,
    pattern_of,
    patterns,
    pipeline_classes,
    representative,
)
from slipstream.schedules.tables.relabel import relabel

Counts = tuple[int, ...]
"""Roles that are down, by column."""
Ranked = tuple[int, int, int, Counts]
"""(longest window in ticks, sum of windows, sum of squared counts, counts) of a distribution."""

ProblemOf = Callable[[Sequence[Worker]], Problem]


class Windows:
    """The least period by column and number of roles down there, and the best distributions of failures over columns.

    Keeps what it has computed, so that one object serves all numbers of failures of a job. What it answers is a
    function of the problems and that number alone, whatever was asked before.

    Its bounds hold whichever roles are down. A plan for some failures is one for fewer, in which live workers stand by;
    so those of one column alone give a bound. It counts the live workers of that column, all of one speed and one room
    but for the slow ones, which stay, and the micro-batches of all pipelines, since any holder may run them: not which
    pipelines the failures are in.
    """

    def __init__(self, problem_of: ProblemOf, params: RoleParams = DEFAULTS.roles) -> None:
        """`problem_of`: the problem with some roles down, in which any holder of a stage may run any micro-batch."""
        self._problem_of, self._kept = problem_of, params.distributions
        whole = problem_of(())
        self.grid, self.tick_seconds = whole.grid, whole.tick_seconds
        self.slow = {worker for worker, one in whole.workers.items() if one.per_mille != 1000}
        """Alive, and so never to leave their roles."""
        self._equal = len({(worker.column, one.room) for worker, one in whole.workers.items()}) == self.grid.columns
        self._bound: dict[tuple[int, int], int] = {}
        self._best: dict[int, list[Ranked]] = {}

    def bound(self, column: int, down: int) -> int:
        """A proven lower bound on the period, in ticks, with at least so many roles down in the column."""
        if down == 0:
            column = 0  # the same plan, whatever the column
        if (column, down) not in self._bound:
            problem = self._problem_of(self.candidates(column)[:down])
            fewer = self.bound(column, down - 1) if down else 0
            self._bound[column, down] = max(fewer, lower_bound(problem))
        return self._bound[column, down]

    def least(self, failures: int) -> Bound:
        """A bound for so many failures, whichever roles are down; 0 where workers have rooms of their own."""
        best = self.distributions(failures)
        return Bound(best[0][0] if best and self._equal else 0, Scope.ROLES)

    def seconds(self, ticks: int) -> float:
        """Ticks of a bound as seconds, and a little more than rounding may take."""
        return ticks * self.tick_seconds * (1 + 1e-12)

    def candidates(self, column: int) -> list[Worker]:
        """The roles of a column that may be left vacant: not those of slow workers, which are alive and play them."""
        return [role for pipeline in range(self.grid.pipelines)
                if (role := Worker(pipeline, column)) not in self.slow]

    def most(self, column: int) -> int:
        """How many roles of a column may be down at most."""
        return min(self.grid.pipelines - 1, len(self.candidates(column)))

    def distributions(self, failures: int) -> list[Ranked]:
        """The best few ways to distribute failures over columns, best first; the first one's window is the least.

        best[c][f] = the smallest few (`RoleParams.distributions`) of
            { (max(longest, w), sum + w, squares + k k, counts + (k,)) :
              k <= f, (longest, sum, squares, counts) in best[c - 1][f - k] }   with w = bound(c, k).
        Exact for the first, and near-best alternatives for the rest. Where windows are equal, even distributions come
        first, and then those with failures in later stages, which have less to wait for.
        """
        if failures not in self._best:
            self._best[failures] = self._programme(failures)
        return self._best[failures]

    def _programme(self, failures: int) -> list[Ranked]:
        """Best[columns][failures], of the counts from which the later columns can still take the rest of them."""
        useful = self._useful(failures)
        best: dict[int, list[Ranked]] = {0: [(0, 0, 0, ())]}
        for column, most in enumerate(useful):
            windows = [self.bound(column, down) for down in range(most + 1)]
            least = max(0, failures - sum(useful[column + 1:]))
            best = {count: sorted((max(longest, window), total + window, squares + down * down, (*counts, down))
                                  for down, window in enumerate(windows[:count + 1])
                                  for longest, total, squares, counts in best.get(count - down, ()))[:self._kept]
                    for count in range(least, min(failures, sum(useful[:column + 1])) + 1)}
        return best.get(failures, [])

    def _useful(self, failures: int) -> list[int]:
        """How many roles down in each column are worth looking at: windows grow with them, so that taking the
        shortest next window each time gives the longest one that any distribution needs; and one role more, to have
        a choice. Spares computing bounds that cannot matter.
        """
        down = [0] * self.grid.columns
        for _ in range(failures):
            free = [column for column in range(self.grid.columns) if down[column] < self.most(column)]
            if not free:
                break
            down[min(free, key=lambda column: (self.bound(column, down[column] + 1), down[column], -column))] += 1
        return [min(count + 1, self.most(column)) for column, count in enumerate(down)]


def windows_of(job: Job, options: PlanOptions) -> Windows:
    """Those of a job's plans by these options, whether micro-batches are cut or not."""
    return Windows(partial(bounding_problem, options, job), options.params.roles)  # which is sent to other processes


def arrangements(job: Job, windows: Windows, counts: Counts) -> Iterator[tuple[Worker, ...]]:
    """Ways to choose the pipelines of the roles that are down: in the same pipelines, or in different ones.

    The former is better more often, for fewer pipelines are disturbed. Both are tried from the pipelines with the
    fewest micro-batches up, and from those with the most down.
    """
    ascending = sorted(range(job.pipelines), key=lambda pipeline: job.microbatches[pipeline])
    for order in (ascending, ascending[::-1]):
        for spread in (False, True):
            position, vacant = 0, list[Worker]()
            for column, count in enumerate(counts):
                allowed = {role.pipeline for role in windows.candidates(column)}
                turn = order[position % job.pipelines:] + order[:position % job.pipelines] if spread else order
                vacant += [Worker(pipeline, column) for pipeline in turn if pipeline in allowed][:count]
                position += count
            yield tuple(sorted(vacant))


def candidates(job: Job, windows: Windows, failures: int,
               params: RoleParams = DEFAULTS.roles) -> list[tuple[Worker, ...]]:
    """The sets of roles, one a pattern, among which real plans decide; the most promising first."""
    problem = build_problem(job)
    grid, classes = problem.grid, pipeline_classes(problem.grid, problem.times, problem.memory)
    found: dict[Pattern, tuple[Worker, ...]] = {}
    for *_, counts in windows.distributions(failures):
        for vacant in arrangements(job, windows, counts):
            found.setdefault(pattern_of(vacant, classes), vacant)
    for pattern in _few_patterns(failures, job.stages, classes, params.exhaustive):
        vacant = representative(pattern, classes)
        if dead_column(vacant, grid) is None and not windows.slow & set(vacant):
            found.setdefault(pattern, vacant)
    return list(found.values())


def _few_patterns(failures: int, columns: int, classes: Sequence[int], most: int) -> list[Pattern]:
    """All patterns if they are few, else none."""
    if failures > most or math.comb(columns, min(failures, columns // 2)) > most:
        return []
    found = list(islice(patterns(failures, columns, classes), most + 1))
    return found if len(found) <= most else []


def normal_form(job: Job, failures: int, options: PlanOptions, *, windows: Windows | None = None,
                progress: ProgressCallback = quiet, clock: Clock | None = None) -> Plan:
    """The best plan for a number of failures, whose roles may be chosen: a function of job, number and options.

    The roles that are down are the `failed` of its schedule, in which every worker plays its own role. `windows` are
    those of the same job and options, kept from call to call; `clock`: of a search that this is part of.
    Raises NoPlanError when so many failures leave some stage
    without a live worker, however roles are assigned.
    """
    clock = clock or options.clock()
    if failures == 0:
        return plan_only(options, job, (), clock)
    windows = windows or windows_of(job, options)
    if not windows.distributions(failures):
        most = sum(windows.most(column) for column in range(job.stages))
        raise NoPlanError(f"{failures} failures leave some stage without a live worker, whoever plays which role: the "
                          f"job can lose {most} of its {job.pipelines * job.stages} workers")
    ready(progress)
    deadline = clock.now() + options.seconds
    best = _best_candidate(job, windows, failures, options, progress, clock)
    left = deadline - clock.now()
    if best.interrupted or best.schedule.status == "optimal" or left < best.solve_seconds:
        return best
    final = plan_only(options.within(left), job, best.schedule.failed, clock)
    better = final.period <= best.period
    return msgspec.structs.replace(final if better else best, interrupted=final.interrupted)


def _best_candidate(job: Job, windows: Windows, failures: int, options: PlanOptions,
                    progress: ProgressCallback, clock: Clock) -> Plan:
    """The candidate with the shortest plan; the first of equals.

    All are planned in a share of the time, then the best few again in as much. Where that is more than the list
    schedulers need, the choice does not depend on the clock. Ends early at a plan that none can beat; on huge jobs,
    where a single plan takes longer than its share, with those that there was time for.
    """
    params = options.params.roles
    over = clock.now() + 2 * params.compared * options.seconds
    floor = windows.seconds(windows.distributions(failures)[0][0])
    best: dict[tuple[Worker, ...], Plan] = {}
    shortest: Plan | None = None
    left = candidates(job, windows, failures, params)
    for keep in (params.finalists, 0):
        quick = options.comparing.within(options.seconds * params.compared / len(left))
        for vacant in left:
            try:
                made = plan_only(quick, job, vacant, clock)
            except TooLargeError:  # for a share of the time; the most promising one has all of it
                return shortest or plan_only(options, job, vacant, clock)
            if vacant not in best or made.period < best[vacant].period:
                best[vacant] = made
            if shortest is None or made.period < shortest.period:
                shortest = made
                progress(_described(made.schedule))
            if made.interrupted or shortest.period <= floor or clock.now() + made.solve_seconds > over:
                return msgspec.structs.replace(shortest, interrupted=made.interrupted)
        if len(best) <= params.finalists:
            break
        left = sorted(left, key=lambda vacant: best[vacant].period)[:keep]
    return min(best.values(), key=lambda made: made.period)


def _described(schedule: Schedule) -> str:
    down = [sum(role.column == column for role in schedule.failed) for column in range(schedule.grid.columns)]
    broken = len({role.pipeline for role in schedule.failed})
    return f"{'+'.join(map(str, down))} roles down by stage, in {broken} pipeline{'' if broken == 1 else 's'}: " \
           f"period {schedule.seconds(schedule.period_ticks):g} s"


def normalised(job: Job, failed: Sequence[Worker], options: PlanOptions, *, known: FaultFree | None = None,
               progress: ProgressCallback = quiet, clock: Clock | None = None) -> Plan:
    """Plan for these failed workers with roles moved where that shortens the period; never longer than without.

    A moved role is a special case of moved layers, so that plans for which these may move are compared, too. Raises
    JobError for unknown workers, NoPlanError when no schedule can exist.
    """
    clock = clock or options.clock()
    (ready if isinstance(clock, StepClock) else begin)(progress)
    began = time.monotonic()
    params = options.params.roles
    share = params.share if options.layers == "fixed" else params.share_of_layers
    roles = options.seconds * share if failed else 0.0
    # Counted steps of the plan with roles in place are its own, so that it is never longer with them moved.
    first = options if options.steps is not None else options.within(options.seconds - roles)
    best = plan_with(first, job, failed, known=known, progress=progress, clock=clock)
    in_place = msgspec.structs.replace(options.within(roles), layers="fixed")
    with suppress(*(() if options.layers == "fixed" else (NoPlanError,))):
        if failed and not best.interrupted:
            best = _with_roles(best, job, failed, in_place, moving=options.layers == "move", progress=progress,
                               clock=clock)
    return msgspec.structs.replace(best, solve_seconds=time.monotonic() - began)


def _with_roles(best: Plan, job: Job, failed: Sequence[Worker], options: PlanOptions, *, moving: bool,
                progress: ProgressCallback, clock: Clock) -> Plan:
    """The plan, or one for as many failures with roles moved, where that is shorter. `moving`: layers may move, too."""
    job = slow_while_alive(job, failed)
    windows = windows_of(job, options)
    least = windows_of(_without_state(job), options).least(len(set(failed)))
    own = best.schedule
    if not moving:
        best = msgspec.structs.replace(best, schedule=claiming(own, least, windows.tick_seconds))
        if best.schedule.status == "optimal":
            return best
    elif own.scope is Scope.LAYERS:
        if own.status == "optimal":
            return best
        least = Bound(own.lower_bound_ticks, own.scope)
    normal = normal_form(job, len(set(failed)), options, windows=windows, progress=progress, clock=clock)
    schedule = relabel(normal.schedule, failed, held_elsewhere=options.from_checkpoint, nodes=job.nodes)
    if schedule is not None and schedule.seconds(schedule.period_ticks) < best.period:
        schedule = claiming(schedule, least, own.tick_seconds if least.scope is Scope.LAYERS else windows.tick_seconds)
        violations = check(schedule)
        assert not violations, f"relabelling broke a rule: {violations[0]}"
        best = msgspec.structs.replace(best, schedule=schedule, evidence=None, tally=normal.tally, end=None,
                                       fixed_period=best.fixed_period or best.period)
    return msgspec.structs.replace(best, interrupted=normal.interrupted)


def _without_state(job: Job) -> Job:
    """The job as if holders shared no optimizer state: a file tells how much room that leaves where its roles are
    vacant, not where others would be."""
    return msgspec.structs.replace(job, memory=job.memory and msgspec.structs.replace(job.memory, state=()))


def slow_while_alive(job: Job, failed: Collection[Worker]) -> Job:
    """The job in which no worker that is down is slow: else its role would be kept for one of its speed."""
    alive = tuple((worker, factor) for worker, factor in job.time.slow if worker not in failed)
    return msgspec.structs.replace(job, time=msgspec.structs.replace(job.time, slow=alive))
