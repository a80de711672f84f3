"""Steady-state throughput of the schedules that policies run, in samples per second; each is planned once and kept.

Workers of a stage hold the same parameters, and pipelines are interchangeable, so that swapping roles within a stage
costs nothing: what a plan depends on is how many workers of each stage are down (`Down`). It is planned in the best of
a few arrangements over pipelines (`planner.normalise.arrangements`), by the list schedulers, within a short time; with
a table, the periods of its entries are taken where they fit.

Jobs of more than `LARGE` ops are planned piece by piece (`planner.model.decompose`), each different piece once, and the
period is taken to be that of the slowest piece. Pieces meet at the all-reduces only; where their workers end at unlike
times, the assembled schedule can be a little longer.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property

import msgspec

from planner.job.file import Job
from planner.model import assemble
from planner.model.arrays import ProblemArrays
from planner.model.bounds import lower_bound
from planner.model.decompose import Piece, decompose
from planner.model.problem import Problem
from planner.model.solution import Solution
from planner.model.start_times import solution_period
from planner.normalise import Windows, arrangements
from planner.options import PlanOptions
from planner.search.assignment import assign
from planner.search.baselines import one_f_one_b
from planner.search.budget import Budget
from planner.search.compiled import ready
from planner.search.list_scheduler import DispatchRule, ListScheduler, in_flight
from planner.search.solve import solve
from schedules.schedule import BackwardMode, OptimizerMode
from schedules.tables.pattern import Pattern, pattern_of, pipeline_classes
from schedules.tables.table import Table

Down = tuple[int, ...]
"""Workers down, by column (stage)."""
Pieces = Sequence[tuple[Piece, Solution]]
Tell = Callable[[str], None]
"""Called with what is being planned."""

PLAN_SECONDS = 0.2
"""At most, for one arrangement of failures; most need a hundredth."""
LARGE = 30_000
"""Compute ops of a job beyond which it is planned piece by piece."""


class Speeds:
    """Throughput by schedule, for one job. All methods give samples per second, 0.0 where no plan exists."""

    def __init__(self, job: Job, *, samples_per_microbatch: float = 1.0, table: Table | None = None,
                 plan_seconds: float = PLAN_SECONDS, tell: Tell = lambda _: None) -> None:
        """Take the job's workers as equally fast.

        Raises NoPlanError when no schedule can run the job, ValueError when the table is of another one.
        """
        ready(tell)
        self.job = msgspec.structs.replace(job, time=msgspec.structs.replace(job.time, slow=()))
        self.workers = job.pipelines * job.stages
        self.samples = samples_per_microbatch * sum(job.microbatches)
        self._options = PlanOptions(method="greedy", time_limit=plan_seconds)
        self._windows: dict[int, Windows] = {}
        problem = self._options.problem(self.job)
        self._tick_seconds = problem.tick_seconds
        self._classes = pipeline_classes(problem.grid, problem.times)
        self._tell = tell
        self._planned: dict[Down, float] = {}
        self._target: dict[int, Down | None] = {}
        self._pieces: dict[Hashable, int] = {}
        self._round_robin: dict[tuple[Down, BackwardMode, OptimizerMode], float] = {}
        self._usual: dict[int, float] = {}
        self._table = _table_periods(table, self.job, self._options) if table is not None else {}

    # --- This planner -------------------------------------------------------------------------------------------------

    def planned(self, down: Down) -> float:
        """This planner's schedule for so many workers down by stage."""
        if down not in self._planned:
            self._planned[down] = self.samples / self._planned_period(down)
        return self._planned[down]

    def target(self, failures: int) -> Down | None:
        """Where normalisation puts this many failures: the best of the dynamic programme's distributions, as planned.

        None when some stage would have no live worker.
        """
        if failures not in self._target:
            self._target[failures] = self._best_distribution(failures)
        return self._target[failures]

    def _best_distribution(self, failures: int) -> Down | None:
        if failures > self.workers - self.job.stages:
            return None
        kept = [down for down in self._table if sum(down) == failures]
        ranked = self._windows_of(self._enough(failures)).distributions(failures)
        choices = dict.fromkeys([*kept, *(counts for *_, counts in ranked), spread(failures, self.job.stages)])
        most = self.samples / (ranked[0][0] * self._tick_seconds) if ranked else math.inf
        best, rate = None, 0.0
        for down in choices:
            if self.planned(down) > rate:
                best, rate = down, self.planned(down)
            if rate >= most * (1 - 1e-12):
                break  # none of any distribution is faster
        return best

    def _planned_period(self, down: Down) -> float:
        self._tell(f"planning {'+'.join(map(str, down))} workers down by stage")
        if down in self._table:
            return self._table[down]
        if any(count >= self.job.pipelines for count in down):
            return math.inf
        best = math.inf
        for problem in self._problems(down, self._options):
            best = min(best, self._period_of(problem, self._search) * problem.tick_seconds)
            if best <= lower_bound(problem) * problem.tick_seconds:
                return best
        # Where time ran out before, ReCycle's rule may have been luckier: its schedules are open to this planner, too.
        return min(best, self.samples / self.round_robin(down))

    def _enough(self, failures: int) -> Job:
        """As many of the job's pipelines as have a part in the failures: more are whole and alike, and change nothing.

        With f (M + 1) of them, a micro-batch more for each of the helpers takes up all work of f broken ones.
        """
        count = self.job.microbatches[0]
        enough = failures * (count + 1) + 1
        if enough >= self.job.pipelines or len(set(self.job.microbatches)) > 1:
            return self.job
        return msgspec.structs.replace(self.job, pipelines=enough, microbatches=(count,) * enough)

    def _windows_of(self, job: Job) -> Windows:
        return self._windows.setdefault(job.pipelines, Windows(job, self._options))

    def _search(self, problem: Problem) -> Pieces:
        """By the list schedulers, for a short time."""
        # The budget's own event is never set: Ctrl-C ends the whole simulation and not this search.
        return solve(problem, "greedy", Budget(deadline=time.monotonic() + self._options.time_limit)).pieces

    def _period_of(self, problem: Problem, solver: Callable[[Problem], Pieces]) -> int:
        """The period in ticks: of the assembled schedule, or for a large job of the slowest piece."""
        if problem.operations <= LARGE:
            return assemble.period(problem, solver(problem))
        return max(self._piece_period(piece.problem, solver) for piece in decompose(problem))

    def _piece_period(self, problem: Problem, solver: Callable[[Problem], Pieces]) -> int:
        key = (solver.__name__, problem.backward, problem.optimizer, problem.grid.microbatches, problem.failed)
        if key not in self._pieces:
            self._pieces[key] = assemble.period(problem, solver(problem))
        return self._pieces[key]

    def _problems(self, down: Down, options: PlanOptions) -> Sequence[Problem]:
        """One for each arrangement over pipelines that differs by more than the pipelines' numbers.

        For a large job, the one in the smallest pieces first; of several, none with huge pieces.
        """
        distinct: dict[Pattern, Problem] = {}
        job = self._enough(sum(down))
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

    def recycle(self, down: Down) -> float:
        """ReCycle as published: 1F1B while no worker is down; else orphans dealt round-robin, split and staggered.

        Healthy workers keep to 1F1B, so that it is never faster than that. The published solver is replaced by list
        schedules, of which the best counts.
        """
        whole = self.usual(self.job.pipelines)
        return min(whole, self.round_robin(down)) if any(down) else whole

    def round_robin(self, down: Down, backward: BackwardMode = "split",
                    optimizer: OptimizerMode = "staggered") -> float:
        """The best of some list schedules with orphans dealt round-robin; fused: with the memory of 1F1B."""
        key = (down, backward, optimizer)
        if key not in self._round_robin:
            self._tell(f"planning ReCycle with {'+'.join(map(str, down))} workers down by stage")
            self._round_robin[key] = self.samples / self._round_robin_period(*key)
        return self._round_robin[key]

    def _round_robin_period(self, down: Down, backward: BackwardMode, optimizer: OptimizerMode) -> float:
        if any(count >= self.job.pipelines for count in down):
            return math.inf
        options = msgspec.structs.replace(self._options, backward=backward, optimizer=optimizer)
        best = math.inf
        for problem in self._problems(down, options):
            best = min(best, self._period_of(problem, _round_robin) * problem.tick_seconds)
            if best <= lower_bound(problem) * problem.tick_seconds:
                break
        return best

    # --- Whole pipelines under 1F1B -----------------------------------------------------------------------------------

    def usual(self, pipelines: int) -> float:
        """1F1B (fused, synchronous) on so many whole pipelines, which share the global batch as evenly as they can."""
        if pipelines < 1:
            return 0.0
        if pipelines not in self._usual:
            self._usual[pipelines] = self.samples / self._usual_period(pipelines)
        return self._usual[pipelines]

    def _usual_period(self, pipelines: int) -> float:
        total = sum(self.job.microbatches)
        counts = self.job.microbatches if pipelines == self.job.pipelines else \
            tuple(total * (index + 1) // pipelines - total * index // pipelines for index in range(pipelines))
        # Pipelines wait for each other only at the end: one with the most micro-batches stands for all.
        job = msgspec.structs.replace(self.job, pipelines=1, microbatches=(max(counts),))
        problem = PlanOptions(method="1f1b").problem(job)
        return solution_period(problem, one_f_one_b(problem)) * problem.tick_seconds

    # --- Yardsticks ---------------------------------------------------------------------------------------------------

    @cached_property
    def whole(self) -> float:
        """The fastest known with all workers alive."""
        return max(self.planned((0,) * self.job.stages), self.usual(self.job.pipelines))

    def limit(self, live: int) -> float:
        """No synchronous training is faster on so many workers: the iteration's work, spread evenly, then one step."""
        if live < 1:
            return 0.0
        clock, depth = self.job.time, self.job.depth
        work = sum(map(sum, zip(clock.forward[:depth], clock.backward_input[:depth], clock.backward_weight[:depth],
                                strict=True)))
        step = min(map(sum, zip(clock.all_reduce, clock.optimizer, strict=True)))
        return self.samples / (work * sum(self.job.microbatches) / live + step)


def spread(failures: int, stages: int) -> Down:
    """One failure a stage, then two, and so on; the last stages first, which have the least to wait for."""
    return tuple(failures // stages + (stage >= stages - failures % stages) for stage in range(stages))


def _table_periods(table: Table, job: Job, options: PlanOptions) -> dict[Down, float]:
    """The best period, in seconds, by workers down in each stage."""
    problem, basis = options.problem(job), table.basis
    if (basis.grid, basis.times, basis.tick_seconds) != (problem.grid, problem.times, problem.tick_seconds):
        raise ValueError(f"{table.folder}: a table of another job: its grid or times differ")
    periods: dict[Down, float] = {}
    for row in table.rows():
        if row.period is not None:
            down = tuple(sum(role.column == column for role in row.failed) for column in range(job.stages))
            periods[down] = min(row.period, periods.get(down, math.inf))
    return periods


def _recycle_rules(problem: Problem) -> Iterator[DispatchRule]:
    """List schedules in place of ReCycle's solver: in flight whatever memory holds, or as 1F1B, or twice that."""
    for ignore in (True, False) if problem.times.transfer else (True,):
        for factor in (0, 1, 2):
            yield DispatchRule(ignore_transfers=ignore, in_flight=in_flight(problem, factor) if factor else None)


def _round_robin(problem: Problem) -> Pieces:
    return [(piece, _best_round_robin(piece.problem)) for piece in decompose(problem)]


def _best_round_robin(problem: Problem) -> Solution:
    if problem.backward == "fused":
        return one_f_one_b(problem)
    bound = lower_bound(problem)
    orders = ListScheduler(ProblemArrays(problem, assign(problem, "round-robin")))
    best, found = math.inf, None
    for rule in _recycle_rules(problem):
        if (period := orders.period(rule)) < best:
            best, found = period, orders.solution()
        if best <= bound:
            break
    assert found is not None
    return found
