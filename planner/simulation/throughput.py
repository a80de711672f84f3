"""Steady-state throughput of the schedules that policies run, in samples per second.

Each schedule is planned once, in counted search steps (`planner.periods`), so that a job has the
same figures on any machine. With a table, the periods of its entries are used if they fit.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, Literal, Self, TypeVar

import msgspec

from slipstream.planner.job.file import Job
from slipstream.planner.options import PlanOptions
from slipstream.planner.periods import Periods
from slipstream.planner.plan import plan_only
from slipstream.planner.simulation.loads import DownByStage, Loads, spread_over_stages
from slipstream.planner.simulation.settled import NO_SLOW_WORKERS, RebalancedPlans, SlowWorkerCount
from slipstream.schedules.schedule import BackwardMode, OptimizerMode, Worker
from slipstream.schedules.tables.table import Table

Value = TypeVar("Value")
SearchMethod = Literal["cp-sat", "greedy"]
"""Methods of `slipstream plan` by which schedules are searched."""

PLAN_SECONDS = 0.2
"""Default maximum seconds of a plan, in counted search steps. Most plans need a hundredth."""


class Throughputs:
    """Samples per second of a job, by kind of schedule and failures.

    The rate is 0.0 if a stage has no live worker, or if no plan with layers moved is found. Other
    plans raise NoPlanError or StuckError if workers lack the memory for any schedule.
    """

    def __init__(
        self,
        job: Job,
        *,
        samples_per_microbatch: float = 1.0,
        table: Table | None = None,
        plan_seconds: float = PLAN_SECONDS,
        settle_seconds: float | None = None,
        thorough: bool = False,
        dead: Sequence[Worker] = (),
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare to plan a job, all of whose workers count as equal.

        Factors of slow workers do not count; memory of single workers (`capacity_of`) only in the
        periods of a table. Raises NoPlanError if no schedule can run the job, and ValueError if the
        table is of another job.

        Parameters
        ----------
        job
            Job to plan.
        samples_per_microbatch
            Number of samples in a micro-batch.
        table
            Table of schedules of this job, whose periods are not planned again.
        plan_seconds, settle_seconds
            Seconds for one plan, in counted search steps, with layers in place and with layers
            moved; None: by the size of the job.
        thorough
            True if plans with layers in place are searched as by `slipstream plan`, may cut
            micro-batches within a stage, and each take all of `plan_seconds`. Otherwise they are
            list schedules, most of which take a hundredth of it.
        dead
            Workers that are dead in plans for as many failures; with layers in place, only if the
            failures are also in the same columns. All other plans choose the dead workers.
        announce
            Function that receives one line before each plan.
        """
        memory = job.memory and job.memory.with_equal_rooms(job.pipelines)
        time = msgspec.structs.replace(job.time, slow=())
        self.job = msgspec.structs.replace(job, time=time, memory=memory)
        self.workers = job.pipelines * job.stages
        self.samples = samples_per_microbatch * sum(job.microbatches)
        self._options = PlanOptions(method="greedy", steps=0, slices=False).with_limit(plan_seconds)
        self._thorough, self._dead = thorough, sorted(dead)
        self._periods = Periods(self.job, self._options, announce)
        self._announce = announce
        self.loads = Loads(self.job)
        self._rebalanced_plans = RebalancedPlans(self.job, announce, settle_seconds, dead, table)
        self._plans: dict[Hashable, Any] = {}
        self._rates: dict[Hashable, Any] = {}
        self._table = (
            _read_table_periods(table, self.job, self._options) if table is not None else {}
        )
        self.plans_pipelines = False
        """True if whole pipelines run this planner's schedules, and not 1F1B."""

    def compute_once(self, key: Hashable, find: Callable[[], Value]) -> Value:
        """Return the result of `find`, which is called only once for each `key`."""
        return _find_once(self._rates, key, find)

    def _plan_once(self, key: Hashable, find: Callable[[], Value]) -> Value:
        """Return the result of `find`, called only once for each `key`, copies included."""
        # So `find` must not depend on `plans_pipelines`.
        return _find_once(self._plans, key, find)

    def with_planned_pipelines(self) -> Self:
        """Return a copy in which other systems run this planner's schedules, too.

        Systems are then compared by how they handle failures alone. The copy shares all plans.
        """
        other = copy.copy(self)
        other.plans_pipelines, other._rates = True, {}
        return other

    # --- This planner -----------------------------------------------------------------------------

    def planned_rate(self, down: DownByStage) -> float:
        """Return Slipstream's samples per second in place, with `down` dead workers by stage."""
        return self._plan_once(("planned", down), lambda: self.samples / self._plan_period(down))

    def in_place_rate(self, down: DownByStage) -> float:
        """Return the samples per second of the best schedule with layers in place.

        The argument `down` has the number of dead workers of each stage. The schedule is
        Slipstream's, or that of the pipelines without dead workers if these are faster: they then
        share the batch, by Slipstream's schedule or 1F1B. The rate is at most that with all workers
        alive, even if the search found a faster schedule for fewer workers by chance.
        """
        return self._plan_once(("in place", down), lambda: self._compute_in_place_rate(down))

    def _compute_in_place_rate(self, down: DownByStage) -> float:
        pipelines = self.job.pipelines - max(down)
        rate = max(self.planned_rate(down), self.one_f_one_b_rate(pipelines))
        if not any(down):
            return rate
        return min(
            max(rate, self._planned_pipelines_rate(pipelines)),
            self.in_place_rate((0,) * self.job.stages),
        )

    def rebalanced_answer(
        self, failures: int, slow: SlowWorkerCount = NO_SLOW_WORKERS
    ) -> tuple[float, float]:
        """Return the samples per second with layers moved, and the most that a worker loads.

        The latter is the number of layers that one worker loads at most after this many failures,
        divided by the model's layers per column. The argument `slow` has the number and the factor
        of live workers that are slow. The result is (0.0, 0.0) if no plan exists. The rate is at
        most that with all workers alive at the usual speed.
        """
        return self._plan_once(
            ("settled", failures, slow), lambda: self._compute_rebalanced_answer(failures, slow)
        )

    def _compute_rebalanced_answer(
        self, failures: int, slow: SlowWorkerCount
    ) -> tuple[float, float]:
        plan = self._rebalanced_plans.find_best(failures, slow)
        rate, moved = (self.samples / plan.period, plan.stages_moved) if plan else (0.0, 0.0)
        return min(rate, self.whole_rate) if failures or slow != NO_SLOW_WORKERS else rate, moved

    @property
    def whole_rate(self) -> float:
        """Samples per second with all workers alive, in place or with layers moved, the faster."""
        return max(self.in_place_rate((0,) * self.job.stages), self.rebalanced_answer(0)[0])

    def normal_form(self, failures: int) -> DownByStage | None:
        """Return the dead workers by stage of the fastest schedule found for this many failures.

        Any workers may have failed, since live ones may take over their roles. None if a stage
        would have no live worker.
        """
        return self._plan_once(
            ("normal form", failures), lambda: self._find_best_distribution(failures)
        )

    def _find_best_distribution(self, failures: int) -> DownByStage | None:
        if failures > self.workers - self.job.stages:
            return None
        # Distributions of a table and those of the best bounds come before the even one.
        in_table = [down for down in self._table if sum(down) == failures]
        windows = self._periods.window_bounds(failures)
        ranked = windows.best_distributions(failures)
        even = spread_over_stages(failures, self.job.stages)
        choices = dict.fromkeys([*in_table, *(counts for *_, counts in ranked), even])
        bound = self.samples / (ranked[0][0] * windows.tick_seconds) if ranked else math.inf
        best, rate = None, 0.0
        for down in choices:
            if self.planned_rate(down) > rate:
                best, rate = down, self.planned_rate(down)
            if rate >= bound * (1 - 1e-12):
                break  # no distribution is faster
        return best

    def _plan_period(self, down: DownByStage) -> float:
        self._announce(f"planning with {'+'.join(map(str, down))} workers down by stage")
        if any(count >= self.job.pipelines for count in down):
            return math.inf
        if down in self._table:
            return self._table[down]
        # In a large job every failure has peers of its own: plans for one failure in each stage are
        # combined where the result is proven to be the shortest.
        independent_rate = self._independent_rate(down, self.planned_rate)
        if independent_rate and self.samples / independent_rate <= self._single_failure_bound(down):
            return self.samples / independent_rate
        period, is_best = (
            self._search_period(self.job, down)
            if self._thorough
            else self._periods.planned_period(down)
        )
        # If time ran out, ReCycle's rule may have found a better schedule, which this planner may
        # also use.
        period = period if is_best else min(period, self.samples / self.round_robin_rate(down))
        # If dropping whole pipelines would be faster, cut micro-batches within stages, too.
        if self._thorough or not self._is_behind_dropping(down, period):
            return period
        return min(period, self._search_period(self.job, down, "greedy")[0])

    def _is_behind_dropping(self, down: DownByStage, period: float) -> bool:
        """Return whether at this period, dropping the pipelines with dead workers is faster."""
        left = (self.job.pipelines - max(down)) / self.job.pipelines
        whole = (0,) * self.job.stages
        return (
            any(down)
            and not self._periods.is_large
            and self.samples / period < left * self.planned_rate(whole)
        )

    def _search_period(
        self, job: Job, down: DownByStage, method: SearchMethod = "cp-sat"
    ) -> tuple[float, bool]:
        """Return the period in seconds of `slipstream plan --method`, and whether it is optimal."""
        columns = [column for column, count in enumerate(down) for _ in range(count)]
        failed = [Worker(index % job.pipelines, column) for index, column in enumerate(columns)]
        if job is self.job and sorted(worker.column for worker in self._dead) == columns:
            failed = self._dead
        schedule = plan_only(
            msgspec.structs.replace(self._options, method=method, slices=True), job, failed
        ).schedule
        return schedule.seconds(schedule.period_ticks), schedule.status == "optimal"

    def _independent_rate(self, down: DownByStage, rate: Callable[[DownByStage], float]) -> float:
        """Return a large job's least `rate` with one or no failure; 0.0 if they interact."""
        job, failures, periods = self.job, sum(down), self._periods
        # Failures of a small job, or of too few pipelines, have peers in common.
        if (
            failures < 2
            or not periods.is_large
            or periods.affected_job(failures).pipelines == job.pipelines
        ):
            return 0.0
        # The slowest column with a failure decides.
        parts = []
        for column, count in enumerate(down):
            if count:
                parts.append(tuple(int(other == column) for other in range(job.stages)))
        return min(rate(part) for part in ((0,) * job.stages, *parts))

    def _single_failure_bound(self, down: DownByStage) -> float:
        """Return a lower bound on the period in seconds with `down` dead workers by stage."""
        windows = self._periods.window_bounds(1)
        return windows.to_seconds(
            max(windows.column_bound(column, 1) for column, count in enumerate(down) if count)
        )

    # --- ReCycle ----------------------------------------------------------------------------------

    def recycle_rate(self, down: DownByStage) -> float:
        """Return the samples per second of ReCycle as published.

        The argument `down` has the number of dead workers of each stage. Without failures, ReCycle
        is 1F1B. Otherwise it splits the backward into I and W, staggers the optimizer, and
        re-routes micro-batches round-robin. Its healthy workers keep to 1F1B, so it is never faster
        than without failures. The best of some list schedules replaces the published solver. With
        `plans_pipelines`, ReCycle has this planner's schedules instead, re-routed ones too.
        """
        if self.plans_pipelines:
            return self.in_place_rate(down)
        whole = self.one_f_one_b_rate(self.job.pipelines)
        if not any(down) or self._independent_rate(down, self.recycle_rate) == whole:
            return whole
        return min(whole, self.round_robin_rate(down))

    def round_robin_rate(
        self,
        down: DownByStage,
        backward: BackwardMode = "split",
        optimizer: OptimizerMode = "staggered",
    ) -> float:
        """Return the samples per second of the best list schedule with round-robin re-routing.

        The argument `down` has the number of dead workers of each stage. With a fused backward, the
        schedule is 1F1B's with re-routing.
        """

        def compute_rate() -> float:
            self._announce(
                f"planning ReCycle with {'+'.join(map(str, down))} workers down by stage"
            )
            options = msgspec.structs.replace(self._options, backward=backward, optimizer=optimizer)
            return self.samples / self._periods.round_robin_period(down, options)

        return self._plan_once(("round robin", down, backward, optimizer), compute_rate)

    # --- Whole pipelines --------------------------------------------------------------------------

    def one_f_one_b_rate(self, pipelines: int) -> float:
        """Return the samples per second of 1F1B (fused, synchronous) on so many whole pipelines."""
        if pipelines < 1:
            return 0.0
        return self._plan_once(
            ("1f1b", pipelines), lambda: self.samples / self._one_f_one_b_period(pipelines)
        )

    def whole_pipelines_rate(self, pipelines: int) -> float:
        """Return the samples per second of whole pipelines that share the global batch evenly.

        The pipelines run 1F1B or, if `plans_pipelines`, this planner's schedule where that is
        faster.
        """
        rate = self.one_f_one_b_rate(pipelines)
        return max(rate, self._planned_pipelines_rate(pipelines)) if self.plans_pipelines else rate

    def _planned_pipelines_rate(self, pipelines: int) -> float:
        """Return the samples per second of this planner's schedule on whole pipelines."""
        if pipelines == self.job.pipelines:
            return self.in_place_rate((0,) * self.job.stages)
        return self._plan_once(
            ("planned pipelines", pipelines),
            lambda: self.samples / self._planned_pipelines_period(pipelines),
        )

    def _planned_pipelines_period(self, pipelines: int) -> float:
        if pipelines < 1:
            return math.inf
        self._announce(f"planning {pipelines} whole pipelines")
        job = msgspec.structs.replace(
            self.job, pipelines=pipelines, microbatches=self._share_batch(pipelines)
        )
        whole = (0,) * job.stages
        return (
            self._search_period(job, whole)[0]
            if self._thorough
            else Periods(job, self._options).planned_period(whole)[0]
        )

    def _share_batch(self, pipelines: int) -> tuple[int, ...]:
        """Return how many micro-batches each pipeline has if so many share the job's."""
        total = sum(self.job.microbatches)
        if pipelines == self.job.pipelines:
            return self.job.microbatches
        return tuple(
            total * (index + 1) // pipelines - total * index // pipelines
            for index in range(pipelines)
        )

    def scale_by_formula(self, whole: float, now: float) -> float:
        """Return the samples per second of a system, from a formula for its iteration times.

        By the formula, the micro-batches of an iteration take `whole` seconds with all workers
        alive, and `now` seconds after failures. To both are added the all-reduce and step of the
        stage where they take longest; their ratio scales the rate of whole pipelines.
        """
        step = self.loads.longest_step
        return self.whole_pipelines_rate(self.job.pipelines) * (whole + step) / (now + step)

    def _one_f_one_b_period(self, pipelines: int) -> float:
        # Pipelines wait for each other only at the end: the one with the most micro-batches
        # decides.
        return self._periods.one_f_one_b_period(max(self._share_batch(pipelines)))

    # --- Reference --------------------------------------------------------------------------------

    @cached_property
    def fault_free_rate(self) -> float:
        """Samples per second of Slipstream in place or of 1F1B, the faster, with all alive."""
        return max(
            self.planned_rate((0,) * self.job.stages), self.one_f_one_b_rate(self.job.pipelines)
        )

    def work_conserving_rate(self, live: float) -> float:
        """Return an upper bound on the samples per second of any synchronous training.

        The argument `live` is the number of live workers; one at half speed counts half.
        """
        return self.samples / self.loads.work_conserving_seconds(live)


def _read_table_periods(table: Table, job: Job, options: PlanOptions) -> dict[DownByStage, float]:
    """Return the shortest period in place, in seconds, by the dead workers of each stage."""
    problem, basis = options.make_problem(job), table.basis
    if (basis.grid, basis.times, basis.tick_seconds) != (
        problem.grid,
        problem.times,
        problem.tick_seconds,
    ):
        raise ValueError(f"{table.folder}: the table is of another job: its grid or times differ")
    periods: dict[DownByStage, float] = {}
    for row in table.rows():
        if row.period is not None and row.layers_moved is None:  # otherwise layers have moved
            failed = Counter(role.column for role in row.failed)
            down = tuple(failed[column] for column in range(job.stages))
            periods[down] = min(row.period, periods.get(down, math.inf))
    return periods


def _find_once(found: dict[Hashable, Any], key: Hashable, find: Callable[[], Value]) -> Value:
    if key not in found:
        found[key] = find()
    value: Value = found[key]
    return value
