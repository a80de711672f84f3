"""Translate a job with failures to a problem in ticks, in place or otherwise."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import msgspec

from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import ExactLayerCosts, exact_decimal, layer_costs, with_shared_state
from slipstream.planner.model.memory import activation_room, needed_room
from slipstream.planner.model.problem import (
    IN_PLACE,
    UNLIMITED,
    LayerTicks,
    Layout,
    LayoutScope,
    LiveWorker,
    MicroBatch,
    NoPlanError,
    NoRoomError,
    Problem,
    Visit,
)
from slipstream.planner.model.reduce_groups import Held, make_reduce_groups
from slipstream.schedules.layers import LayerRange, prefix_sums, sum_over_ranges
from slipstream.schedules.memory import total_room
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

# --- From the user's units to whole numbers ---------------------------------------------------------------------------


MAX_TICKS = 10**6
"""Maximum number of ticks of the longest op. Finer times are rounded up to whole ticks."""
MAX_MEMORY_UNITS = 2**40
"""Maximum number of memory units in the largest amount. Finer amounts are rounded to the safe
side."""

Rounded = Callable[[Fraction], int]


def choose_tick(job: Job, costs: ExactLayerCosts | None = None) -> Fraction:
    """Return the tick, in seconds: the coarsest that represents all times exactly.

    It is at least the longest time / MAX_TICKS. If `costs` is given, the times of single layers are
    considered, too.
    """
    values = _list_times(job, costs)
    return max(_common_divisor(values), max(values) / MAX_TICKS)


def _list_times(job: Job, costs: ExactLayerCosts | None = None) -> list[Fraction]:
    """Return all positive times of a job, in seconds, those of slow workers included."""
    time = job.time
    compute = [exact_decimal(value) for value in {*time.forward, *time.backward_input, *time.backward_weight}]
    others = [exact_decimal(value) for value in (*time.optimizer, *time.all_reduce, time.transfer)]
    if costs is not None:
        compute += {*costs.forward, *costs.backward_input, *costs.backward_weight}
        others += {*costs.optimizer, *costs.all_reduce}
    slowed = [value * Fraction(to_per_mille(factor), 1000) for _, factor in time.slow for value in compute]
    return [value for value in (*compute, *slowed, *others) if value]


def has_exact_units(job: Job, failed: Sequence[Worker] = ()) -> bool:
    """Return whether stages' times and memory are whole numbers of the job's units.

    Otherwise a problem rounds them up, and its bounds hold for the job only if they are rounded
    down.
    """
    job = with_shared_state(job, failed)
    tick, unit = choose_tick(job), choose_memory_unit(job)
    return all((seconds / tick).denominator == 1 for seconds in _list_times(job)) \
        and memory_in_units(job, unit) == memory_in_units(job, unit, down=True)


def _common_divisor(values: Iterable[Fraction]) -> Fraction:
    """Return the greatest common divisor: the largest fraction of which all values are whole
    multiples."""
    numerator, denominator = 0, 1
    for value in values:
        common = math.lcm(denominator, value.denominator)
        numerator = math.gcd(numerator * (common // denominator), value.numerator * (common // value.denominator))
        denominator = common
    return Fraction(numerator, denominator)


def to_per_mille(factor: float) -> int:
    """Convert a factor on the time of a worker's ops to whole thousandths."""
    return round(factor * 1000)


def times_in_ticks(job: Job, grid: Grid, tick: Fraction, *, down: bool = False) -> Times:
    """Return the stages' times in ticks of `tick` seconds, rounded up, or down if `down`."""
    rounded: Rounded = math.floor if down else math.ceil

    def to_ticks(values: Iterable[float]) -> tuple[int, ...]:
        return tuple(rounded(exact_decimal(value) / tick) for value in values)

    time = job.time
    optimizer = to_ticks(time.optimizer)
    return Times(forward=to_ticks(time.forward), backward_input=to_ticks(time.backward_input),
                 backward_weight=to_ticks(time.backward_weight), all_reduce=to_ticks(time.all_reduce),
                 optimizer=tuple(sum(optimizer[stage] for stage in grid.stages_of_column(column))
                                 for column in range(grid.columns)),
                 transfer=rounded(exact_decimal(time.transfer) / tick),
                 slow=tuple(Slow(worker, to_per_mille(factor)) for worker, factor in time.slow))


def choose_memory_unit(job: Job, costs: ExactLayerCosts | None = None) -> Fraction:
    """Return the memory unit, in the job's unit: the coarsest that represents all memory exactly.

    It is at least the largest amount / MAX_MEMORY_UNITS, and then a power of ten: an activation
    that is as large as the capacity must still fit after the one is rounded up and the other down,
    so decimal numbers stay exact. If `costs` is given, the memory of single layers is considered,
    too.
    """
    if job.memory is None:
        return Fraction(1)
    values = [exact_decimal(value)
              for value in (*job.memory.activation, *job.memory.weight_stash, *job.memory.capacity)]
    values += [] if costs is None else [*costs.activation, *costs.weight_stash, *costs.weights]
    positive = [value for value in values if value]
    if not positive:
        return Fraction(1)
    exact, finest = _common_divisor(positive), max(positive) / MAX_MEMORY_UNITS
    return exact if exact >= finest else Fraction(10) ** math.ceil(math.log10(finest))


def memory_in_units(job: Job, unit: Fraction, *, down: bool = False) -> Memory | None:
    """Return the memory of the stages in units; None if the job has no limits.

    Capacities are rounded down and needs up, or the reverse if `down`; `unit` is in the job's unit.
    """
    if job.memory is None:
        return None
    memory = job.memory
    rounded, other = (math.floor, math.ceil) if down else (math.ceil, math.floor)

    def to_units(values: Iterable[float], rounded: Rounded) -> tuple[int, ...]:
        return tuple(rounded(exact_decimal(value) / unit) for value in values)

    rooms = tuple(Room(worker, other(exact_decimal(value) / unit)) for worker, value in memory.capacity_of)
    return Memory(unit=float(unit), capacity=to_units(memory.capacity, other), capacity_of=rooms or msgspec.UNSET,
                  activation=to_units(memory.activation, rounded), weight_stash=to_units(memory.weight_stash, rounded))


def to_layer_ticks(costs: ExactLayerCosts, tick: Fraction, unit: Fraction, *, fused: bool,
                   down: bool = False) -> LayerTicks:
    """Return these costs in ticks of `tick` seconds and multiples of `unit` of memory.

    They are rounded up, or down if `down`; `unit` is in the job's unit. With `fused`, W runs
    together with I, so that no memory is held between them.
    """
    rounded: Rounded = math.floor if down else math.ceil

    def to_units(values: Iterable[Fraction], one: Fraction) -> tuple[int, ...]:
        return tuple(rounded(value / one) for value in values)

    return LayerTicks(forward=to_units(costs.forward, tick), backward_input=to_units(costs.backward_input, tick),
                      backward_weight=to_units(costs.backward_weight, tick), optimizer=to_units(costs.optimizer, tick),
                      all_reduce=to_units(costs.all_reduce, tick), activation=to_units(costs.activation, unit),
                      weight_stash=(0,) * len(costs.forward) if fused else to_units(costs.weight_stash, unit),
                      weights=to_units(costs.weights, unit))


# --- The problem ------------------------------------------------------------------------------------------------------


def build_problem(job: Job, failed: Sequence[Worker] = (), *, backward: BackwardMode = "split",
                  optimizer: OptimizerMode = "staggered", sharing: bool | None = None, sliced: bool = False,
                  down: bool = False) -> Problem:
    """Build the problem of a job, in ticks, with whole stages in place.

    The workers `failed` are down. With `sharing`, any live holder of a stage may run any
    micro-batch; else only those of failed workers change workers. The default is True if sharing
    can shorten a plan: if workers are down, slow or have different memory, if pipelines read
    different numbers of micro-batches, or if workers lack room for all of their virtual stages. If
    `sliced` is set with `sharing`, lower bounds of the problem also hold for micro-batches that are
    cut. Finer times are rounded up, or rounded down if `down`, for bounds. Raises NoPlanError if a
    stage has no live worker or a worker cannot hold a single micro-batch.
    """
    job = with_shared_state(job, failed)
    grid = build_grid(job)
    tick = choose_tick(job)
    chosen = sharing
    if sharing is None:
        rooms = job.memory.capacity_of if job.memory else ()
        sharing = bool(failed or job.time.slow or rooms or len(set(job.microbatches)) > 1)
    parts = count_equal_layers(grid, layer_costs(job)) if sharing and sliced and job.layers and all(job.layers) else ()
    problem = build_held_problem(name=job.name, tick_seconds=float(tick), grid=grid,
                                 times=times_in_ticks(job, grid, tick, down=down),
                                 memory=memory_in_units(job, choose_memory_unit(job), down=down),
                                 holds=layers_in_place(grid, failed), backward=backward, rounds_down=down,
                                 optimizer=optimizer, sharing=sharing, parts=parts)
    _require_feasible(problem)
    if chosen is None and not sharing and _needs_peers(problem):
        return build_problem(job, backward=backward, optimizer=optimizer, sharing=True, sliced=sliced,
                             down=down)
    return problem


def build_layered_problem(job: Job, failed: Sequence[Worker] = (), question: LayoutScope = IN_PLACE, *,
                          backward: BackwardMode = "split", optimizer: OptimizerMode = "staggered",
                          holds: Mapping[Worker, Held] | None = None, down: bool = False) -> Problem:
    """Build the problem of a job, in ticks fine enough for single layers, for layouts.

    Finer times are rounded up, or rounded down if `down`, as `bounds.layout_lower_bound` requires.
    `holds` gives the present layers of live workers that do not hold the layers of their own
    stages. The `question` says which layouts are allowed. Raises JobError if a stage has no layer,
    and NoPlanError if no worker is alive.
    """
    job = with_shared_state(job, failed)
    grid, of_layers = build_grid(job), layer_costs(job)
    tick, unit = choose_tick(job, of_layers), choose_memory_unit(job, of_layers)
    live = layers_in_place(grid, failed)
    if not live:
        raise NoPlanError("all workers of the job are down; at least one must be alive")
    return build_problem_of_layers(to_layer_ticks(of_layers, tick, unit, fused=backward == "fused", down=down),
                                   times_in_ticks(job, grid, tick, down=down), memory_in_units(job, unit, down=down),
                                   name=job.name, tick_seconds=float(tick), grid=grid, holds=live | dict(holds or {}),
                                   backward=backward, optimizer=optimizer, question=question, rounds_down=down)


def build_problem_of_layers(costs: LayerTicks, times: Times, memory: Memory | None, *, grid: Grid,
                            **others: Any) -> Problem:
    """Build the problem in which each stage costs the sum of its layers in `costs`.

    `times` and `memory` give all other values, such as transfers and capacities; `others` are
    passed to `build_held_problem`.
    """
    def stage_totals(*names: str) -> dict[str, tuple[int, ...]]:
        return {name: costs.sum_over_slices(name, grid.layers_by_stage) for name in names}

    before = prefix_sums(costs.optimizer)
    times = msgspec.structs.replace(
        times, **stage_totals("forward", "backward_input", "backward_weight", "all_reduce"),
        optimizer=tuple(sum_over_ranges(before, held) for held in grid.held_layers_by_column),
        optimizer_of_layer=costs.optimizer)
    if memory is not None:
        memory = msgspec.structs.replace(memory, **stage_totals("activation", "weight_stash"), weights=costs.weights)
    return build_held_problem(grid=grid, times=times, memory=memory, costs=costs, **others)


def with_layout(problem: Problem, layout: Layout) -> Problem:
    """Return a copy of the problem with a layout's held layers and routes."""
    grid, times, memory, costs = problem.grid, problem.times, problem.memory, problem.costs
    groups = make_reduce_groups(grid, layout.holds.values())
    number = _number_slices(grid, layout, (layers for layers, _ in groups.reductions))
    slices = tuple(number)[len(set(grid.layers_by_stage)):]

    def with_slices(stages: Times | Memory, *names: str) -> dict[str, tuple[int, ...]]:
        return {name: (*getattr(stages, name)[:len(grid.stages)], *costs.sum_over_slices(name, slices))
                for name in names}

    return msgspec.structs.replace(
        problem, times=msgspec.structs.replace(times, **with_slices(
            times, "forward", "backward_input", "backward_weight", "all_reduce")),
        memory=memory and msgspec.structs.replace(memory, **with_slices(memory, "activation", "weight_stash")),
        workers={worker: msgspec.structs.replace(problem.workers[worker], holds=held)
                 for worker, held in sorted(layout.holds.items())},
        groups=groups, sharing=True, slices=slices, assigned=True,
        routes={batch: tuple(Visit(number[route_slice.layers], route_slice.worker) for route_slice in route)
                for batch, route in layout.routes.items()})


def _number_slices(grid: Grid, layout: Layout, reduced: Iterable[LayerRange]) -> dict[LayerRange, int]:
    """Return the number of each range of layers of a stage, a route or `reduced`."""
    number: dict[LayerRange, int] = {}
    for stage, layers in enumerate(grid.layers_by_stage):
        number.setdefault(layers, stage)
    used = {route_slice.layers for route in layout.routes.values() for route_slice in route} | set(reduced)
    for index, layers in enumerate(sorted(used - set(number))):
        number[layers] = len(grid.stages) + index
    return number


def build_grid(job: Job) -> Grid:
    """Return the grid of a job."""
    return Grid(pipelines=job.pipelines, columns=job.stages, microbatches=job.microbatches, stages=_build_stages(job),
                chains=job.chains)


def count_equal_layers(grid: Grid, costs: LayerTicks | ExactLayerCosts) -> tuple[int, ...]:
    """Return each stage's number of layers; 0 if they differ in times or memory."""
    parts = [{(costs.forward[layer], costs.backward_input[layer], costs.backward_weight[layer], costs.activation[layer],
               costs.weight_stash[layer]) for layer in range(*layers)} for layers in grid.layers_by_stage]
    return tuple(end - first if len(part) == 1 else 0
                 for (first, end), part in zip(grid.layers_by_stage, parts, strict=True))


def _build_stages(job: Job) -> tuple[VirtualStage, ...]:
    if job.layers is None:
        return tuple(VirtualStage(column=column) for column in job.columns)
    depth = len(job.layers) // job.chains
    ends = [sum(job.layers[index // depth * depth:index + 1]) for index in range(len(job.layers))]
    return tuple(VirtualStage(column=column, layers=(end - count, end))
                 for column, count, end in zip(job.columns, job.layers, ends, strict=True))


def _require_feasible(problem: Problem) -> None:
    for column in range(problem.grid.columns):
        if not all(problem.holders_by_slice[stage] for stage in problem.grid.stages_of_column(column)):
            raise NoPlanError(f"stage {column} has no live worker: all of its {problem.grid.pipelines} workers are "
                              "down, so none holds its parameters; `slipstream plan --layers move --from-checkpoint` "
                              "loads them from a checkpoint")
    memory, chains = problem.memory, max(problem.grid.microbatches)  # later chains have no micro-batches
    if memory is None:
        return
    for stage in range(min(chains, problem.grid.chains) * problem.grid.depth):
        holders = problem.holders_by_slice[stage]
        capacity = max(activation_room(problem, worker) for worker in holders)
        # Of several holders, one may run a micro-batch at one virtual stage and another at the next.
        need = needed_room(problem, stage, alone=len(holders) > 1)
        if need > capacity:
            raise NoRoomError(f"a worker of stage {problem.column_of[stage]} has room for {capacity * memory.unit:g}, "
                              f"but one micro-batch needs {need * memory.unit:g} there")


def _needs_peers(problem: Problem) -> bool:
    """Return whether a worker lacks the room for all of its virtual stages."""
    return problem.memory is not None and any(
        needed_room(problem, stage) > activation_room(problem, worker)
        for worker in problem.live_workers for stage in problem.grid.stages_of_column(worker.column))


# --- Who holds which layers, and so how much room ---------------------------------------------------------------------


def build_held_problem(*, grid: Grid, times: Times, memory: Memory | None, holds: Mapping[Worker, Held],
                       **others: Any) -> Problem:
    """Build the problem in which each live worker holds the layers in `holds`.

    They are ascending ranges that do not touch. Workers that `holds` does not name are down.
    `others` are the remaining fields of `Problem`.
    """
    workers = {worker: LiveWorker(per_mille=times.per_mille_of.get(worker, 1000), holds=held,
                                  room=UNLIMITED if memory is None else total_room(memory, grid, worker))
               for worker, held in sorted(holds.items())}
    return Problem(grid=grid, times=times, memory=memory, workers=workers,
                   groups=make_reduce_groups(grid, holds.values()), routes=build_routes_in_place(grid), **others)


@lru_cache(maxsize=8)
def build_routes_in_place(grid: Grid) -> Mapping[MicroBatch, tuple[Visit, ...]]:
    """Return the route of each micro-batch through the stages of its own pipeline."""
    routes: dict[MicroBatch, tuple[Visit, ...]] = {}
    for pipeline, count in enumerate(grid.microbatches):
        chains = [tuple(Visit(stage, Worker(pipeline, grid.stages[stage].column))
                        for stage in grid.stages_of_microbatch(chain))
                  for chain in range(grid.chains)]
        routes |= {MicroBatch(pipeline, number): chains[number % grid.chains] for number in range(count)}
    return routes


def layers_in_place(grid: Grid, failed: Sequence[Worker]) -> dict[Worker, Held]:
    """Return the layers that live workers hold if no layers have moved."""
    usual, down = grid.held_layers_by_column, set(failed)
    return {worker: usual[worker.column] for worker in grid.workers() if worker not in down}
