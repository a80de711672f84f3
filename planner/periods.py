"""Compute periods of a job by the number of failed workers of each stage.

The results are for callers that need hundreds of periods but no schedule, such as simulations,
which need one for every state that a fleet enters. Exchanging roles within a stage costs nothing,
so a period depends only on how many workers of each stage are down (`Counts`). Some arrangements of
the failed workers over pipelines (`planner.normalise.arrange_vacancies`) are planned by list
schedules, and the best one counts.

A job of more than `BlockParams.piecewise` ops is planned by subproblems
(`planner.model.decompose`), each different one once. The job's period is that of the slowest
subproblem; the assembled schedule can be a little longer if subproblems end at different times.
Reductions that overlap compute are not counted in such a job.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import msgspec

from slipstream.planner.budget import Budget, ProgressCallback, ignore_progress
from slipstream.planner.compiled import ensure_compiled
from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import layer_costs
from slipstream.planner.model.arrays import ProblemArrays, Solution
from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.model.bounds_layouts import work_bound
from slipstream.planner.model.decompose import decompose, make_whole_piece
from slipstream.planner.model.from_job import build_layered_problem, choose_tick
from slipstream.planner.model.problem import Problem
from slipstream.planner.normalise import Counts, WindowBounds, arrange_vacancies, window_bounds_of
from slipstream.planner.options import PlanOptions
from slipstream.planner.overlapped import (
    has_overlapping_reductions,
    overlapped_period,
    without_reductions,
)
from slipstream.planner.search.engine import find_best_candidate
from slipstream.planner.search.incumbent import Incumbent, order_pieces
from slipstream.planner.search.list_scheduler import (
    DispatchRule,
    ListScheduler,
    assign_hosts,
    scale_in_flight_limits,
    schedule_1f1b,
)
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.pattern import Pattern, pattern_of, pipeline_classes

Solver = Callable[[Problem], Incumbent]
"""Function that plans a problem or subproblem, and returns the candidate with its solution."""


class Periods:
    """Calculator of one job's periods for any failures.

    Each subproblem of a large job is planned once.
    """

    def __init__(
        self, job: Job, options: PlanOptions, progress: ProgressCallback = ignore_progress
    ) -> None:
        """Compile the planner and build the problem. Raises NoPlanError if nothing can run."""
        ensure_compiled(progress)
        # Reductions that overlap compute are added to each plan (`_period_seconds`).
        self._given, self._overlaps = job, has_overlapping_reductions(job)
        self._job, self._options = without_reductions(job) if self._overlaps else job, options
        problem = options.make_problem(job)
        self._classes = pipeline_classes(problem.grid, problem.times, problem.memory)
        self._windows: dict[int, WindowBounds] = {}
        self._pieces: dict[Hashable, int] = {}

    @property
    def is_large(self) -> bool:
        """True if the job is so large that each subproblem is planned by itself."""
        # F, I and W of each micro-batch at each stage.
        return (
            3 * self._job.depth * sum(self._job.microbatches)
            > self._options.params.blocks.piecewise
        )

    def affected_job(self, failures: int) -> Job:
        """Return the job with only as many pipelines as this number of failures can affect.

        The pipelines that are left out equal one that stays, and do not change the period. If
        pipelines are unlike (in micro-batches, speeds or memory of workers), none is left out.
        """
        # With f failures and M micro-batches per pipeline, f (M + 1) pipelines are affected at
        # most: if each peer runs one micro-batch more, that is all the work of f broken pipelines.
        count = self._job.microbatches[0]
        enough = failures * (count + 1) + 1
        if enough >= self._job.pipelines or len(set(self._classes)) > 1:
            return self._job
        return msgspec.structs.replace(self._job, pipelines=enough, microbatches=(count,) * enough)

    def window_bounds(self, failures: int) -> WindowBounds:
        """Return the bounds by column of the pipelines that so many failures can affect."""
        job = self.affected_job(failures)
        if job.pipelines not in self._windows:
            self._windows[job.pipelines] = window_bounds_of(job, self._options)
        return self._windows[job.pipelines]

    def planned_period(self, down: Counts) -> tuple[float, bool]:
        """Return the shortest period of list schedules, and whether it attains its lower bound.

        The period is in seconds; it is infinity if a column has no live worker. `down` has the
        number of failed workers of each column. Raises NoPlanError if, for some arrangement of
        them, no schedule keeps workers within their memory.
        """
        return self._shortest_period(down, self._options, self._plan_quickly)

    def round_robin_period(self, down: Counts, options: PlanOptions) -> float:
        """Return the period of ReCycle in seconds; infinity if a column has no live worker.

        In ReCycle, healthy pipelines take re-routed micro-batches in turn. The best of some list
        schedules stands for ReCycle's solver; if `options` fuse the backward, the order is that of
        1F1B. `down` has the number of failed workers of each column. Raises NoPlanError or
        StuckError for lack of memory.
        """
        return self._shortest_period(down, options, _plan_round_robin)[0]

    def one_f_one_b_period(self, microbatches: int) -> float:
        """Return the period of 1F1B in seconds, for one pipeline with this many micro-batches.

        The backward is fused, and the optimizer synchronous. Raises NoPlanError or StuckError for
        lack of memory.
        """
        job = msgspec.structs.replace(self._job, pipelines=1, microbatches=(microbatches,))
        problem = PlanOptions(method="1f1b").make_problem(job)
        return self._period_seconds(
            order_pieces(problem, [make_whole_piece(problem)], schedule_1f1b)
        )

    def _shortest_period(
        self, down: Counts, options: PlanOptions, solver: Solver
    ) -> tuple[float, bool]:
        """Return the shortest period in seconds that `solver` finds, and if that is optimal."""
        best = math.inf
        if any(count >= self._job.pipelines for count in down):
            return best, False
        for problem in self._problems_to_plan(down, options):
            best = min(best, self._period_of(problem, solver))
            if best <= lower_bound(problem) * problem.tick_seconds:
                return best, True
        return best, False

    def _problems_to_plan(self, down: Counts, options: PlanOptions) -> Sequence[Problem]:
        """Return problems for different spreads of failures over pipelines, one a pattern."""
        # Equal pipelines are interchangeable: one arrangement of each pattern is enough.
        distinct: dict[Pattern, Problem] = {}
        job = self.affected_job(sum(down))
        arrangements: Iterable[tuple[Worker, ...]] = [()]
        if any(down):
            arrangements = arrange_vacancies(job, self.window_bounds(sum(down)), down)
        for failed in arrangements:
            pattern = pattern_of(failed, self._classes)
            if pattern not in distinct:
                distinct[pattern] = options.make_problem(job, failed)
        # Small problems are all planned, as a whole.
        problems, piece_limit = list(distinct.values()), options.params.blocks.piecewise
        if problems[0].operation_count <= piece_limit:
            return problems
        # Of a large job, those whose subproblems are small, and at least one.
        largest = []
        for problem in problems:
            pieces = decompose(problem)
            largest.append(max(piece.problem.operation_count for piece in pieces))
        ranked = sorted(range(len(problems)), key=lambda index: (largest[index], -index))
        return [
            problems[index]
            for index in ranked
            if largest[index] <= piece_limit or index == ranked[0]
        ]

    def _plan_quickly(self, problem: Problem) -> Incumbent:
        # The budget's own event is never set: Ctrl-C ends the whole simulation and not this search.
        clock = self._options.make_clock()
        return find_best_candidate(
            problem,
            "greedy",
            Budget(deadline=clock.now() + self._options.limit_seconds, clock=clock),
        )

    def _period_of(self, problem: Problem, solver: Solver) -> float:
        """Return the period in seconds of a problem; of a large one, its slowest subproblem's."""
        if problem.operation_count > self._options.params.blocks.piecewise:
            pieces = decompose(problem)
            slowest = max(self._piece_period(piece.problem, solver) for piece in pieces)
            return slowest * problem.tick_seconds
        return self._period_seconds(solver(problem))

    def _period_seconds(self, solved: Incumbent) -> float:
        """Return the period of a candidate in seconds, with reductions that overlap compute."""
        if not self._overlaps:
            return solved.period_seconds
        grid = solved.problem.grid
        job = msgspec.structs.replace(
            self._given, pipelines=grid.pipelines, microbatches=grid.microbatches
        )
        return overlapped_period(solved.make_schedule("greedy"), job, self._options.params.overlap)

    def _piece_period(self, problem: Problem, solver: Solver) -> int:
        # All that distinguishes subproblems of one job.
        key = (
            solver.__name__,
            problem.backward,
            problem.optimizer,
            problem.grid.microbatches,
            problem.failed,
        )
        if key not in self._pieces:
            self._pieces[key] = solver(problem).period
        return self._pieces[key]


def work_bound_seconds(job: Job, failed: Sequence[Worker]) -> float:
    """Return a bound on the period in seconds that holds whichever layers workers hold.

    The bound is the work of all layers, shared by all live workers by their speed, with the A and O
    of one layer. Raises JobError if a stage has no layer, NoPlanError if no worker is alive.
    """
    bound = work_bound(build_layered_problem(job, failed, down=True))
    return float(bound * choose_tick(job, layer_costs(job)))


def _plan_round_robin(problem: Problem) -> Incumbent:
    """Plan each subproblem with micro-batches of failed workers given to peers in turn."""
    # ReCycle's rule (Gandhi et al., SOSP 2024).
    return order_pieces(problem, decompose(problem), _best_round_robin)


def _best_round_robin(problem: Problem) -> Solution:
    if problem.backward == "fused":
        return schedule_1f1b(problem)
    bound = lower_bound(problem)
    orders = ListScheduler(ProblemArrays(problem, assign_hosts(problem, "round-robin")))
    best, solution = math.inf, None
    for rule in _round_robin_rules(problem):
        if (period := orders.evaluate_rule(rule)) < best:
            best, solution = period, orders.last_solution()
        if best <= bound:
            break
    assert solution is not None
    return solution


def _round_robin_rules(problem: Problem) -> Iterator[DispatchRule]:
    """Iterate over dispatch rules for round-robin re-routing."""
    # Micro-batches in flight are limited by memory alone, as in 1F1B, or to twice as many as that.
    choices = (True, False) if problem.times.transfer else (True,)
    for ignore in choices:
        for factor in (0, 1, 2):
            yield DispatchRule(
                ignore_transfers=ignore,
                in_flight=scale_in_flight_limits(problem, factor) if factor else None,
            )
