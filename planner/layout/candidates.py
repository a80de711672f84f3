"""Make layouts whose orders are to be searched, the most promising first.

In large clusters they are made group by group. They include the layouts of published systems as
special cases, so that the best one is never worse than theirs:

- pipelines with failures divided again, whole micro-batches (Oobleck, SOSP 2023; by speed:
  Malleus, arXiv 2410.13333);
- one division for all pipelines (ElasWave, arXiv 2510.00606);
- all pipelines divided again, also with no worker down if stages are uneven: a layer may float
  between two workers (`planner.layout.division`);
- layers fixed (ReCycle, SOSP 2024, and with live peers that help slow workers).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import cache, partial
from operator import sub
from typing import Any

import msgspec

from slipstream.planner.layout.division import Divider, Replica, build_layout, pack_workloads
from slipstream.planner.layout.fixed import fixed_layout
from slipstream.planner.model.decompose import extract_pipelines
from slipstream.planner.model.problem import Layout, MicroBatch, Problem, Route, RouteSlice
from slipstream.planner.params import DEFAULTS, LayoutParams
from slipstream.schedules.layers import LayerRange, layers_in
from slipstream.schedules.schedule import VirtualStage, Worker

# --- Which live workers form replicas, and the layouts of published systems -----------------------


def form_replicas(problem: Problem, *, anew: bool = False, narrow: bool = False) -> list[Replica]:
    """Divide the live workers into replicas: rows of workers with memory for all layers.

    A replica is a pipeline, or what is left of one or several. A pipeline whose workers all live,
    in place and at the usual speed, keeps its stages, unless `anew` or `narrow`, or if workers that
    are left join it. The layers of all other replicas (`is_recut`), which come first, are to be
    divided again. With `narrow`, each has as few workers as memory allows, whatever their
    pipelines; workers that are left stay idle, each as a replica. Raises LookupError if the workers
    have no room for all layers.
    """
    replicas: list[Replica] = []
    pool: list[Worker] = []
    rows: Sequence[Sequence[Worker]] = problem.live_by_pipeline
    if narrow:
        rows = [(worker,) for worker in problem.live_workers]
    # Short rows first: those that cannot hold all layers are joined until they can.
    for workers in sorted(filter(None, rows), key=len):
        if not (anew or narrow) and _is_whole_pipeline(problem, workers):
            replicas.append(Replica(tuple(_sorted_by_layers(workers)), is_recut=False))
        elif _can_hold_all(problem, workers):
            replicas.append(Replica(tuple(_sorted_by_layers(workers)), is_recut=True))
        else:
            pool += workers
            if _can_hold_all(problem, pool):
                replicas.append(Replica(tuple(_sorted_by_layers(pool)), is_recut=True))
                pool = []
    if pool:
        if not replicas:
            raise LookupError(
                "in no layout that was tried have the live workers room for all layers"
            )
        if narrow:  # the rest stays idle: beside them, a replica would pass micro-batches on
            return [*replicas, *(Replica((worker,), is_recut=True) for worker in pool)]
        # Workers that are left join the shortest replica, if possible one divided again anyway.
        weakest = min(
            replicas,
            key=lambda replica: (not replica.is_recut, len(replica.workers), replica.workers),
        )
        replicas.remove(weakest)
        replicas.append(Replica(tuple(_sorted_by_layers([*weakest.workers, *pool])), is_recut=True))
    return sorted(replicas, key=lambda replica: (not replica.is_recut, replica.workers[0].pipeline))


def cut_all_pipelines(problem: Problem) -> Layout | None:
    """Return a layout that divides the layers in the same way in all pipelines.

    A column gets more layers the more live workers it has, as in ElasWave (arXiv 2510.00606). A
    worker stays in its column, and the workers of a column share all micro-batches. None if the
    layers do not fit, or if columns have several stages or pipelines two directions.
    """
    columns = sorted({column for path in problem.path_by_chain for _, column in path})
    rates = []
    for column in columns:
        workers = [worker for worker in problem.live_workers if worker.column == column]
        rates.append(sum(1000 / problem.slowness(worker) for worker in workers))
    if len(problem.path_by_chain) > 1 or len(problem.path_by_chain[0]) != len(columns):
        return None
    # Bisect for the least load at which the columns take all layers.
    low, high = 0.0, float(problem.ample_ticks)
    fitting: list[LayerRange] | None = None
    for _ in range(60):
        middle = (low + high) / 2
        ranges = _ranges_within(problem, columns, rates, middle)
        low, high = (middle, high) if ranges is None else (low, middle)
        fitting = ranges or fitting
    if fitting is None:
        return None
    # The same layers for every worker of a column; columns without layers stay idle.
    of_column = {
        column: (layers,)
        for column, layers in zip(columns, fitting, strict=True)
        if layers[0] < layers[1]
    }
    stages = tuple(
        VirtualStage(column=column, layers=layers) for column, (layers,) in of_column.items()
    )
    moved_problem = msgspec.structs.replace(
        problem,
        grid=msgspec.structs.replace(problem.grid, stages=stages),
        workers={
            worker: msgspec.structs.replace(state, holds=of_column.get(worker.column, ()))
            for worker, state in problem.workers.items()
        },
    )
    layout = fixed_layout(moved_problem, sliced=False)
    return msgspec.structs.replace(layout, kind="one cut for all pipelines")


def _ranges_within(
    problem: Problem, columns: Sequence[int], rates: Sequence[float], limit: float
) -> list[LayerRange] | None:
    """Return layers for each column, none needing over `limit` ticks at its rate, or None."""
    ranges, layer = [], 0
    # A column's rate is the sum of its workers' speeds; the least memory of any of them counts.
    for column, rate in zip(columns, rates, strict=True):
        first, work, closing = layer, 0, 0
        room = min(
            (
                problem.workers[worker].memory
                for worker in problem.live_workers
                if worker.column == column
            ),
            default=0,
        )
        while layer < problem.grid.layer_count:
            work += problem.costs.work[layer] * problem.grid.total_microbatches
            closing += problem.costs.closing[layer]
            room -= problem.costs.weights[layer] + problem.costs.peak_memory[layer]
            if not rate or work / rate + closing > limit or room < 0:
                break
            layer += 1
        ranges.append((first, layer))
    return ranges if layer == problem.grid.layer_count else None


def _sorted_by_layers(workers: Sequence[Worker]) -> list[Worker]:
    """Return workers sorted by column, so that few layers move."""
    return sorted(workers, key=lambda worker: (worker.column, worker.pipeline))


def _is_whole_pipeline(problem: Problem, workers: Sequence[Worker]) -> bool:
    """Return whether `workers` are all of a pipeline, in place and at the usual speed."""
    stages: dict[int, list[LayerRange]] = {}
    for layers, column in problem.path_by_chain[0]:
        stages.setdefault(column, []).append(layers)
    if {worker.column for worker in workers} != set(stages):
        return False
    return all(
        problem.slowness(worker) == 1000
        and tuple(problem.workers[worker].holds) == tuple(stages[worker.column])
        for worker in workers
    )


def _can_hold_all(problem: Problem, workers: Sequence[Worker]) -> bool:
    """Return whether these workers, each with consecutive layers, have room for all layers."""
    return (
        pack_workloads(
            problem,
            _sorted_by_layers(workers),
            [1] * problem.grid.layer_count,
            problem.ample_ticks * 4,
        )
        is not None
    )


# --- Large clusters: those that share work, like ones alike ---------------------------------------


def make_by_groups(
    problem: Problem, groups: Sequence[tuple[int, ...]], make: Callable[[Problem], Layout | None]
) -> Layout | None:
    """Make a layout of a problem from layouts of groups of pipelines that share work.

    The function `make` returns the layout of one group's problem, or None if it has none; it is
    called once for all equal groups, and a LookupError passes. The result is None if some group has
    no layout.
    """
    if len(groups) == 1:
        return make(problem)
    layouts: dict[tuple[object, ...], Layout | None] = {}
    holds, routes, kind = {}, {}, ""
    for pipelines in groups:
        part = extract_pipelines(problem, pipelines)
        key = tuple(part.workers.items()), part.grid.microbatches
        if key not in layouts:
            layouts[key] = make(part)
        layout = layouts[key]
        if layout is None:
            return None
        kind = kind or layout.kind
        holds.update(
            {_whole_worker(worker, pipelines): ranges for worker, ranges in layout.holds.items()}
        )
        # Equal groups share a layout, in which pipelines are numbered from 0.
        for batch, route in layout.routes.items():
            routes[MicroBatch(pipelines[batch.pipeline], batch.microbatch)] = tuple(
                RouteSlice(slice_.layers, _whole_worker(slice_.worker, pipelines))
                for slice_ in route
            )
    return Layout(kind=kind, holds=dict(sorted(holds.items())), routes=dict(sorted(routes.items())))


def form_groups(
    problem: Problem, params: LayoutParams = DEFAULTS.layouts
) -> Iterator[tuple[int, ...]]:
    """Iterate over groups of pipelines, by number, that are to share work.

    Pipelines that lost workers or speed are grouped with healthy ones that help them, more if they
    lost more. Each other pipeline is a group of its own. Few pipelines form a single group. Raises
    LookupError if the live workers cannot hold all layers.
    """
    replicas = form_replicas(problem)
    if len(problem.grid.microbatches) <= params.undivided:
        yield tuple(range(len(problem.grid.microbatches)))
        return
    kept = [replica.workers[0].pipeline for replica in replicas if not replica.is_recut]
    recut = [replica for replica in replicas if replica.is_recut]
    # Weak are replicas that were divided again, and pipelines without a live worker.
    weak: list[tuple[int, ...]] = []
    for replica in recut:
        weak.append(tuple(sorted({worker.pipeline for worker in replica.workers})))
    weak += [
        (pipeline,)
        for pipeline in range(len(problem.grid.microbatches))
        if not problem.live_by_pipeline[pipeline]
    ]
    merged = {pipeline for group in weak for pipeline in group}
    kept = [pipeline for pipeline in kept if pipeline not in merged]
    losses = [_lost_workers(problem, group) for group in weak]
    available, helpers = len(kept), dict[tuple[object, ...], int]()
    # Healthy pipelines are dealt out by what each weak group lost, as many as it can use.
    for group, lost in zip(weak, losses, strict=True):
        live = [worker for pipeline in group for worker in problem.live_by_pipeline[pipeline]]
        # the stages of these workers matter little
        key = len(group), tuple(sorted(map(problem.slowness, live)))
        if key not in helpers:
            share = min(int(available * lost / sum(losses)), params.most_helpers)
            helpers[key] = _min_helpers(problem, group, kept[:share], params.fewer_helpers)
        yield (*group, *kept[: helpers[key]])
        kept = kept[helpers[key] :]
    for pipeline in kept:
        yield (pipeline,)


def _lost_workers(problem: Problem, group: Sequence[int]) -> Fraction:
    """Return how many workers of usual speed the pipelines in `group` lack."""
    workers = len(group) * len(problem.path_by_chain[0])
    speeds = (
        Fraction(1000, problem.slowness(worker))
        for pipeline in group
        for worker in problem.live_by_pipeline[pipeline]
    )
    return max(Fraction(1, 1000), workers - sum(speeds, start=Fraction(0)))


def _min_helpers(
    problem: Problem, group: tuple[int, ...], healthy: Sequence[int], tolerance: float
) -> int:
    """Return how many of the first `healthy` pipelines are enough to help a group."""

    def longest_load(count: int) -> float:
        part = extract_pipelines(problem, (*group, *healthy[:count]))
        try:
            division = Divider(part, form_replicas(part)).find_division(within=tolerance / 5)
        except LookupError:
            return math.inf
        return math.inf if division is None else division[0]

    # With enough, more would shorten the longest load by the fraction `tolerance` at most.
    best, count = longest_load(len(healthy)), 1
    while count < len(healthy) and longest_load(count) > (1 + tolerance) * best:
        count *= 2
    return min(count, len(healthy))


def _whole_worker(worker: Worker, pipelines: Sequence[int]) -> Worker:
    """Return the whole problem's worker that `worker` of a group's problem stands for."""
    return Worker(pipelines[worker.pipeline], worker.column)


# --- All of them ----------------------------------------------------------------------------------


def generate_layouts(
    problem: Problem, *, largest_fine: float = math.inf, params: LayoutParams = DEFAULTS.layouts
) -> Iterator[Layout]:
    """Iterate over different layouts, the most promising first, each made on request.

    Layouts with moved layers and slices shorter than a stage are made only if all micro-batches
    together have at most `largest_fine` of such slices, and within the limits in `params`. Raises
    LookupError if there is no layout: there is no room for all layers, or no worker holds some
    layer and none may be loaded from a checkpoint. The iterator may be empty: there is room for all
    layers, but no division of the work fits.
    """
    _require_layers(problem)
    fine = min(largest_fine, params.largest_fine)
    seen = set()
    failure: LookupError | None = None
    for make in (
        _moving_makers(problem, fine, params)
        if problem.question.layers == "move"
        else _fixed_makers(problem)
    ):
        try:
            layout = make()
        except LookupError as error:
            failure = failure or error
            continue
        # Different ways may lead to the same routes.
        key = layout and tuple(layout.routes.items())
        if layout is not None and key not in seen:
            seen.add(key)
            yield layout
    if seen or failure is None:
        return
    layout = _make_layer_by_layer(problem, params)
    if layout is None:
        raise failure
    yield layout


def _make_layer_by_layer(problem: Problem, params: LayoutParams) -> Layout | None:
    """Return a layout for workers with room for one stash at a time, or None."""
    # Other layouts leave room for the stashes of all layers that a worker holds.
    costs, layers = problem.costs, problem.grid.layer_count
    excess = max(map(sub, costs.weight_stash, costs.activation))
    if (
        excess <= 0
        or problem.question.layers != "move"
        or not problem.question.sliced
        or len(problem.path_by_chain) > 1
        or problem.grid.total_microbatches * layers > params.largest_fine
    ):
        return None
    # With each W right after its I, a worker holds activations and one stash at most: it needs what
    # they take together, with stashes no larger than activations, and the most that one is larger.
    stashes = tuple(map(min, costs.weight_stash, costs.activation))
    workers = {}
    for worker, state in problem.workers.items():
        workers[worker] = msgspec.structs.replace(state, memory=state.memory - excess)
    relaxed = msgspec.structs.replace(
        problem, costs=msgspec.structs.replace(costs, weight_stash=stashes), workers=workers
    )
    with suppress(LookupError):
        return _make_recut(relaxed, narrow=True, parts=layers, params=params)
    return None


def _fixed_makers(problem: Problem) -> Iterator[Callable[[], Layout | None]]:
    if problem.question.sliced:
        yield partial(fixed_layout, problem)
        yield partial(fixed_layout, problem, within=0.01)
    yield partial(fixed_layout, problem, sliced=False)


def _moving_makers(
    problem: Problem, largest_fine: float, params: LayoutParams
) -> Iterator[Callable[[], Layout | None]]:
    if len(problem.path_by_chain) > 1:
        yield from _fixed_makers(problem)
        return
    # Number of slices of all micro-batches if each slice is a stage.
    size = problem.grid.total_microbatches * len(problem.path_by_chain[0])
    groups = cache(lambda: tuple(form_groups(problem, params)))

    def make_recut(**how: Any) -> Callable[[], Layout | None]:
        return lambda: make_by_groups(problem, groups(), partial(_make_recut, params=params, **how))

    def is_small_enough(parts: int, largest: float = math.inf) -> bool:
        return problem.question.sliced and size * parts <= min(largest_fine, largest)

    # Slices as long as stages come first: they are fast to search.
    yield make_recut(parts=1)
    if size <= params.largest_narrow:
        yield make_recut(narrow=True, parts=1)
    yield make_recut(anew=True, parts=1)
    yield make_recut(spread=False, parts=1)
    if is_small_enough(params.separate_parts):
        yield make_recut(separate=True, parts=params.separate_parts)
    if is_small_enough(params.few_parts):
        yield make_recut(separate=True, parts=params.few_parts)
        yield make_recut(spread=False, parts=params.few_parts)
    yield make_recut(staggered=True)
    if is_small_enough(params.parts):
        yield make_recut(separate=True, parts=params.parts)
    if is_small_enough(params.finest_parts, params.largest_finest):
        yield make_recut(separate=True, parts=params.finest_parts)
    yield make_recut(spread=False, floating=False)
    if size <= params.largest_shared:
        yield partial(cut_all_pipelines, problem)
        yield partial(fixed_layout, problem, sliced=problem.question.sliced)
    if is_small_enough(params.parts):  # they take longest to list, so others come first
        yield make_recut(anywhere=True, parts=params.parts)
        yield make_recut(spread=False, parts=params.parts)


def _require_layers(problem: Problem) -> None:
    """Raise LookupError if a layer has no live holder and may not be loaded."""
    layers = layers_in(
        itertools.chain.from_iterable(worker.holds for worker in problem.workers.values())
    )
    missing = sorted(set(range(problem.grid.layer_count)) - layers)
    if missing and not (problem.question.layers == "move" and problem.question.from_checkpoint):
        raise LookupError(f"no live worker holds layer {missing[0]}")


def _make_recut(
    problem: Problem,
    *,
    floating: bool = True,
    spread: bool = True,
    anywhere: bool = False,
    separate: bool = False,
    anew: bool = False,
    narrow: bool = False,
    staggered: bool = False,
    parts: int = 0,
    params: LayoutParams = DEFAULTS.layouts,
) -> Layout | None:
    """Return a layout that divides layers again, with least load; None if nothing fits."""
    replicas = form_replicas(problem, anew=anew, narrow=narrow)
    division = Divider(
        problem,
        replicas,
        floating=floating,
        spread=spread,
        anywhere=anywhere,
        separate=separate,
        staggered=staggered,
        params=params,
    ).find_division()
    if division is None:
        return None
    # Say in words how the layout was made.
    replicas_text = "re-cut pipelines"
    if narrow:
        replicas_text = "few workers a replica"
    elif anew:
        replicas_text = "all pipelines re-cut"
    layers_text = "floating layers" if floating else "one cut each"
    rest_text = "whole micro-batches"
    if spread and anywhere:
        rest_text = "the rest spread anywhere"
    elif spread:
        rest_text = "the rest spread separately" if separate else "the rest spread"
    kind = f"{replicas_text}, {layers_text}, {rest_text}"
    layout = build_layout(problem, replicas, division[1], kind)
    return with_finer_slices(problem, layout, parts) if parts else layout


def with_finer_slices(problem: Problem, layout: Layout, parts: int) -> Layout:
    """Return a copy of the layout whose slices are cut at more layers.

    Slices are also cut at the ends of the job's stages and of `parts` nearly equal ranges of each
    stage's layers.
    """
    # The workers of a stage reduce gradients together, and a later stage may end later: a slice
    # over two stages would have to end in time for the earlier one. With several ranges per stage,
    # an urgent op waits no longer than one range takes, and an idle worker receives work sooner. No
    # tensor passes between slices of one worker.
    ends = {
        first - (first - end) * number // parts
        for path in problem.path_by_chain
        for (first, end), _ in path
        for number in range(1, parts + 1)
    }

    def cut_route(route: Route) -> Route:
        return tuple(
            RouteSlice((first, end), worker)
            for (low, high), worker in route
            for first, end in _split_range(low, high, ends)
        )

    return msgspec.structs.replace(
        layout,
        routes={batch: cut_route(route) for batch, route in layout.routes.items()},
        kind=f"{layout.kind}, {'slices end with stages' if parts == 1 else 'short slices'}",
    )


def _split_range(low: int, high: int, ends: set[int]) -> Iterator[tuple[int, int]]:
    edges = [low, *sorted(end for end in ends if low < end < high), high]
    yield from itertools.pairwise(edges)
