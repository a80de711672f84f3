"""Problems to make layouts for, and what every layout must fulfil."""

import itertools

import networkx as nx

from slipstream.planner.model.from_job import build_routes_in_place
from slipstream.planner.model.problem import (
    UNLIMITED,
    AllowedLayouts,
    LayerTicks,
    Layout,
    LiveWorker,
    MicroBatch,
    Problem,
)
from slipstream.planner.model.reduce_groups import ReduceGroups
from slipstream.schedules.layers import sum_over_ranges
from slipstream.schedules.schedule import Grid, Times, VirtualStage, Worker


def problem(
    pipelines=2,
    stages=2,
    microbatches=2,
    per_stage=2,
    *,
    failed=(),
    slow=None,
    layers="move",
    transfer=2,
    weights=8,
    room=None,
    optimizer=1,
    times=None,
    **more,
) -> Problem:
    """A problem of equal layers, `per_stage` a stage.

    Each takes 10 ticks for F, I and W, and a micro-batch holds 1 of it.
    """
    count = stages * per_stage
    times, activation = tuple(times or (10,) * count), int(room is not None)
    failed = {Worker.parse(name) for name in failed}
    ranges = [(stage * per_stage, (stage + 1) * per_stage) for stage in range(stages)]
    grid = Grid(
        pipelines=pipelines,
        columns=stages,
        microbatches=(microbatches,) * pipelines
        if isinstance(microbatches, int)
        else tuple(microbatches),
        stages=tuple(
            VirtualStage(column=stage, layers=layers) for stage, layers in enumerate(ranges)
        ),
    )
    of_stages = tuple(sum(times[slice(*layers)]) for layers in ranges)
    return Problem(
        name="by hand",
        tick_seconds=1.0,
        grid=grid,
        memory=None,
        groups=ReduceGroups(
            held=tuple((layers,) for layers in ranges),
            reductions=tuple((layers, (stage,)) for stage, layers in enumerate(ranges)),
        ),
        times=Times(
            forward=of_stages,
            backward_input=of_stages,
            backward_weight=of_stages,
            all_reduce=(0,) * stages,
            optimizer=(optimizer * per_stage,) * stages,
            transfer=transfer,
        ),
        workers={
            worker: LiveWorker(
                per_mille=(slow or {}).get(str(worker), 1000),
                memory=UNLIMITED if room is None else room,
                holds=(ranges[worker.column],),
            )
            for worker in grid.workers()
            if worker not in failed
        },
        routes=build_routes_in_place(grid),
        costs=LayerTicks(
            forward=times,
            backward_input=times,
            backward_weight=times,
            optimizer=(optimizer,) * count,
            all_reduce=(0,) * count,
            activation=(activation,) * count,
            weight_stash=(activation,) * count,
            weights=(weights * activation,) * count,
        ),
        question=AllowedLayouts(layers=layers, **more),
    )


def loads(problem_: Problem, layout: Layout) -> dict[Worker, int]:
    """Ticks of each live worker: its ops, then all-reduce and optimizer of what it holds."""
    found = {
        worker: sum_over_ranges(problem_.costs.prefix_sums.closing, ranges)
        for worker, ranges in layout.holds.items()
    }
    for route in layout.routes.values():
        for layers, worker in route:
            found[worker] += problem_.slice_ticks(layers, worker)
    return found


def assert_valid(problem_: Problem, layout: Layout, *, once: bool = True) -> None:
    """Rules of a layout, each stated by itself.

    `once`: routes pass a worker once, as without virtual stages and where what is spread does not
    run anywhere.
    """
    assert set(layout.holds) == set(problem_.live_workers)
    for ranges in layout.holds.values():
        assert all(low < high for low, high in ranges)
        assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))
    assert set(layout.routes) == {
        MicroBatch(pipeline, number)
        for pipeline, count in enumerate(problem_.grid.microbatches)
        for number in range(count)
    }
    passes = nx.DiGraph()
    for route in layout.routes.values():
        ends = [0, *(stop.layers[1] for stop in route)]
        assert [stop.layers[0] for stop in route] == ends[:-1]
        assert ends[-1] == problem_.grid.layer_count
        for (first, end), worker in route:
            assert any(low <= first < end <= high for low, high in layout.holds[worker])
        passes.add_edges_from(
            (a.worker, b.worker) for a, b in itertools.pairwise(route) if a.worker != b.worker
        )
    assert not once or nx.is_directed_acyclic_graph(passes), (
        "two routes pass two workers in opposite order"
    )
    if any(problem_.costs.activation):
        for worker, ranges in layout.holds.items():
            layers = [layer for low, high in ranges for layer in range(low, high)]
            needed = sum(
                problem_.costs.weights[layer] + problem_.costs.peak_memory[layer]
                for layer in layers
            )
            assert needed <= problem_.workers[worker].memory
    if problem_.question.layers == "fixed":
        assert layout.holds == {
            worker: live_worker.holds for worker, live_worker in problem_.workers.items()
        }
