"""Choose the stages that recompute their activations: they run F again before I.

If memory is tight, a stage that holds less lets more micro-batches wait, and the pipeline idles
less; otherwise the second forward is lost time. A run always recomputes the same layers, whichever
workers fail, so the choice is made once, for a pipeline with all workers alive. List schedules
decide: first among the choices of the first 0, 1, 2 ... stages, since these hold the most
micro-batches; then the best of these with each stage changed. The best choice, and recomputing
nothing, are then planned by the whole search, as list schedules may be far from the best of either.

A bound on the period is proven for every choice (lemma 14 of docs/bounds.md).
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from slipstream.planner.blockwise import TooLargeError
from slipstream.planner.bounding import any_roles_bound, bounding_problem_in
from slipstream.planner.budget import Clock
from slipstream.planner.job.file import Job, JobError, LayerValues
from slipstream.planner.job.layers import add_exactly, layer_costs, layer_counts, limited_ratio
from slipstream.planner.model.bounds import lower_bound, strongest_bound
from slipstream.planner.model.bounds_layouts import work_bound
from slipstream.planner.model.from_job import build_layered_problem
from slipstream.planner.model.problem import AllowedLayouts, NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.overlapped import bounding_problem
from slipstream.planner.plan import plan_only
from slipstream.schedules.schedule import Schedule, Scope, Worker

AUTO = "auto"
"""Value of the job key `training.recompute` that leaves the choice to the planner."""


class Recomputation(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of the stages of a job that recompute their activations, and its effect."""

    job: Job
    """Job with the times and the memory of the choice."""
    stages: tuple[int, ...]
    """Numbers of the stages that recompute, ascending."""
    period: float
    """Period in seconds of the best plan of one healthy pipeline with the choice.

    If none fits alone, it is that of the whole job.
    """
    without: float | None
    """Period in seconds of the best such plan without recomputation; None if none fits."""
    seconds: float
    """Seconds of the search's clock that the choice took."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose activations are recomputed."""
        counts = layer_counts(self.job)
        return tuple(
            layer
            for stage in self.stages
            for layer in range(sum(counts[:stage]), sum(counts[: stage + 1]))
        )


def chooses_recomputation(job: Job) -> bool:
    """Return whether the job leaves the choice to the planner: `[training] recompute = "auto"`."""
    return job.run_keys.recompute == AUTO


def choose_recomputation(
    job: Job, options: PlanOptions, clock: Clock | None = None
) -> Recomputation:
    """Choose the stages whose activations are recomputed, for the shortest period.

    If this choice is part of a larger search, `clock` is that search's; None: a new one. Raises
    JobError if the job does not state what a recomputed micro-batch holds, if a stage has no layer,
    or if the limit is too short for the job (TooLargeError); NoPlanError if no choice fits.
    """
    if job.memory is None or not job.memory.recomputed:
        raise JobError(
            "training.recompute is 'auto', but memory.recomputed is missing (memory of a "
            "micro-batch then); `slipstream profile` measures it"
        )
    # One pipeline decides, by quick plans that share the time.
    clock = clock or options.make_clock()
    began = clock.now()
    quick = msgspec.structs.replace(
        options, method="greedy", layers="fixed", from_checkpoint=False, holds=()
    ).with_limit(
        options.params.blocks.recomputed_share * options.limit_seconds / (2 * job.depth + 1)
    )
    pipeline_job = with_one_pipeline(job, max(job.microbatches))
    # The first stages hold the most micro-batches: try the first 0, 1, 2 ... of them.
    periods: dict[tuple[int, ...], float | None] = {}
    best: tuple[int, ...] = ()
    for stages in (tuple(range(count)) for count in range(job.depth + 1)):
        best = _better_choice(best, stages, periods, pipeline_job, quick, clock)
    # Then change the choice of each stage by itself.
    for stage in range(job.depth):
        best = _better_choice(
            best, tuple(sorted({*best} ^ {stage})), periods, pipeline_job, quick, clock
        )
    if periods[best] is None:
        # Workers with more memory of their own may run all. If not, this says what does not fit.
        periods[()] = plan_only(quick.with_limit(options.limit_seconds), job, (), clock).period
        best = ()
    # List schedules may be far from the best of either: the whole search compares the two.
    if best and periods[()] is not None:
        whole = quick.with_limit(options.params.blocks.recomputed_share * options.limit_seconds / 2)
        best = _compare_with_none(
            best, periods, pipeline_job, replace(whole, method="cp-sat"), clock
        )
    period = periods[best]
    assert period is not None
    return Recomputation(
        job=with_recomputation(job, best),
        stages=best,
        period=period,
        without=periods[()],
        seconds=clock.now() - began,
    )


def _better_choice(
    best: tuple[int, ...],
    stages: tuple[int, ...],
    periods: dict[tuple[int, ...], float | None],
    job: Job,
    options: PlanOptions,
    clock: Clock,
) -> tuple[int, ...]:
    """Return the better of two choices by list schedules; `periods` gets that of `stages`."""
    if stages not in periods:
        periods[stages] = _list_period(
            with_recomputation(job, stages), options, periods.get(best), clock
        )
    period, shortest = periods[stages], periods[best]
    return stages if period is not None and (shortest is None or period < shortest) else best


def _compare_with_none(
    best: tuple[int, ...],
    periods: dict[tuple[int, ...], float | None],
    job: Job,
    options: PlanOptions,
    clock: Clock,
) -> tuple[int, ...]:
    """Return `best` if recomputing it is faster by the whole search, else (); shorten `periods`."""
    for stages in (best, ()):
        shortest = _list_period(with_recomputation(job, stages), options, None, clock)
        periods[stages] = min(filter(None, (periods[stages], shortest)))
    with_stages, without = periods[best], periods[()]
    assert with_stages is not None and without is not None
    return best if with_stages < without else ()


def _list_period(
    job: Job, options: PlanOptions, shortest: float | None, clock: Clock
) -> float | None:
    """Return a plan's period in seconds; None if nothing fits or it cannot beat `shortest`."""
    try:
        problem = options.make_problem(job)
        if shortest is not None and lower_bound(problem) * problem.tick_seconds >= shortest:
            return None
        return plan_only(options, job, (), clock).period
    except (NoPlanError, TooLargeError):
        return None


def with_one_pipeline(job: Job, microbatches: int) -> Job:
    """Return a copy of the job with a single healthy pipeline, which reads `microbatches`.

    The room of a column is the usual one, or the largest if all its workers have rooms of their
    own. No worker is slow.
    """
    # Workers that are slow, or have a memory of their own, are no ground for a choice for all.
    memory = job.memory and job.memory.with_equal_rooms(job.pipelines)
    return replace(
        job,
        pipelines=1,
        microbatches=(microbatches,),
        nodes=(),
        memory=memory,
        time=replace(job.time, slow=()),
    )


def with_recomputation(job: Job, stages: Iterable[int]) -> Job:
    """Return a copy of the job in which these stages recompute their activations.

    In bidirectional pipelines, both copies of a stage recompute. F runs again in I, or in W at a
    first stage that has no I; until then, only `memory.recomputed` is kept, which the job must
    state. The room of a worker is less by what its largest layer holds while it is recomputed.
    Raises JobError if a stage has no layer.
    """
    again, memory, time = frozenset(stages), job.memory, job.time
    if not again:
        return job
    assert memory is not None
    places = range(len(job.columns))
    chosen = [place % job.depth in again for place in places]
    late = [
        chosen[place] and place % job.depth == 0 and not time.backward_input[place]
        for place in places
    ]
    backward_input, backward_weight = list(time.backward_input), list(time.backward_weight)
    activation, stash = list(memory.activation), list(memory.weight_stash)
    reserve = [0.0] * job.stages
    for place, column in enumerate(job.columns):
        if not chosen[place]:
            continue
        activation[place] = min(memory.recomputed[place], activation[place])
        # F runs again in I, or in W where there is no I.
        if late[place]:
            backward_weight[place] = add_exactly(backward_weight[place], time.forward[place])
            stash[place] = min(stash[place], activation[place])
        else:
            backward_input[place] = add_exactly(backward_input[place], time.forward[place])
        # While a layer is recomputed, its activation exists once more, in addition to what W will
        # need.
        kept_for_weight = max(0.0, stash[place] - activation[place])
        once_more = _largest_layer(job, place % job.depth) + kept_for_weight
        reserve[column] = max(reserve[column], once_more)
    # One layer is recomputed at a time: the largest amount of any stage is reserved, once.
    capacity = tuple(
        max(0.0, add_exactly(room, -less))
        for room, less in zip(memory.capacity, reserve, strict=True)
    )
    capacity_of = tuple(
        (worker, max(0.0, add_exactly(room, -reserve[worker.column])))
        for worker, room in memory.capacity_of
    )
    return replace(
        job,
        time=replace(
            time, backward_input=tuple(backward_input), backward_weight=tuple(backward_weight)
        ),
        memory=replace(
            memory,
            activation=tuple(activation),
            weight_stash=tuple(stash),
            reserve=tuple(reserve),
            capacity=capacity,
            capacity_of=capacity_of,
        ),
        layer_values=_recomputed_layer_values(job, chosen, late),
    )


def with_bound_of_choices(
    schedule: Schedule, job: Job, options: PlanOptions, failed: Sequence[Worker]
) -> Schedule:
    """Return a copy of the schedule whose bound holds whichever stages recompute.

    The bound is lowered or kept, never raised. The schedule is a plan for one choice of stages; in
    `job`, none recompute.
    """
    # Each stage gives a bound for all choices (lemma 14): the largest of them counts.
    bounds = [
        _choices_bound(job, stage, schedule.scope, options, failed) for stage in range(job.depth)
    ]
    largest = max(bounds, key=lambda bound: bound.ticks * bound.tick_seconds)
    ticks = math.floor(largest.ticks * limited_ratio(largest.tick_seconds, schedule.tick_seconds))
    if ticks >= schedule.lower_bound_ticks:
        return schedule
    return schedule.with_bound(ticks, schedule.scope)


class _BoundInTicks(NamedTuple):
    """Lower bound on a period in ticks, with the seconds of a tick."""

    ticks: int
    tick_seconds: float


def _choices_bound(
    job: Job, stage: int, scope: Scope, options: PlanOptions, failed: Sequence[Worker]
) -> _BoundInTicks:
    """Return a bound for all choices: the smaller with `stage` recomputed or not."""
    # All other stages take the time of one that does not recompute, and the memory of one that
    # does.
    found = []
    for stages in ((), (stage,)):
        relaxed = _with_least_memory(with_recomputation(job, stages), job, stage)
        try:
            found.append(_bound_in_scope(relaxed, scope, options, failed))
        except NoPlanError:
            continue  # no plan makes this choice
    return min(
        found, key=lambda bound: bound.ticks * bound.tick_seconds, default=_BoundInTicks(0, 1.0)
    )


def _with_least_memory(chosen: Job, job: Job, stage: int) -> Job:
    """Return `chosen` in which all stages but `stage` hold the least of any choice."""
    # A stage holds least if it recomputes; in both directions of a bidirectional pipeline.
    recomputed = with_recomputation(job, range(job.depth))
    assert chosen.memory is not None and recomputed.memory is not None
    places = range(len(job.columns))

    def least(values: tuple[float, ...], others: tuple[float, ...]) -> tuple[float, ...]:
        smallest = list(map(min, values, others))
        for place in places:
            if place % job.depth == stage:
                smallest[place] = values[place]
        return tuple(smallest)

    return replace(
        chosen,
        memory=replace(
            chosen.memory,
            activation=least(chosen.memory.activation, recomputed.memory.activation),
            weight_stash=least(chosen.memory.weight_stash, recomputed.memory.weight_stash),
        ),
    )


def _bound_in_scope(
    job: Job, scope: Scope, options: PlanOptions, failed: Sequence[Worker]
) -> _BoundInTicks:
    """Return a lower bound on a job's period for the schedules of this scope."""
    if scope is Scope.LAYERS:
        below = build_layered_problem(job, failed, AllowedLayouts(layers="move"), down=True)
        return _BoundInTicks(work_bound(below), below.tick_seconds)
    if scope is Scope.ROLES:
        whole = bounding_problem(options, job, (), down=True)
        return _BoundInTicks(any_roles_bound(job, failed, options).ticks, whole.tick_seconds)
    problem = bounding_problem_in(scope, options, job, failed)
    # Layers that are equal in one choice may differ in another; then no equal parts may be assumed.
    if job.layer_values is not None and problem.can_cut_stages:
        problem = replace(problem, parts=(0,) * len(problem.parts))
    return _BoundInTicks(strongest_bound(problem).ticks, problem.tick_seconds)


def _largest_layer(job: Job, stage: int) -> float:
    """Return the activation memory of a stage's largest layer, in the job's unit."""
    counts = layer_counts(job)
    first = sum(counts[:stage])
    return float(max(layer_costs(job).activation[first : first + counts[stage]]))


def _recomputed_layer_values(job: Job, chosen: list[bool], late: list[bool]) -> LayerValues | None:
    """Return layer values with `chosen` stages recomputed; None if the job has none."""
    # By stage, `chosen` says whether it recomputes, and `late` whether in W instead of I.
    if job.layer_values is None:
        return None
    costs = layer_costs(job)
    stage_of = [stage for stage, count in enumerate(layer_counts(job)) for _ in range(count)]
    backward_input, backward_weight = list(costs.backward_input), list(costs.backward_weight)
    activation, stash = list(costs.activation), list(costs.weight_stash)
    for layer, stage in enumerate(stage_of):
        if not chosen[stage]:
            continue
        activation[layer] = costs.recomputed[layer]
        if late[stage]:
            backward_weight[layer] += costs.forward[layer]
            stash[layer] = costs.recomputed[layer]
        else:
            backward_input[layer] += costs.forward[layer]
    return replace(
        job.layer_values,
        backward_input=tuple(map(float, backward_input)),
        backward_weight=tuple(map(float, backward_weight)),
        activation=tuple(map(float, activation)),
        weight_stash=tuple(map(float, stash)),
    )
