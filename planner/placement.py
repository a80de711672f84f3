"""Choose the pipeline itself: virtual stages, their workers, layers and order.

All that a job file can state is searched: one stage after another, interleaved, V and zig-zag with
any number of virtual stages for each worker, both directions, any column for each virtual stage,
and any division of the layers. Healthy pipelines are equal, so one of them decides, at first with
about `COMPARED_OPS` ops at most, plus the busiest worker's work of the other micro-batches:
  1. every placement of the literature, with the division whose busiest worker has least to do, by a
     few list schedules;
  2. the best few of different placements are changed at random (a layer goes to a virtual stage
     nearby, two virtual stages exchange workers); a change that is no worse is kept, again by list
     schedules;
  3. the best of these, and the job's own, by the whole search;
  4. if failures count, each finalist is planned with 1, 2 ... K vacant roles (`planner.normalise`),
     and the one with the highest mean throughput is taken;
  5. the rest of the time plans the whole job, beginning with the best order of step 3.

A change is not considered if some worker then has as much work as the period before.
"""

import math
import random
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from slipstream.planner.blockwise import TooLargeError
from slipstream.planner.budget import Budget, Clock, ProgressCallback, ignore_progress
from slipstream.planner.compiled import ensure_compiled
from slipstream.planner.job.arrangement import Arrangement, MovableLayers
from slipstream.planner.job.divisions import StageLoads, change_at_random, known_placements
from slipstream.planner.job.file import Job, JobError, parse_job
from slipstream.planner.job.layers import limited_ratio, memory_ratio
from slipstream.planner.model.assemble import with_converted_bound
from slipstream.planner.model.bounds_placements import placement_bound
from slipstream.planner.model.from_job import build_layered_problem, choose_memory_unit, choose_tick
from slipstream.planner.model.problem import AllowedLayouts, Bound, NoPlanError, Problem
from slipstream.planner.normalise import normal_form
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import Plan, plan_only
from slipstream.planner.recompute import (
    Recomputation,
    choose_recomputation,
    chooses_recomputation,
    with_bound_of_choices,
    with_one_pipeline,
    with_recomputation,
)
from slipstream.planner.search.improvement import improve_by_list_schedules
from slipstream.planner.search.incumbent import SolvedPiece, divide_problem
from slipstream.planner.search.list_scheduler import StuckError
from slipstream.schedules.schedule import LayerCosts, Schedule, Scope

COMPARED_OPS = 6_000
"""Maximum number of ops of the pipeline that list schedules compare placements by.

It has more if two micro-batches for each worker have more.
"""
SEEDS = 6
"""Number of placements that are changed at random."""
FINALISTS = 3
"""Number of placements that are planned by the whole search, besides the job's own."""
FIRST_SHARE = 0.12
"""Share of the time left for all placements of the literature."""
CHANGES_SHARE = 0.4
"""Share of the time left, after the placements of the literature, for random changes."""
FINAL_SHARE = 0.45
"""Share of the time left, after random changes, for the plans of the finalists."""
FAILURES_SHARE = 0.5
"""Share of the time left, after these plans, for the finalists' plans with failures."""
QUICK_TRIES = 10
"""Number of list schedules for which a compared placement gets time."""
MAX_WEIGHED_FAILURES = 64
"""Maximum number of failures that a search for a placement takes into account."""
MEAN_DOWN_SHARE = 0.01
"""Default share of the time for which each worker is down."""
RECOMPUTED_SHARES = (0.0, 0.5, 1.0)
"""Shares of the stages, from the first on, that recompute when placements are compared."""


class TriedPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Placement and division of a job's layers that was tried, with its periods."""

    arrangement: Arrangement
    job: Job
    period: float
    """Period in seconds with all workers alive.

    It is that of a single pipeline until the whole job is planned.
    """
    again: tuple[int, ...] = ()
    """Stages that recompute their activations."""
    with_failures: tuple[float, ...] = ()
    """Periods in seconds with 1, 2 ... roles vacant."""

    def mean_period(self, weights: Sequence[float]) -> float:
        """Return the period in seconds that corresponds to the mean throughput over failures.

        Throughputs are weighed by the probabilities of 0, 1 ... failures, `weights`.
        """
        # Throughput is 1 / period, so this is a weighted harmonic mean.
        periods = (self.period, *self.with_failures)
        used = weights[: len(periods)]
        return sum(used) / sum(
            weight / period for weight, period in zip(used, periods, strict=True)
        )


class FoundPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search for a placement: job file, plan, and periods to compare."""

    text: str
    """Text of the job file with the placement and division that were found."""
    job: Job
    arrangement: Arrangement
    plan: Plan
    """Plan with all workers alive. Its bound holds for all placements if that can be proven."""
    recomputation: Recomputation | None
    """Choice of the stages that recompute their activations; None: the job states it."""
    own_period: float | None
    """Period in seconds of one pipeline in the job's own placement; None without one."""
    with_failures: tuple[float, ...]
    """Periods in seconds with 1, 2 ... roles vacant; empty if none counted or had a plan."""
    mean_period: float
    """Period in seconds that corresponds to the mean throughput over numbers of failures."""
    looked_at: int
    """Number of placements and divisions for which a plan was found."""


def find_placement(
    text: str,
    options: PlanOptions,
    *,
    failures: int = 0,
    down: float = MEAN_DOWN_SHARE,
    progress: ProgressCallback = ignore_progress,
    clock: Clock | None = None,
) -> FoundPlacement:
    """Search for the placement of a job's layers with the largest mean throughput; plan it.

    Search and plan together take about the time limit of one plan; the inner loops are compiled
    first. Raises JobError if the file is wrong, a stage has no layer, or the limit is too short for
    the job (TooLargeError); NoPlanError if nothing fits.

    Parameters
    ----------
    text
        Text of the job file, which must extend no other.
    options
        Options of the plans.
    failures
        Largest number of workers down at once that the mean throughput counts.
    down
        Share of the time for which each worker is down, above 0 and below 1.
    progress
        Receives a line of text for each better placement.
    clock
        Clock of a search that this one is part of; None: one of its own.
    """
    return _Search(
        MovableLayers(text), options, failures, down, progress, clock or options.make_clock()
    ).find_best()


def failure_weights(workers: int, failures: int, down: float) -> list[float]:
    """Return the probabilities that 0, 1 ... `failures` of the workers are down at once.

    Each of the `workers` (a number) is down for a share `down` of the time, above 0 and below 1.
    """
    # The binomial distribution, by logarithms, as its factors overflow.
    return [
        math.exp(
            math.lgamma(workers + 1)
            - math.lgamma(count + 1)
            - math.lgamma(workers - count + 1)
            + count * math.log(down)
            + (workers - count) * math.log1p(-down)
        )
        for count in range(min(failures, workers) + 1)
    ]


# --- The bound ------------------------------------------------------------------------------------


def movable_layers_problem(layers: MovableLayers, options: PlanOptions) -> Problem:
    """Return a problem for bounds, in which layers cost no more than in any placement.

    Raises NoPlanError if the job's own placement has no schedule.
    """
    # Only the costs of single layers count, not where the job's own placement has them.
    job = layers.job
    problem = options.make_problem(job)
    below = build_layered_problem(
        job,
        (),
        AllowedLayouts(layers="move"),
        backward=problem.backward,
        optimizer=problem.optimizer,
        down=True,
    )
    costs = below.costs
    if job.network.overlap:  # reductions may go on beside all compute
        costs = msgspec.structs.replace(costs, all_reduce=(0,) * layers.layers)
    # A layer holds the least of what it holds with and without recomputation.
    if chooses_recomputation(job) and any(layers.costs.recomputed):
        unit = choose_memory_unit(job, layers.costs)
        least = tuple(
            min(activation, math.floor(recomputed / unit))
            for activation, recomputed in zip(
                costs.activation, layers.costs.recomputed, strict=True
            )
        )
        stash = costs.weight_stash
        # A first stage that leaves its backward to W may hold as little until then.
        if layers.input_free:
            stash = tuple(map(min, stash, least))
        costs = msgspec.structs.replace(costs, activation=least, weight_stash=stash)
    # A layer of a first stage without I has one in any other stage.
    inputs, weights = layers.backward_floor_ticks(choose_tick(job, layers.costs))
    return msgspec.structs.replace(
        below, costs=msgspec.structs.replace(costs, backward_input=inputs, backward_weight=weights)
    )


def bound_over_placements(layers: MovableLayers, options: PlanOptions) -> tuple[Bound, Problem]:
    """Return a bound on the period over all placements, and the problem it is for.

    The bound is in ticks of that problem, in which layers cost no more than in any placement.
    Raises NoPlanError if the job's own placement has no schedule.
    """
    below = movable_layers_problem(layers, options)
    return placement_bound(below, input_free=layers.input_free), below


def _with_placement_bound(
    schedule: Schedule, layers: MovableLayers, options: PlanOptions
) -> Schedule:
    """Return a copy with the bound over all placements, if that holds for the schedule."""
    # The bound is not proven for shared work, nor for reductions that overlap compute.
    if schedule.scope is not Scope.OWN or schedule.has_overlap:
        return schedule
    bound, below = bound_over_placements(layers, options)
    per_tick = limited_ratio(schedule.tick_seconds, below.tick_seconds)
    per_unit = (
        memory_ratio(schedule.memory.unit, below.memory.unit)
        if schedule.memory and below.memory
        else limited_ratio(1, 1)
    )
    # The costs of layers let others prove the bound again from the schedule file alone.
    layer_costs = LayerCosts(
        per_tick=per_tick.as_integer_ratio(),
        per_unit=per_unit.as_integer_ratio(),
        **msgspec.structs.asdict(below.costs),
    )
    times = msgspec.structs.replace(schedule.times, of_layers=layer_costs)
    return with_converted_bound(
        msgspec.structs.replace(schedule, times=times), bound, below.tick_seconds
    )


# --- The search -----------------------------------------------------------------------------------


class _Search:
    def __init__(
        self,
        layers: MovableLayers,
        options: PlanOptions,
        failures: int,
        down: float,
        progress: ProgressCallback,
        clock: Clock,
    ) -> None:
        self._layers, self._options, self._clock, self._progress = layers, options, clock, progress
        self._loads = StageLoads(layers)
        self._weights = failure_weights(layers.job.pipelines * layers.job.stages, failures, down)
        self._failures = failures
        self._deadline = clock.now() + options.limit_seconds
        self._tried: dict[Arrangement, TriedPlacement | None] = {}
        self._solved: list[SolvedPiece] = []
        self._again, self._shortest = chooses_recomputation(layers.job), math.inf

    def find_best(self) -> FoundPlacement:
        """Run the search and return the best placement; raise NoPlanError if nothing fits."""
        ensure_compiled(self._progress)
        # Evaluate what the literature knows, and change the best at random.
        job_arrangement = self._layers.own_arrangement
        self._evaluate_all(job_arrangement, self._budget_share(FIRST_SHARE))
        self._change_best(self._budget_share(CHANGES_SHARE))
        tried = self._sort_tried()
        if not tried:
            raise NoPlanError(
                "no placement of the layers over the workers has room for the micro-batches in "
                "flight"
            )
        # Plan the best few, and the job's own, in earnest.
        finalists = tried[:FINALISTS]
        finalists += [entry for entry in tried[FINALISTS:] if entry.arrangement == job_arrangement]
        if self._options.method == "cp-sat":
            finalists = self._plan_finalists(finalists)
        if self._failures:
            finalists = self._plan_with_failures(finalists)
        best = min(finalists, key=lambda entry: entry.mean_period(self._weights))
        unchanged = [entry for entry in finalists if entry.arrangement == job_arrangement]
        return self._plan_whole_job(best, unchanged[0] if unchanged else None)

    def _sort_tried(self) -> list[TriedPlacement]:
        tried = [entry for entry in self._tried.values() if entry]
        return sorted(tried, key=lambda entry: entry.period)

    @property
    def _seconds_left(self) -> float:
        return self._deadline - self._clock.now()

    def _budget_share(self, share: float) -> Budget:
        return Budget(
            deadline=self._clock.now() + share * self._seconds_left,
            clock=self._clock,
            seed=self._options.seed,
        )

    # --- Quickly ---

    def _evaluate_all(self, arrangement: Arrangement, budget: Budget) -> None:
        """Evaluate the job's own placement, then the literature's, the most promising first."""
        stages = self._layers.job.stages
        self._evaluate(arrangement)
        candidates = [
            self._loads.balance_layers(order, chunks)
            for order, chunks in known_placements(stages, self._layers.layers)
        ]
        for number, candidate in enumerate(sorted(candidates, key=self._loads.ranking_key)):
            if budget.seconds_left <= 0 and number >= 3:
                return
            self._evaluate(candidate)

    def _change_best(self, budget: Budget) -> None:
        """Change the best evaluated placements at random, the more promising ones for longer."""
        chance = random.Random(self._options.seed)
        starts = self._sort_tried()[:SEEDS]
        # All of them, then half, then one: each round has an equal share of the time.
        fewer = [count for count in (SEEDS, SEEDS // 2, 1) if count <= len(starts)] or [1]
        for number, count in enumerate(fewer):
            starts = sorted(starts, key=lambda tried: tried.period)[:count]
            turn = budget.with_share(1 / (len(fewer) - number))
            for index, at in enumerate(starts):
                starts[index] = self._random_walk(
                    at, turn.with_share(1 / (len(starts) - index)), chance
                )

    def _random_walk(
        self, at: TriedPlacement, budget: Budget, chance: random.Random
    ) -> TriedPlacement:
        """Change a placement at random, step by step, while that helps; return the last."""
        # A change is kept if the placement gets no worse by it.
        unsuccessful = 0
        while budget.seconds_left > 0 and unsuccessful < 200:
            other = change_at_random(at.arrangement, self._layers.job.stages, self._loads, chance)
            unsuccessful += 1
            if other is None:
                break
            if other in self._tried:
                continue
            tried = self._evaluate(other, at.period)
            if tried is not None and tried.period <= at.period:
                unsuccessful = 0 if tried.period < at.period else unsuccessful
                at = tried
        return at

    def _evaluate(
        self, arrangement: Arrangement, shortest: float = math.inf
    ) -> TriedPlacement | None:
        """Return this placement with a period; None if nothing fits in less than `shortest`."""
        if arrangement in self._tried:
            return self._tried[arrangement]
        tried = None
        # The busiest worker's work is a bound on the period.
        count = max(self._layers.job.microbatches)
        if max(self._loads.column_loads(arrangement)) * count < shortest:
            with suppress(JobError, NoPlanError, TooLargeError):
                tried = self._evaluate_quickly(arrangement, count)
        self._tried[arrangement] = tried
        if tried is not None and tried.period < self._shortest:
            self._shortest = tried.period
            self._progress(f"{arrangement.description}: about {tried.period:g} s")
        return tried

    def _evaluate_quickly(self, arrangement: Arrangement, count: int) -> TriedPlacement | None:
        """Return the arrangement with its estimated period for one pipeline; None if none fits."""
        job = parse_job(self._layers.arranged_job_text(arrangement))
        # Fewer micro-batches, and the busiest worker's work for those that are left out.
        fewer = min(count, max(2 * job.stages, COMPARED_OPS // (3 * job.depth)))
        fewer += (count - fewer) % job.chains
        remaining_seconds = (count - fewer) * max(self._loads.column_loads(arrangement))
        # If the planner chooses what to recompute: nothing, the first half of the stages, or all.
        best: tuple[float, tuple[int, ...]] | None = None
        for share in RECOMPUTED_SHARES if self._again else (0.0,):
            stages = tuple(range(round(share * job.depth)))
            period = self._list_period(with_one_pipeline(with_recomputation(job, stages), fewer))
            if period is not None and (best is None or period + remaining_seconds < best[0]):
                best = period + remaining_seconds, stages
        if best is None:
            return None
        return TriedPlacement(arrangement=arrangement, job=job, period=best[0], again=best[1])

    def _list_period(self, job: Job) -> float | None:
        """Return the shortest period in seconds of a few list schedules; None if nothing fits."""
        with suppress(NoPlanError, StuckError):
            problem = self._options.make_problem(job)
            candidate = divide_problem(problem, Bound(0, problem.bound_scope))
            # A list schedule and the making of it; annealing is for the finalists.
            seconds = QUICK_TRIES * 2.5e-6 * (200 + 0.3 * problem.operation_count)
            budget = Budget(
                deadline=self._clock.now() + seconds, clock=self._clock, seed=self._options.seed
            )
            lists = self._options.params.lists
            return improve_by_list_schedules(candidate, budget, lists, 0).period_seconds
        return None

    # --- In earnest ---

    def _plan_finalists(self, entries: Sequence[TriedPlacement]) -> list[TriedPlacement]:
        """Plan one pipeline of each placement by the whole search, and return the results."""
        budget = self._budget_share(FINAL_SHARE)
        planned = []
        # The time that one leaves goes to the others.
        for number, tried in enumerate(entries):
            seconds = max(0.01, budget.seconds_left / (len(entries) - number))
            with suppress(NoPlanError, TooLargeError):
                job = with_one_pipeline(
                    with_recomputation(tried.job, tried.again), max(tried.job.microbatches)
                )
                plan = plan_only(
                    self._options.with_limit(seconds), job, (), self._clock, self._solved
                )
                planned.append(msgspec.structs.replace(tried, period=plan.period))
                self._progress(f"{tried.arrangement.description}: period {plan.period:g} s")
        return planned or list(entries)

    def _plan_with_failures(self, entries: Sequence[TriedPlacement]) -> list[TriedPlacement]:
        """Plan each placement with 1, 2 ... vacant roles; return those with most such plans."""
        budget = self._budget_share(FAILURES_SHARE)
        quick = self._options.for_comparison
        planned = []
        for number, tried in enumerate(entries):
            periods: list[float] = []
            share = budget.seconds_left / (len(entries) - number) / self._failures
            with suppress(NoPlanError, TooLargeError):
                for count in range(1, self._failures + 1):
                    plan = normal_form(
                        with_recomputation(tried.job, tried.again),
                        count,
                        quick.with_limit(max(0.01, share)),
                        clock=self._clock,
                    )
                    # More failures never make the period shorter, but a quick plan may seem to.
                    periods.append(max(plan.period, *periods) if periods else plan.period)
            planned.append(msgspec.structs.replace(tried, with_failures=tuple(periods)))
        # Mean throughputs compare only over the same numbers of failures.
        largest = max(len(tried.with_failures) for tried in planned)
        return [tried for tried in planned if len(tried.with_failures) == largest]

    def _plan_whole_job(
        self, best: TriedPlacement, unchanged: TriedPlacement | None
    ) -> FoundPlacement:
        arrangement = best.arrangement
        text = self._layers.arranged_job_text(arrangement, f"{arrangement.description}.")
        job, again = best.job, None
        seconds = max(0.01, self._seconds_left)
        # So far only a few choices of what to recompute were tried for each placement.
        if self._again:
            again = choose_recomputation(job, self._options.with_limit(seconds), self._clock)
            job = again.job
        plan = plan_only(
            self._options.with_limit(max(0.01, self._seconds_left)),
            job,
            (),
            self._clock,
            self._solved,
        )
        # The bound must hold for every choice: of recomputation, then of the placement.
        schedule = plan.schedule
        if again is not None:
            schedule = with_bound_of_choices(schedule, best.job, self._options, ())
        schedule = _with_placement_bound(schedule, MovableLayers(text), self._options)
        plan = msgspec.structs.replace(plan, schedule=schedule)
        final = msgspec.structs.replace(best, period=plan.period)
        return FoundPlacement(
            text=text,
            job=job,
            arrangement=arrangement,
            plan=plan,
            recomputation=again,
            own_period=None if unchanged is None else unchanged.period,
            with_failures=best.with_failures,
            mean_period=final.mean_period(self._weights),
            looked_at=sum(map(bool, self._tried.values())),
        )
