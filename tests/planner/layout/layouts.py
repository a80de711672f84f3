"""Problems to make layouts for, and what every layout must fulfil."""

import itertools

import networkx as nx

from slipstream.planner.layout.problem import LayoutProblem
from slipstream.planner.layout.types import UNLIMITED, Layout, LiveWorker, MicroBatch
from slipstream.schedules.schedule import Worker


def problem(pipelines=2, stages=2, microbatches=2, per_stage=2, *, failed=(), slow=None, layers="move", transfer=2,
            weights=8, room=None, optimizer=1, times=None, **more) -> LayoutProblem:
    """Equal layers of 10 ticks for each of F, I and W, `per_stage` a stage; a micro-batch holds 1 of each layer."""
    count = stages * per_stage
    times = tuple(times or (10,) * count)
    failed = {Worker.parse(name) for name in failed}
    live = [Worker(pipeline, stage) for pipeline in range(pipelines) for stage in range(stages)
            if Worker(pipeline, stage) not in failed]
    ranges = [(stage * per_stage, (stage + 1) * per_stage) for stage in range(stages)]
    return LayoutProblem(
        forward=times, backward_input=times, backward_weight=times, optimizer=(optimizer,) * count,
        all_reduce=(0,) * count, transfer=transfer, weight_stash=(1,) * count,
        activation=() if room is None else (1,) * count, weights=(weights,) * count, workers={worker: LiveWorker(
            per_mille=(slow or {}).get(str(worker), 1000), room=UNLIMITED if room is None else room,
            holds=(ranges[worker.column],)) for worker in live},
        microbatches=(microbatches,) * pipelines if isinstance(microbatches, int) else tuple(microbatches),
        paths=(tuple(zip(ranges, range(stages), strict=True)),),
        layers=layers, **more)


def loads(given: LayoutProblem, layout: Layout) -> dict[Worker, int]:
    """Ticks of each live worker: its ops, then all-reduce and optimizer of what it holds."""
    found = {worker: sum(given.tail[layer] for held in layout.holds[worker] for layer in range(*held))
             for worker in layout.holds}
    for route in layout.routes.values():
        for layers, worker in route:
            found[worker] += given.slice_ticks(layers, worker)
    return found


def assert_valid(given: LayoutProblem, layout: Layout, *, once: bool = True) -> None:
    """Rules of a layout, each stated by itself. `once`: routes pass a worker once, as without virtual stages and
    where what is spread does not run anywhere."""
    assert set(layout.holds) == set(given.live)
    for ranges in layout.holds.values():
        assert all(low < high for low, high in ranges)
        assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))
    assert set(layout.routes) == {MicroBatch(pipeline, number) for pipeline, count in enumerate(given.microbatches)
                                  for number in range(count)}
    passes = nx.DiGraph()
    for route in layout.routes.values():
        ends = [0, *(stop.layers[1] for stop in route)]
        assert [stop.layers[0] for stop in route] == ends[:-1]
        assert ends[-1] == given.layer_count
        for (first, end), worker in route:
            assert any(low <= first < end <= high for low, high in layout.holds[worker])
        passes.add_edges_from((a.worker, b.worker) for a, b in itertools.pairwise(route) if a.worker != b.worker)
    assert not once or nx.is_directed_acyclic_graph(passes), "two routes pass two workers in opposite order"
    if given.activation:
        for worker, ranges in layout.holds.items():
            held = [layer for low, high in ranges for layer in range(low, high)]
            assert sum(given.weight(layer) + given.most(layer) for layer in held) <= given.room_of(worker)
    if given.layers == "fixed":
        assert layout.holds == given.holds
