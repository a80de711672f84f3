"""Compute the final answer to failures: layers moved over all live workers.

A failure is first answered with the layers in place (`throughput`). While that schedule runs,
layers move, and the rebalanced schedule follows. The answer then depends on the numbers of dead and
slow workers and hardly on which they are, because any worker may hold any layers. If a table has
answers with layers moved, these are used. Large jobs are planned as groups of pipelines, each with
its share of the failures; the group with the most failures counts.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from slipstream.planner import NoPlanError, normalised
from slipstream.planner.job.file import Job
from slipstream.planner.options import PlanOptions
from slipstream.planner.periods import work_bound_seconds
from slipstream.planner.plan import plan_only
from slipstream.planner.report import layers_received
from slipstream.planner.simulation.loads import LAYERS_PER_STAGE
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.pattern import count_key, settled_key
from slipstream.schedules.tables.table import Table

SETTLE_SECONDS = 0.5
"""Largest default time for one plan, in seconds of a fixed number of steps each."""
SECONDS_PER_OP = 2e-4
"""Time for each compute op of a small job's plan, in seconds of search steps."""
TRIAL_SHARE = 0.25
"""Share of a plan's time in which each choice of dead workers is tried first."""
MIN_GROUP_PIPELINES = 8
"""Minimum number of pipelines of a group. A job of at least two groups is planned in groups."""


class RebalancedPlan(NamedTuple):
    """Period of a plan with layers moved, and the most stages that a worker receives."""

    period: float
    """Period in seconds."""
    stages_moved: float
    """Most layers that one worker receives, divided by the mean layers of a column."""


class SlowWorkerCount(NamedTuple):
    """Number of slow live workers, and the factor of the slowest, assumed for all."""

    workers: int
    factor: float
    """Factor by which the ops of these workers take longer."""


NO_SLOW_WORKERS = SlowWorkerCount(0, 1.0)


class RebalancedPlans:
    """Plans of a job with layers moved, each made once and then kept."""

    def __init__(
        self,
        job: Job,
        announce: Callable[[str], None] = lambda _: None,
        plan_seconds: float | None = None,
        dead: Sequence[Worker] = (),
        table: Table | None = None,
    ) -> None:
        """Prepare to plan a job with layers moved, a large one in groups of pipelines.

        The time `plan_seconds` for one plan is in seconds of a fixed number of search steps each;
        None: by the size of the job. Where two choices of dead workers stand for all, both are
        tried for `TRIAL_SHARE` of that time, and the better one for the time that this leaves.
        Without `dead`, plans are list schedules; with it, they are searched by CP-SAT, and if the
        job is undivided, these workers are dead in the plan for as many failures. Schedules in
        `table`, which is of this job, are not planned again. The function `announce` receives a
        line of text before each plan.
        """
        layers = job.layers or (LAYERS_PER_STAGE,) * len(job.columns)
        self._layers_per_stage = sum(layers[: job.depth]) / job.stages
        self._job = msgspec.structs.replace(job, layers=layers)
        self._announce = announce
        self._options = PlanOptions(method="cp-sat" if dead else "greedy", layers="move", steps=0)
        self._dead = sorted(dead)
        self._seconds, self._table = plan_seconds, table
        self._plans: dict[tuple[int, int, SlowWorkerCount], RebalancedPlan | None] = {}

    def find_best(
        self, failures: int, slow: SlowWorkerCount = NO_SLOW_WORKERS
    ) -> RebalancedPlan | None:
        """Return the best plan with layers moved for this many failures. None if none is found.

        The result may be the plan for one failure more, in which a live worker idles, so that a
        failure never makes the job faster. If workers are slow, only plans for exactly this case
        are considered. Raises TableError for an entry of the table that cannot be used.
        """
        job = self._job
        divides = len(set(job.microbatches)) == 1 and self._find_in_table(failures) is None
        # The group with the most failures decides, so only that one is planned.
        groups = max(1, job.pipelines // MIN_GROUP_PIPELINES) if divides else 1
        pipelines, share = job.pipelines // groups, -(-failures // groups)
        if slow.workers:
            return self._cached_plan(
                pipelines, share, SlowWorkerCount(-(-slow.workers // groups), slow.factor)
            )
        exact = self._cached_plan(pipelines, share)
        # A plan that no plan for more failures can beat needs no comparison.
        if self._is_known_dead(pipelines, share) or (
            exact and exact.period <= self._period_bound(pipelines, share + 1)
        ):
            return exact
        with_one_more = self._cached_plan(pipelines, share + 1)
        return (
            with_one_more
            if exact is None or (with_one_more and with_one_more.period < exact.period)
            else exact
        )

    def _find_in_table(self, failures: int) -> Schedule | None:
        """Return the table's schedule with layers moved for so many failures; None without one."""
        if self._table is None:
            return None
        if self._dead and failures == len(self._dead):
            lookup = self._table.lookup(self._dead, settled=True)
            return lookup.schedule if lookup else None
        key = settled_key(count_key(failures))
        if not any(row.key == key and row.period for row in self._table.rows()):
            return None
        return self._table.checked_schedule(key)

    def _summarize(self, schedule: Schedule) -> RebalancedPlan:
        layers = max(map(len, layers_received(schedule).values()), default=0)
        return RebalancedPlan(_period_seconds(schedule), layers / self._layers_per_stage)

    def _cached_plan(
        self, pipelines: int, failures: int, slow: SlowWorkerCount = NO_SLOW_WORKERS
    ) -> RebalancedPlan | None:
        key = pipelines, failures, slow
        if (
            key not in self._plans
            and pipelines == self._job.pipelines
            and not slow.workers
            and (schedule := self._find_in_table(failures))
        ):
            self._plans[key] = self._summarize(schedule)
        if key not in self._plans:
            # Neither known nor in the table.
            few = f" and {slow.workers} slow" if slow.workers else ""
            self._announce(
                f"planning for {failures} of {pipelines * self._job.stages} workers down{few}, "
                "with layers moved"
            )
            self._plans[key] = self._search_plan(*key)
        return self._plans[key]

    def _is_known_dead(self, pipelines: int, failures: int) -> bool:
        """Return whether the failures are those of the workers `dead`, in the undivided job."""
        return bool(self._dead) and pipelines == self._job.pipelines and failures == len(self._dead)

    def _make_job_part(self, pipelines: int) -> Job:
        """Return the job reduced to its first `pipelines` pipelines."""
        return msgspec.structs.replace(
            self._job, pipelines=pipelines, microbatches=self._job.microbatches[:pipelines]
        )

    def _period_bound(self, pipelines: int, failures: int) -> float:
        """Return a lower bound in seconds on any plan's period for this many failures."""
        job = self._make_job_part(pipelines)
        if failures >= pipelines * job.stages:
            return math.inf
        return work_bound_seconds(job, stack_failures(failures, job.stages))

    def _search_plan(
        self, pipelines: int, failures: int, slow: SlowWorkerCount
    ) -> RebalancedPlan | None:
        job, affected = self._make_job_part(pipelines), failures + slow.workers
        if failures >= pipelines * job.stages or affected > pipelines * job.stages:
            return None
        # With layers moved it matters little who is dead: two extremes stand for all choices.
        chosen = [stack_failures(affected, job.stages)]
        if affected > 1:
            chosen.append(spread_over_pipelines(affected, pipelines, job.stages))
        if self._is_known_dead(pipelines, failures) and not slow.workers:
            chosen = [self._dead]
        # Of two choices of dead workers, a trial shows the better one, which gets the rest.
        plans: list[Schedule | None] = []
        for workers in chosen if len(chosen) > 1 else ():
            plans.append(self._search_schedule(job, workers, failures, slow, TRIAL_SHARE))
        best = min(filter(None, plans), key=_period_seconds, default=None)
        for workers in chosen if best is None else [chosen[plans.index(best)]]:
            plan = self._search_schedule(
                job, workers, failures, slow, 1.0 - TRIAL_SHARE if plans else 1.0
            )
            best = min(filter(None, (best, plan)), key=_period_seconds, default=None)
        return None if best is None else self._summarize(best)

    def _search_schedule(
        self, job: Job, chosen: Sequence[Worker], failures: int, slow: SlowWorkerCount, share: float
    ) -> Schedule | None:
        """Return the schedule found in a `share` of a plan's seconds; None without one."""
        # The first `failures` chosen workers are dead, the others slow.
        failed = chosen[:failures]
        slowed = tuple((worker, slow.factor) for worker in sorted(chosen[failures:]))
        job = msgspec.structs.replace(job, time=msgspec.structs.replace(job.time, slow=slowed))
        ops = 3 * job.depth * sum(job.microbatches)
        seconds = (
            min(SETTLE_SECONDS, SECONDS_PER_OP * ops) if self._seconds is None else self._seconds
        )
        options = self._options.with_limit(share * seconds)
        try:
            if self._dead and failed == self._dead:
                return normalised(job, failed, options).schedule
            return plan_only(options, job, failed).schedule
        except NoPlanError:
            return None


def _period_seconds(schedule: Schedule) -> float:
    return schedule.seconds(schedule.period_ticks)


def stack_failures(failures: int, stages: int) -> list[Worker]:
    """Return this many failed workers, which are in as few pipelines as possible."""
    return [Worker(index // stages, index % stages) for index in range(failures)]


def spread_over_pipelines(failures: int, pipelines: int, stages: int) -> list[Worker]:
    """Return failed workers spread evenly over pipelines, in diagonals over the stages.

    The first is in the last stage of the first pipeline; each further pipeline has one a stage
    earlier, and each further round over the pipelines begins a stage earlier than the round before.
    What comes before the first stage is the last one.
    """
    return [
        Worker(index % pipelines, (stages - 1 - index % pipelines - index // pipelines) % stages)
        for index in range(failures)
    ]
