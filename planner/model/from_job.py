"""Translate a job with failures to a problem in ticks, in place or for layouts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import msgspec

from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import (
    ExactLayerCosts,
    exact_decimal,
    layer_costs,
    with_shared_state,
)
from slipstream.planner.model.memory import activation_capacity, needed_room
from slipstream.planner.model.problem import (
    IN_PLACE,
    UNLIMITED,
    AllowedLayouts,
    LayerTicks,
    Layout,
    LiveWorker,
    MicroBatch,
    NoPlanError,
    NoRoomError,
    Problem,
    Visit,
)
from slipstream.planner.model.reduce_groups import Held, make_reduce_groups
from slipstream.schedules.layers import LayerRange, prefix_sums, sum_over_ranges
from slipstream.schedules.memory import total_memory
from slipstream.schedules.schedule import (
    BackwardMode,
    Grid,
    Memory,
    OptimizerMode,
    Room,
    Slow,
    Times,
    VirtualStage,
    Worker,
)

# --- From the user's units to whole numbers -------------------------------------------------------

MAX_TICKS = 10**6
"""Maximum number of ticks of the longest time; finer times are rounded to whole ticks."""
MAX_MEMORY_UNITS = 2**40
"""Maximum number of memory units in the largest amount; finer amounts are rounded."""

Rounded = Callable[[Fraction], int]


def choose_tick(job: Job, costs: ExactLayerCosts | None = None) -> Fraction:
    """Return the tick, in seconds: the coarsest that represents all times exactly.

    The tick is at least the longest time / `MAX_TICKS`, so that times may have to be rounded. If
    `costs` is given, times of single layers count, too.
    """
    values = _list_times(job, costs)
    # The tick is the greatest common divisor of all times, unless the longest op would have too
    # many.
    return max(_common_divisor(values), max(values) / MAX_TICKS)


def _list_times(job: Job, costs: ExactLayerCosts | None = None) -> list[Fraction]:
    """Return all positive times of a job, in seconds, also those of slow workers."""
    time = job.time
    compute = [
        exact_decimal(value)
        for value in {*time.forward, *time.backward_input, *time.backward_weight}
    ]
    others = [exact_decimal(value) for value in (*time.optimizer, *time.all_reduce, time.transfer)]
    if costs is not None:
        compute += {*costs.forward, *costs.backward_input, *costs.backward_weight}
        others += {*costs.optimizer, *costs.all_reduce}
    # A slow worker's ops take other times, which the tick should also divide.
    slowed: list[Fraction] = []
    for _, factor in time.slow:
        slowness = Fraction(to_per_mille(factor), 1000)
        slowed += [value * slowness for value in compute]
    return [value for value in (*compute, *slowed, *others) if value]


def has_exact_units(job: Job, failed: Sequence[Worker] = (), *, whole_stages: bool = False) -> bool:
    """Return whether times and memory are whole multiples of a job's tick and memory unit.

    If not, problems round times up, and bounds need a problem that rounds them down. With
    `whole_stages`, capacities of single workers (`capacity_of`) do not count: whole stages take
    whole units, and so a fraction of a unit is of no use to them.
    """
    job = with_shared_state(job, failed)
    if whole_stages and job.memory is not None:
        memory = msgspec.structs.replace(job.memory, capacity_of=())
        job = msgspec.structs.replace(job, memory=memory)
    tick, unit = choose_tick(job), choose_memory_unit(job)
    return all(
        (seconds / tick).denominator == 1 for seconds in _list_times(job)
    ) and memory_in_units(job, unit) == memory_in_units(job, unit, down=True)


def _common_divisor(values: Iterable[Fraction]) -> Fraction:
    """Return the largest fraction of which all values are whole multiples."""
    numerator, denominator = 0, 1
    for value in values:
        common = math.lcm(denominator, value.denominator)
        numerator = math.gcd(
            numerator * (common // denominator), value.numerator * (common // value.denominator)
        )
        denominator = common
    return Fraction(numerator, denominator)


def to_per_mille(factor: float) -> int:
    """Return a factor on the time of a worker's ops in thousandths, rounded."""
    return round(factor * 1000)


def times_in_ticks(job: Job, grid: Grid, tick: Fraction, *, down: bool = False) -> Times:
    """Return the stages' times in ticks of `tick` seconds, rounded up, or down if `down`.

    Steps are summed by column once rounded; factors of slow workers are rounded to thousandths.
    """
    rounded: Rounded = math.floor if down else math.ceil

    def to_ticks(values: Iterable[float]) -> tuple[int, ...]:
        return tuple(rounded(exact_decimal(value) / tick) for value in values)

    time = job.time
    # A worker steps once for all of its stages.
    optimizer_by_column = [0] * grid.columns
    for stage, ticks in zip(grid.stages, to_ticks(time.optimizer), strict=True):
        optimizer_by_column[stage.column] += ticks
    return Times(
        forward=to_ticks(time.forward),
        backward_input=to_ticks(time.backward_input),
        backward_weight=to_ticks(time.backward_weight),
        all_reduce=to_ticks(time.all_reduce),
        optimizer=tuple(optimizer_by_column),
        transfer=rounded(exact_decimal(time.transfer) / tick),
        slow=tuple(Slow(worker, to_per_mille(factor)) for worker, factor in time.slow),
    )


def choose_memory_unit(job: Job, costs: ExactLayerCosts | None = None) -> Fraction:
    """Return the memory unit, in the job's unit: the coarsest that represents all memory exactly.

    The unit is at least the largest amount / `MAX_MEMORY_UNITS`; if an exact one would be finer, it
    is the power of ten above that. 1 if the job limits no memory, or all amounts are 0. If `costs`
    is given, memory of single layers counts, too; that of single workers (`capacity_of`) never.
    """
    if job.memory is None:
        return Fraction(1)
    values = [
        exact_decimal(value)
        for value in (*job.memory.activation, *job.memory.weight_stash, *job.memory.capacity)
    ]
    if costs is not None:
        values += [*costs.activation, *costs.weight_stash, *costs.weights]
    positive = [value for value in values if value]
    if not positive:
        return Fraction(1)
    # A power of ten keeps decimal numbers exact: an activation as large as the capacity must still
    # fit after one is rounded up and the other down.
    exact, finest = _common_divisor(positive), max(positive) / MAX_MEMORY_UNITS
    return exact if exact >= finest else Fraction(10) ** math.ceil(math.log10(finest))


def memory_in_units(job: Job, unit: Fraction, *, down: bool = False) -> Memory | None:
    """Return the memory of the stages in multiples of `unit`; None without limits.

    `unit` is in the job's unit of memory. Capacities are rounded down and needs up, or the reverse
    if `down`.
    """
    if job.memory is None:
        return None
    memory = job.memory
    # What fits when rounded must fit in truth; for bounds, what fits in truth must fit when
    # rounded.
    round_need, round_room = (math.floor, math.ceil) if down else (math.ceil, math.floor)

    def to_units(values: Iterable[float], rounded: Rounded) -> tuple[int, ...]:
        return tuple(rounded(exact_decimal(value) / unit) for value in values)

    rooms = tuple(
        Room(worker, round_room(exact_decimal(value) / unit))
        for worker, value in memory.capacity_of
    )
    return Memory(
        unit=float(unit),
        capacity=to_units(memory.capacity, round_room),
        capacity_of=rooms or msgspec.UNSET,
        activation=to_units(memory.activation, round_need),
        weight_stash=to_units(memory.weight_stash, round_need),
    )


def to_layer_ticks(
    costs: ExactLayerCosts, tick: Fraction, unit: Fraction, *, fused: bool, down: bool = False
) -> LayerTicks:
    """Return these costs in ticks of `tick` seconds and multiples of `unit` of memory.

    Costs are rounded up, or down if `down`; `unit` is in the job's unit. With `fused`, the weight
    stash is 0, as W runs together with I.
    """
    rounded: Rounded = math.floor if down else math.ceil

    def to_units(values: Iterable[Fraction], size: Fraction) -> tuple[int, ...]:
        return tuple(rounded(value / size) for value in values)

    # Times by the tick, memory by the unit.
    return LayerTicks(
        forward=to_units(costs.forward, tick),
        backward_input=to_units(costs.backward_input, tick),
        backward_weight=to_units(costs.backward_weight, tick),
        optimizer=to_units(costs.optimizer, tick),
        all_reduce=to_units(costs.all_reduce, tick),
        activation=to_units(costs.activation, unit),
        weight_stash=(0,) * len(costs.forward) if fused else to_units(costs.weight_stash, unit),
        weights=to_units(costs.weights, unit),
    )


# --- The problem ----------------------------------------------------------------------------------


def build_problem(
    job: Job,
    failed: Sequence[Worker] = (),
    *,
    backward: BackwardMode = "split",
    optimizer: OptimizerMode = "staggered",
    sharing: bool | None = None,
    sliced: bool = False,
    down: bool = False,
) -> Problem:
    """Build the problem of a job, in ticks, with whole stages in place.

    Raises NoPlanError if a stage has no live worker, NoRoomError if none has room for a
    micro-batch.

    Parameters
    ----------
    failed
        Workers that are down.
    sharing
        True: any live holder of a stage may run any micro-batch. False: only those of workers that
        are down or lack room change workers. Default: True if that can shorten a plan, because
        workers are down, slow or unequal in memory, pipelines read different numbers of
        micro-batches, or workers lack room for all of their virtual stages.
    sliced
        With `sharing`, lower bounds also hold for micro-batches that are cut within a stage, if
        each stage has layers.
    down
        True: costs are rounded down and capacities up, as bounds require. False: the reverse.
    """
    job = with_shared_state(job, failed)
    grid = build_grid(job)
    tick = choose_tick(job)
    # Workers share micro-batches if anything makes them unequal.
    chosen = sharing
    if sharing is None:
        rooms = job.memory.capacity_of if job.memory else ()
        sharing = bool(failed or job.time.slow or rooms or len(set(job.microbatches)) > 1)
    # Bounds need to know where a micro-batch may be cut.
    parts: tuple[int, ...] = ()
    if sharing and sliced and job.layers and all(job.layers):
        parts = count_equal_layers(grid, layer_costs(job))
    problem = build_held_problem(
        name=job.name,
        tick_seconds=float(tick),
        grid=grid,
        times=times_in_ticks(job, grid, tick, down=down),
        memory=memory_in_units(job, choose_memory_unit(job), down=down),
        holds=layers_in_place(grid, failed),
        backward=backward,
        rounds_down=down,
        optimizer=optimizer,
        sharing=sharing,
        parts=parts,
    )
    _require_feasible(problem)
    # Without sharing, each worker must have room for all of its own virtual stages.
    if chosen is None and not sharing and _needs_peers(problem):
        return build_problem(
            job, backward=backward, optimizer=optimizer, sharing=True, sliced=sliced, down=down
        )
    return problem


def build_layered_problem(
    job: Job,
    failed: Sequence[Worker] = (),
    question: AllowedLayouts = IN_PLACE,
    *,
    backward: BackwardMode = "split",
    optimizer: OptimizerMode = "staggered",
    holds: Mapping[Worker, Held] | None = None,
    down: bool = False,
) -> Problem:
    """Build the problem from which a job's layouts are made, with costs of single layers.

    Raises JobError if a stage has no layer, and NoPlanError if no worker is alive.

    Parameters
    ----------
    question
        Which layouts are allowed.
    holds
        Present layers of live workers that do not hold those of their own stages; None: all do.
    down
        True: costs are rounded down and capacities up, as `bounds.layout_lower_bound` requires.
        False: the reverse.
    """
    job = with_shared_state(job, failed)
    grid, of_layers = build_grid(job), layer_costs(job)
    tick, unit = choose_tick(job, of_layers), choose_memory_unit(job, of_layers)
    # A stage without live workers is no error here: a checkpoint may have its layers.
    live = layers_in_place(grid, failed)
    if not live:
        raise NoPlanError("all workers of the job are down; at least one must be alive")
    return build_problem_of_layers(
        to_layer_ticks(of_layers, tick, unit, fused=backward == "fused", down=down),
        times_in_ticks(job, grid, tick, down=down),
        memory_in_units(job, unit, down=down),
        name=job.name,
        tick_seconds=float(tick),
        grid=grid,
        holds=live | dict(holds or {}),
        backward=backward,
        optimizer=optimizer,
        question=question,
        rounds_down=down,
    )


def build_problem_of_layers(
    costs: LayerTicks, times: Times, memory: Memory | None, *, grid: Grid, **others: Any
) -> Problem:
    """Build the problem in which each stage costs the sum of its layers' `costs`.

    All other values, such as transfers and capacities, are those of `times` and `memory`; `others`
    are passed to `build_held_problem`.
    """

    def stage_totals(*names: str) -> dict[str, tuple[int, ...]]:
        return {name: costs.sum_over_slices(name, grid.layers_by_stage) for name in names}

    # A worker with other layers than its column's steps those, so their times are kept one by one.
    before = prefix_sums(costs.optimizer)
    times = msgspec.structs.replace(
        times,
        **stage_totals("forward", "backward_input", "backward_weight", "all_reduce"),
        optimizer=tuple(sum_over_ranges(before, layers) for layers in grid.held_layers_by_column),
        optimizer_of_layer=costs.optimizer,
    )
    if memory is not None:
        memory = msgspec.structs.replace(
            memory, **stage_totals("activation", "weight_stash"), weights=costs.weights
        )
    return build_held_problem(grid=grid, times=times, memory=memory, costs=costs, **others)


def with_layout(problem: Problem, layout: Layout) -> Problem:
    """Return a copy of the problem with a layout's held layers and routes.

    The problem must have costs of single layers (`build_layered_problem`).
    """
    grid, times, memory, costs = problem.grid, problem.times, problem.memory, problem.costs
    # Slices that are not stages get numbers after them, and costs of their own.
    groups = make_reduce_groups(grid, layout.holds.values())
    number_of = _number_slices(grid, layout, (layers for layers, _ in groups.reductions))
    slices = tuple(number_of)[len(set(grid.layers_by_stage)) :]

    def with_slices(stages: Times | Memory, *names: str) -> dict[str, tuple[int, ...]]:
        return {
            name: (*getattr(stages, name)[: len(grid.stages)], *costs.sum_over_slices(name, slices))
            for name in names
        }

    # Routes name their slices by number.
    routes = {}
    for microbatch, route in layout.routes.items():
        visits = [Visit(number_of[step.layers], step.worker) for step in route]
        routes[microbatch] = tuple(visits)
    return msgspec.structs.replace(
        problem,
        times=msgspec.structs.replace(
            times,
            **with_slices(times, "forward", "backward_input", "backward_weight", "all_reduce"),
        ),
        memory=memory
        and msgspec.structs.replace(memory, **with_slices(memory, "activation", "weight_stash")),
        workers={
            worker: msgspec.structs.replace(problem.workers[worker], holds=ranges)
            for worker, ranges in sorted(layout.holds.items())
        },
        groups=groups,
        sharing=True,
        slices=slices,
        assigned=True,
        routes=routes,
    )


def _number_slices(
    grid: Grid, layout: Layout, reduced: Iterable[LayerRange]
) -> dict[LayerRange, int]:
    """Return a number for each range of layers of a stage, route or reduction."""
    # Ranges that are stages keep the number of the stage, the first of those with the same layers.
    number_of: dict[LayerRange, int] = {}
    for stage, layers in enumerate(grid.layers_by_stage):
        number_of.setdefault(layers, stage)
    # All other ranges are numbered after the stages, in the order of their layers.
    used = set(reduced)
    for route in layout.routes.values():
        used.update(route_slice.layers for route_slice in route)
    for index, layers in enumerate(sorted(used - set(number_of))):
        number_of[layers] = len(grid.stages) + index
    return number_of


def build_grid(job: Job) -> Grid:
    """Return a job's grid: its pipelines, columns, virtual stages, and numbers of micro-batches."""
    return Grid(
        pipelines=job.pipelines,
        columns=job.stages,
        microbatches=job.microbatches,
        stages=_build_stages(job),
        chains=job.chains,
    )


def count_equal_layers(grid: Grid, costs: LayerTicks | ExactLayerCosts) -> tuple[int, ...]:
    """Return each stage's number of layers; 0 if compute ops differ in time or memory."""
    costs_by_layer = list(
        zip(
            costs.forward,
            costs.backward_input,
            costs.backward_weight,
            costs.activation,
            costs.weight_stash,
            strict=True,
        )
    )
    # Only equal layers can be dealt out as shares, which bounds count.
    counts = []
    for first, end in grid.layers_by_stage:
        are_equal = len(set(costs_by_layer[first:end])) == 1
        counts.append(end - first if are_equal else 0)
    return tuple(counts)


def _build_stages(job: Job) -> tuple[VirtualStage, ...]:
    if job.layers is None:
        return tuple(VirtualStage(column=column) for column in job.columns)
    # Each direction passes all layers of the model.
    depth = len(job.layers) // job.chains
    ends = [sum(job.layers[index // depth * depth : index + 1]) for index in range(len(job.layers))]
    return tuple(
        VirtualStage(column=column, layers=(end - count, end))
        for column, count, end in zip(job.columns, job.layers, ends, strict=True)
    )


def _require_feasible(problem: Problem) -> None:
    """Raise NoPlanError unless each stage has a live worker with room for a micro-batch."""
    # Someone must hold the parameters of each stage.
    for column in range(problem.grid.columns):
        if not all(
            problem.holders_by_slice[stage] for stage in problem.grid.stages_of_column(column)
        ):
            raise NoPlanError(
                f"stage {column} has no live worker: all of its {problem.grid.pipelines} workers "
                "are down, so none holds its parameters; `slipstream plan --layers move "
                "--from-checkpoint` loads them from a checkpoint"
            )
    memory = problem.memory
    if memory is None:
        return
    # Directions without a micro-batch need no room.
    chains = min(max(problem.grid.microbatches), problem.grid.chains)
    for stage in range(chains * problem.grid.depth):
        holders = problem.holders_by_slice[stage]
        capacity = max(activation_capacity(problem, worker) for worker in holders)
        # Of several holders, one may run a micro-batch at one virtual stage and another at the
        # next.
        need = needed_room(problem, stage, alone=len(holders) > 1)
        if need > capacity:
            raise NoRoomError(
                f"a worker of stage {problem.column_of[stage]} has room for "
                f"{capacity * memory.unit:g}, but one micro-batch needs "
                f"{need * memory.unit:g} there"
            )


def _needs_peers(problem: Problem) -> bool:
    """Return whether a worker lacks the room to run all of its virtual stages."""
    if problem.memory is None:
        return False
    for worker in problem.live_workers:
        room = activation_capacity(problem, worker)
        for stage in problem.grid.stages_of_column(worker.column):
            if needed_room(problem, stage) > room:
                return True
    return False


# --- Who holds which layers, and so how much room -------------------------------------------------


def build_held_problem(
    *, grid: Grid, times: Times, memory: Memory | None, holds: Mapping[Worker, Held], **others: Any
) -> Problem:
    """Build the problem in which each live worker holds the layers in `holds`.

    Held layers are ascending ranges that do not touch; a worker without an entry is down. Without
    `memory`, rooms are unlimited. `others` are the remaining fields of `Problem`.
    """
    # Of a worker, only speed, memory and held layers count.
    workers = {}
    for worker, ranges in sorted(holds.items()):
        workers[worker] = LiveWorker(
            per_mille=times.per_mille_of.get(worker, 1000),
            holds=ranges,
            memory=UNLIMITED if memory is None else total_memory(memory, grid, worker),
        )
    return Problem(
        grid=grid,
        times=times,
        memory=memory,
        workers=workers,
        groups=make_reduce_groups(grid, holds.values()),
        routes=build_routes_in_place(grid),
        **others,
    )


@lru_cache(maxsize=8)
def build_routes_in_place(grid: Grid) -> Mapping[MicroBatch, tuple[Visit, ...]]:
    """Return the route of each micro-batch through the stages of its own pipeline."""
    routes: dict[MicroBatch, tuple[Visit, ...]] = {}
    for pipeline, count in enumerate(grid.microbatches):
        visits = [
            Visit(number, Worker(pipeline, stage.column))
            for number, stage in enumerate(grid.stages)
        ]
        # Micro-batches take the directions in turn, and all of one direction share a route.
        routes_by_chain: list[tuple[Visit, ...]] = []
        for chain in range(grid.chains):
            stages = grid.stages_of_microbatch(chain)
            routes_by_chain.append(tuple(visits[stage] for stage in stages))
        for number in range(count):
            routes[MicroBatch(pipeline, number)] = routes_by_chain[number % grid.chains]
    return routes


def layers_in_place(grid: Grid, failed: Sequence[Worker]) -> dict[Worker, Held]:
    """Return the layers that live workers hold if no layers have moved."""
    usual, down = grid.held_layers_by_column, set(failed)
    return {worker: usual[worker.column] for worker in grid.workers() if worker not in down}
