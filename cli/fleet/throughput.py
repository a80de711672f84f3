"""Steady-state throughput of the schedules that policies run, in samples per second. Each schedule is planned once.

Workers of a stage hold the same parameters, and pipelines are interchangeable, so swapping roles within a stage costs
nothing. A plan therefore depends only on how many workers of each stage are down (`DownByStage`). The list schedulers
plan a few arrangements of them over pipelines (`planner.normalise.arrangements`) within a short time, and the best
counts. With a table, the periods of its entries are used where they fit.

Jobs of more than `LARGE` ops are planned piece by piece (`planner.model.decompose`), each different piece once. Their
period is taken to be that of the slowest piece. Pieces meet at the all-reduces only; where their workers end at
different times, the assembled schedule can be a little longer.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from slipstream.cli.fleet.loads import DownByStage, Loads, spread_over_stages
from slipstream.cli.fleet.round_robin import Pieces, round_robin
from slipstream.cli.fleet.settled import NONE_SLOW, SettledPlans, Slow
from slipstream.planner.budget import Budget
from slipstream.planner.job.file import Job
from slipstream.planner.model import assemble
from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.model.decompose import decompose
from slipstream.planner.model.problem import Problem
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.normalise import Windows, arrangements
from slipstream.planner.options import PlanOptions
from slipstream.planner.search.baselines import one_f_one_b
from slipstream.planner.search.compiled import ready
from slipstream.planner.search.engine import solve
from slipstream.schedules.schedule import BackwardMode, OptimizerMode
from slipstream.schedules.tables.pattern import Pattern, pattern_of, pipeline_classes
from slipstream.schedules.tables.table import Table

Value = TypeVar("Value")

PLAN_SECONDS = 0.2
"""Time limit for one arrangement of failures; most need a hundredth of it."""
LARGE = 30_000
"""A job of more compute ops is planned piece by piece."""


class Throughputs:
    """Throughputs of one job by schedule, in samples per second; 0.0 where no plan exists."""

    def __init__(self, job: Job, *, samples_per_microbatch: float = 1.0, table: Table | None = None,
                 plan_seconds: float = PLAN_SECONDS, settle_seconds: float | None = None,
                 announce: Callable[[str], None] = lambda _: None) -> None:
        """All workers count as equally fast. `plan_seconds` and `settle_seconds` limit the time for one plan, with
        layers in place and with layers that move (None: by the size of the job). `announce` is called with one line
        before each plan.

        Raises NoPlanError when no schedule can run the job, ValueError when the table is of another one.
        """
        ready(announce)
        self.job = msgspec.structs.replace(job, time=msgspec.structs.replace(job.time, slow=()))
        self.workers = job.pipelines * job.stages
        self.samples = samples_per_microbatch * sum(job.microbatches)
        # Whole stages only: what slices gain at once is little, and hundreds of states are planned.
        self._options = PlanOptions(method="greedy", time_limit=plan_seconds, slices=False)
        self._windows: dict[int, Windows] = {}
        problem = self._options.problem(self.job)
        self._tick_seconds = problem.tick_seconds
        self._classes = pipeline_classes(problem.grid, problem.times, problem.memory)
        self._announce = announce
        self._planned: dict[DownByStage, float] = {}
        self._in_place: dict[DownByStage, float] = {}
        self.loads = Loads(self.job)
        self._settled = SettledPlans(self.job, announce, settle_seconds)
        self._settled_rates: dict[tuple[int, Slow], tuple[float, float]] = {}
        self._normal_form: dict[int, DownByStage | None] = {}
        self._pieces: dict[Hashable, int] = {}
        self._round_robin: dict[tuple[DownByStage, BackwardMode, OptimizerMode], float] = {}
        self._one_f_one_b: dict[int, float] = {}
        self._kept: dict[Hashable, Any] = {}
        self._table = _table_periods(table, self.job, self._options) if table is not None else {}

    def kept(self, key: Hashable, find: Callable[[], Value]) -> Value:
        """A figure that policies need again and again, in this run and in others: found once for each key."""
        if key not in self._kept:
            self._kept[key] = find()
        found: Value = self._kept[key]
        return found

    # --- This planner -------------------------------------------------------------------------------------------------

    def planned(self, down: DownByStage) -> float:
        """By this planner's schedule, with so many workers of each stage down."""
        if down not in self._planned:
            self._planned[down] = self.samples / self._planned_period(down)
        return self._planned[down]

    def in_place(self, down: DownByStage) -> float:
        """By this planner's schedule, or by 1F1B on the pipelines that are whole, where that is faster."""
        if down not in self._in_place:
            self._in_place[down] = max(self.planned(down), self.one_f_one_b(self.job.pipelines - max(down)))
        return self._in_place[down]

    def settled(self, failures: int, slow: Slow = NONE_SLOW) -> tuple[float, float]:
        """(samples per second, stages that the busiest worker loads) with so many workers down, once layers have moved.

        `slow` are others that are slow. (0.0, 0.0) where no plan exists.
        """
        key = failures, slow
        if key not in self._settled_rates:
            found = self._settled.answer(failures, slow)
            self._settled_rates[key] = (self.samples / found.period, found.stages_moved) if found else (0.0, 0.0)
        return self._settled_rates[key]

    def normal_form(self, failures: int) -> DownByStage | None:
        """How failure normalisation spreads this many failures: the best, once planned, of its distributions.

        None where some stage would have no live worker.
        """
        if failures not in self._normal_form:
            self._normal_form[failures] = self._best_distribution(failures)
        return self._normal_form[failures]

    def _best_distribution(self, failures: int) -> DownByStage | None:
        if failures > self.workers - self.job.stages:
            return None
        in_table = [down for down in self._table if sum(down) == failures]
        ranked = self._windows_of(self._affected_part(failures)).distributions(failures)
        even = spread_over_stages(failures, self.job.stages)
        choices = dict.fromkeys([*in_table, *(counts for *_, counts in ranked), even])
        most = self.samples / (ranked[0][0] * self._tick_seconds) if ranked else math.inf
        best, rate = None, 0.0
        for down in choices:
            if self.planned(down) > rate:
                best, rate = down, self.planned(down)
            if rate >= most * (1 - 1e-12):
                break  # none of any distribution is faster
        return best

    def _planned_period(self, down: DownByStage) -> float:
        self._announce(f"planning {'+'.join(map(str, down))} workers down by stage")
        if any(count >= self.job.pipelines for count in down):
            return math.inf
        if down in self._table:
            return self._table[down]
        best = math.inf
        for problem in self._problems(down, self._options):
            best = min(best, self._period_of(problem, self._search) * problem.tick_seconds)
            if best <= lower_bound(problem) * problem.tick_seconds:
                return best
        # Where time ran out, ReCycle's rule may have done better: its schedules are open to this planner, too.
        return min(best, self.samples / self.round_robin(down))

    def _affected_part(self, failures: int) -> Job:
        """The job with only as many pipelines as failures can affect; the others are equal, and change nothing.

        With f (M + 1) pipelines, one more micro-batch for each peer is all the work of f broken ones.
        """
        count = self.job.microbatches[0]
        enough = failures * (count + 1) + 1
        if enough >= self.job.pipelines or len(set(self.job.microbatches)) > 1:
            return self.job
        return msgspec.structs.replace(self.job, pipelines=enough, microbatches=(count,) * enough)

    def _windows_of(self, job: Job) -> Windows:
        return self._windows.setdefault(job.pipelines, Windows(job, self._options))

    def _search(self, problem: Problem) -> Pieces:
        """Plan with the list schedulers, for a short time."""
        # The budget's own event is never set: Ctrl-C ends the whole simulation and not this search.
        clock = self._options.clock()
        return solve(problem, "greedy", Budget(deadline=clock.now() + self._options.seconds, clock=clock)).pieces

    def _period_of(self, problem: Problem, solver: Callable[[Problem], Pieces]) -> int:
        """The period in ticks: of the assembled schedule; for a large job, of the slowest piece."""
        if problem.operations <= LARGE:
            return assemble.period(problem, solver(problem))
        return max(self._piece_period(piece.problem, solver) for piece in decompose(problem))

    def _piece_period(self, problem: Problem, solver: Callable[[Problem], Pieces]) -> int:
        key = (solver.__name__, problem.backward, problem.optimizer, problem.grid.microbatches, problem.failed)
        if key not in self._pieces:
            self._pieces[key] = assemble.period(problem, solver(problem))
        return self._pieces[key]

    def _problems(self, down: DownByStage, options: PlanOptions) -> Sequence[Problem]:
        """One problem for each arrangement of the failures over pipelines, up to the numbering of the pipelines.

        For a large job those in the smallest pieces come first, and only the first may have pieces that are large.
        """
        distinct: dict[Pattern, Problem] = {}
        job = self._affected_part(sum(down))
        for failed in arrangements(job, self._windows_of(job), down) if any(down) else [()]:
            pattern = pattern_of(failed, self._classes)
            if pattern not in distinct:
                distinct[pattern] = options.problem(job, failed)
        problems = list(distinct.values())
        if problems[0].operations <= LARGE:
            return problems
        largest = [max(piece.problem.operations for piece in decompose(problem)) for problem in problems]
        ranked = sorted(range(len(problems)), key=lambda index: (largest[index], -index))
        return [problems[index] for index in ranked if largest[index] <= LARGE or index == ranked[0]]

    # --- ReCycle ------------------------------------------------------------------------------------------------------

    def recycle(self, down: DownByStage) -> float:
        """By ReCycle as published: 1F1B while no worker is down; else split and staggered, re-routed round-robin.

        Healthy workers keep to 1F1B, so it is never faster than that. The best of some list schedules stands in for
        the published solver.
        """
        whole = self.one_f_one_b(self.job.pipelines)
        return min(whole, self.round_robin(down)) if any(down) else whole

    def round_robin(self, down: DownByStage, backward: BackwardMode = "split",
                    optimizer: OptimizerMode = "staggered") -> float:
        """By the best of some list schedules with re-routing round-robin; fused: with the memory of 1F1B."""
        key = (down, backward, optimizer)
        if key not in self._round_robin:
            self._announce(f"planning ReCycle with {'+'.join(map(str, down))} workers down by stage")
            self._round_robin[key] = self.samples / self._round_robin_period(*key)
        return self._round_robin[key]

    def _round_robin_period(self, down: DownByStage, backward: BackwardMode, optimizer: OptimizerMode) -> float:
        if any(count >= self.job.pipelines for count in down):
            return math.inf
        options = msgspec.structs.replace(self._options, backward=backward, optimizer=optimizer)
        best = math.inf
        for problem in self._problems(down, options):
            best = min(best, self._period_of(problem, round_robin) * problem.tick_seconds)
            if best <= lower_bound(problem) * problem.tick_seconds:
                break
        return best

    # --- Whole pipelines under 1F1B -----------------------------------------------------------------------------------

    def one_f_one_b(self, pipelines: int) -> float:
        """By 1F1B (fused, synchronous) on so many pipelines, which divide the global batch as evenly as possible."""
        if pipelines < 1:
            return 0.0
        if pipelines not in self._one_f_one_b:
            self._one_f_one_b[pipelines] = self.samples / self._one_f_one_b_period(pipelines)
        return self._one_f_one_b[pipelines]

    def _one_f_one_b_period(self, pipelines: int) -> float:
        total = sum(self.job.microbatches)
        counts = self.job.microbatches if pipelines == self.job.pipelines else \
            tuple(total * (index + 1) // pipelines - total * index // pipelines for index in range(pipelines))
        # Pipelines wait for each other only at the end: one with the most micro-batches stands for all.
        job = msgspec.structs.replace(self.job, pipelines=1, microbatches=(max(counts),))
        problem = PlanOptions(method="1f1b").problem(job)
        return solution_period(problem, one_f_one_b(problem)) * problem.tick_seconds

    # --- Reference ---------------------------------------------------------------------------------------------------

    @cached_property
    def fault_free(self) -> float:
        """The fastest of these with all workers alive."""
        return max(self.planned((0,) * self.job.stages), self.one_f_one_b(self.job.pipelines))

    def work_conserving(self, live: float) -> float:
        """No synchronous training has more on so many workers; one at half speed counts half."""
        return self.samples / self.loads.work_conserving(live)


def _table_periods(table: Table, job: Job, options: PlanOptions) -> dict[DownByStage, float]:
    """The shortest period in the table, in seconds, by workers down in each stage."""
    problem, basis = options.problem(job), table.basis
    if (basis.grid, basis.times, basis.tick_seconds) != (problem.grid, problem.times, problem.tick_seconds):
        raise ValueError(f"{table.folder}: a table of another job: its grid or times differ")
    periods: dict[DownByStage, float] = {}
    for row in table.rows():
        if row.period is not None and row.layers_moved is None:  # else layers have moved
            down = tuple(sum(role.column == column for role in row.failed) for column in range(job.stages))
            periods[down] = min(row.period, periods.get(down, math.inf))
    return periods
