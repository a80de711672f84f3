"""Schedules of the general form for tests: any holdings, any routes, no planner.

Written from the rules alone: each layer goes to some live workers, each micro-batch takes any route
through holders, and the ops are started as soon as possible in a random order that the rules allow.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream.schedules.layers import merge_ranges, sum_over_ranges
from slipstream.schedules.memory import memory_peaks
from slipstream.schedules.schedule import (
    Grid,
    LayerRange,
    Memory,
    Op,
    OpKind,
    Schedule,
    Seat,
    Slow,
    Times,
    VirtualStage,
    Worker,
    compute_period_ticks,
)
from tests.generate import Programs, with_programs

Stop = tuple[Worker, LayerRange]
Routes = Mapping[tuple[int, int], Sequence[Stop]]


@st.composite
def general_schedules(draw, **limits) -> Schedule:
    """A valid schedule of any small job, with layers anywhere; see `general`."""
    return general(random.Random(draw(st.integers(0, 2**32))), **limits)


def general(
    rng: random.Random,
    *,
    max_pipelines: int = 3,
    max_columns: int = 3,
    max_layers: int = 8,
    max_microbatches: int = 3,
) -> Schedule:
    """A valid schedule of the general form."""
    grid = _grid(
        rng,
        rng.randint(1, max_pipelines),
        rng.randint(1, max_columns),
        max_layers,
        max_microbatches,
    )
    workers = list(grid.workers())
    live = sorted(rng.sample(workers, rng.randint(1, len(workers))))
    holders = [rng.sample(live, rng.randint(1, min(3, len(live)))) for _ in range(grid.layer_count)]
    holds = {}
    for worker in live:
        layers = (layer for layer, of in enumerate(holders) if worker in of)
        holds[worker] = merge_ranges((layer, layer + 1) for layer in layers)
    routes = {
        (pipeline, number): list(_route(rng, grid.layer_count, holds))
        for pipeline in range(grid.pipelines)
        for number in range(grid.microbatches[pipeline])
    }
    reduced = list(_reduced(rng, holders))
    slices = _numbered(
        rng, grid, [*(layers for route in routes.values() for _, layers in route), *reduced]
    )
    roles = _roles(rng, live)
    schedule = Schedule(
        job="general",
        tick_seconds=0.5,
        grid=grid,
        slices=_extra(grid, slices),
        times=_times(rng, grid, slices, live),
        memory=None,
        backward=rng.choice(["split", "fused"]),
        optimizer=rng.choice(["staggered", "synchronous"]),
        failed=tuple(sorted(set(workers) - set(live))),
        seats=tuple(_seat(rng, grid, worker, roles[worker], holds[worker]) for worker in live),
        programs=((),),
        period_ticks=0,
        lower_bound_ticks=0,
        status="feasible",
        method="random",
    )
    schedule = _run(rng, schedule, slices, routes, reduced)
    return _with_memory(rng, schedule) if rng.random() < 0.7 else schedule


def layers_moved() -> Schedule:
    """Two pipelines of two stages, where layers have moved and worker 1.1 is down.

    A stage has two layers; F, I and W each take a tick a layer.

    1.0 holds layer 2, too. Of micro-batch 1.0 it runs layers 0 to 2; what is left, and stage 1 of
    1.1, runs on 0.1, re-routed. And it has time for stage 0 of 0.1, which is shed.
    """
    grid = Grid(
        pipelines=2,
        columns=2,
        microbatches=(2, 2),
        stages=(VirtualStage(column=0, layers=(0, 2)), VirtualStage(column=1, layers=(2, 4))),
    )
    first, second, other = Worker(0, 0), Worker(0, 1), Worker(1, 0)
    routes = {
        (0, 0): [(first, (0, 2)), (second, (2, 4))],
        (0, 1): [(other, (0, 2)), (second, (2, 4))],
        (1, 0): [(other, (0, 3)), (second, (3, 4))],
        (1, 1): [(other, (0, 2)), (second, (2, 4))],
    }
    reduced = [(0, 2), (2, 3), (3, 4)]
    slices = {(0, 2): [0], (2, 4): [1], (0, 3): [2], (3, 4): [3], (2, 3): [4]}
    lengths = tuple(end - begin for begin, end in slices)
    schedule = Schedule(
        job="layers moved",
        tick_seconds=0.5,
        grid=grid,
        slices=_extra(grid, slices),
        failed=(Worker(1, 1),),
        times=Times(
            forward=lengths,
            backward_input=lengths,
            backward_weight=lengths,
            all_reduce=(0,) * 5,
            optimizer=(2, 2),
            transfer=0,
            optimizer_of_layer=(1,) * 4,
        ),
        memory=Memory(
            unit=1.0, capacity=(40, 40), activation=lengths, weight_stash=lengths, weights=(8,) * 4
        ),
        backward="split",
        optimizer="staggered",
        seats=(Seat(first, first, 0), Seat(second, second, 0), Seat(other, other, 0, ((0, 3),))),
        programs=((),),
        period_ticks=0,
        lower_bound_ticks=1,
        status="feasible",
        method="hand",
    )
    return _run(random.Random(1), schedule, slices, routes, reduced)


def floating_layer() -> Schedule:
    """One pipeline of two stages, both of whose workers hold layer 2.

    A stage has two layers; micro-batches are cut before or behind layer 2.
    """
    grid = Grid(
        pipelines=1,
        columns=2,
        microbatches=(2,),
        stages=(VirtualStage(column=0, layers=(0, 2)), VirtualStage(column=1, layers=(2, 4))),
    )
    first, second = Worker(0, 0), Worker(0, 1)
    routes = {
        (0, 0): [(first, (0, 2)), (second, (2, 4))],
        (0, 1): [(first, (0, 3)), (second, (3, 4))],
    }
    slices = {(0, 2): [0], (2, 4): [1], (0, 3): [2], (3, 4): [3], (2, 3): [4]}
    lengths = tuple(end - begin for begin, end in slices)
    schedule = Schedule(
        job="floating layer",
        tick_seconds=0.5,
        grid=grid,
        slices=_extra(grid, slices),
        failed=(),
        times=Times(
            forward=lengths,
            backward_input=lengths,
            backward_weight=lengths,
            all_reduce=(0,) * 5,
            optimizer=(2, 2),
            transfer=0,
            optimizer_of_layer=(1,) * 4,
        ),
        memory=None,
        backward="split",
        optimizer="staggered",
        seats=(Seat(first, first, 0, ((0, 3),)), Seat(second, second, 0)),
        programs=((),),
        period_ticks=0,
        lower_bound_ticks=1,
        status="feasible",
        method="hand",
    )
    return _run(random.Random(1), schedule, slices, routes, [(0, 2), (2, 3), (3, 4)])


def _run(
    rng: random.Random,
    schedule: Schedule,
    slices: Mapping[LayerRange, Sequence[int]],
    routes: Routes,
    reduced: Sequence[LayerRange],
) -> Schedule:
    """The schedule with programs and its period."""
    ops = _Clock(schedule, slices).run(rng, routes, reduced)
    flat = [op for program in ops.values() for op in program]
    if schedule.optimizer == "staggered":
        length = compute_period_ticks(flat)
    else:
        end = max(op.end_ticks for op in flat)
        length = end - min(op.start_ticks for op in flat)
    status = "optimal" if length == schedule.lower_bound_ticks else "feasible"
    return with_programs(schedule, ops, period_ticks=length, status=status)


def _grid(
    rng: random.Random, pipelines: int, columns: int, max_layers: int, max_microbatches: int
) -> Grid:
    """Stages of one chain or of two, with one layer or more each.

    Stages may be without layers, and count as one each.
    """
    chains = rng.choice([1, 2]) if columns > 1 else 1
    layers = rng.randint(columns, max(columns, max_layers))
    cuts = [0, *sorted(rng.sample(range(1, layers), columns - 1)), layers]
    named = rng.random() < 0.8
    ranges = list(pairwise(cuts)) if named else [None] * columns
    stages = tuple(
        VirtualStage(column=(index + chain) % columns, layers=layers)
        for chain in range(chains)
        for index, layers in enumerate(ranges)
    )
    return Grid(
        pipelines=pipelines,
        columns=columns,
        stages=stages,
        chains=chains,
        microbatches=tuple(rng.randint(0, max_microbatches) for _ in range(pipelines)),
    )


def _route(
    rng: random.Random, layers: int, holds: Mapping[Worker, Sequence[LayerRange]]
) -> list[Stop]:
    route, at = [], 0
    while at < layers:
        worker, end = rng.choice(
            [
                (worker, end)
                for worker, ranges in holds.items()
                for first, end in ranges
                if first <= at < end
            ]
        )
        begin, at = at, rng.randint(at + 1, end)
        route.append((worker, (begin, at)))
    return route


def _reduced(rng: random.Random, holders: Sequence[Sequence[Worker]]) -> list[LayerRange]:
    """Ranges of layers with the same holders, cut now and then."""
    cuts = [
        layer
        for layer in range(1, len(holders))
        if set(holders[layer]) != set(holders[layer - 1]) or rng.random() < 0.3
    ]
    return list(pairwise([0, *cuts, len(holders)]))


def _numbered(
    rng: random.Random, grid: Grid, wanted: Sequence[LayerRange]
) -> dict[LayerRange, list[int]]:
    """The numbers of each range of layers.

    It is a stage, a copy of one, or else a further slice.
    """
    numbers: dict[LayerRange, list[int]] = defaultdict(list)
    for stage, layers in enumerate(grid.layers_by_stage):
        numbers[layers].append(stage)
    extra = sorted(set(wanted) - set(numbers))
    rng.shuffle(extra)
    for number, layers in enumerate(extra, len(grid.stages)):
        numbers[layers].append(number)
    return numbers


def _extra(grid: Grid, slices: Mapping[LayerRange, Sequence[int]]) -> tuple[LayerRange, ...]:
    by_number = sorted((number, layers) for layers, numbers in slices.items() for number in numbers)
    return tuple(layers for number, layers in by_number if number >= len(grid.stages))


def _times(
    rng: random.Random,
    grid: Grid,
    slices: Mapping[LayerRange, Sequence[int]],
    live: Sequence[Worker],
) -> Times:
    numbered = [(number, layers) for layers, numbers in slices.items() for number in numbers]
    ranges = [layers for _, layers in sorted(numbered)]

    def sums(low: int, high: int) -> tuple[int, ...]:
        of_layer = [rng.randint(low, high) for _ in range(grid.layer_count)]
        return tuple(sum(of_layer[first:end]) for first, end in ranges)

    slow = sorted(rng.sample(live, rng.randint(0, min(2, len(live))))) if rng.random() < 0.4 else []
    return Times(
        forward=sums(rng.randint(0, 1), 3),
        backward_input=sums(0, 3),
        backward_weight=sums(0, 3),
        all_reduce=sums(0, 1),
        optimizer=tuple(rng.randint(0, 4) for _ in range(grid.columns)),
        transfer=rng.randint(0, 2),
        slow=tuple(Slow(worker, rng.choice([1340, 2000])) for worker in slow),
        optimizer_of_layer=tuple(rng.randint(0, 2) for _ in range(grid.layer_count)),
    )


def _roles(rng: random.Random, live: Sequence[Worker]) -> dict[Worker, Worker]:
    """Each worker its own role; now and then two change places."""
    roles = {worker: worker for worker in live}
    if len(live) > 1 and rng.random() < 0.2:
        role, other = rng.sample(live, 2)
        roles[role], roles[other] = other, role
    return roles


def _seat(
    rng: random.Random, grid: Grid, worker: Worker, role: Worker, holds: tuple[LayerRange, ...]
) -> Seat:
    """`holds` may be left out where the worker holds what its column does."""
    column = merge_ranges(
        layers
        for stage, layers in zip(grid.stages, grid.layers_by_stage, strict=True)
        if stage.column == role.column
    )
    return Seat(worker, role, 0, None if holds == column and rng.random() < 0.7 else holds)


class _Clock:
    """Starts ops one after the other, each as soon as it can.

    It waits for its worker and for what the rules say.
    """

    def __init__(self, schedule: Schedule, slices: Mapping[LayerRange, Sequence[int]]) -> None:
        self.schedule, self.slices = schedule, slices
        self.free = {seat.worker: 0 for seat in schedule.seats}
        self.ops: Programs = {seat.worker: [] for seat in schedule.seats}

    def run(self, rng: random.Random, routes: Routes, reduced: Sequence[LayerRange]) -> Programs:
        """The programs of all workers."""
        waiting = {
            microbatch: list(self._chain(rng, route)) for microbatch, route in routes.items()
        }
        ready: dict[tuple[int, int], tuple[Worker, int] | None] = dict.fromkeys(waiting)
        weights: list[tuple[tuple[int, int], Worker, int, int]] = []
        last = [0] * self.schedule.grid.layer_count
        split = self.schedule.backward == "split"
        while waiting or weights:
            if weights and (not waiting or rng.random() < 0.4):
                microbatch, worker, number, begin = weights.pop(rng.randrange(len(weights)))
                self._final(self._start(OpKind.W, number, microbatch, worker, begin), last)
                continue
            microbatch = rng.choice(list(waiting))
            kind, worker, number = waiting[microbatch].pop(0)
            before = ready[microbatch]
            hop = self.schedule.times.transfer if before is not None and before[0] != worker else 0
            op = self._start(
                kind, number, microbatch, worker, before[1] + hop if before is not None else 0
            )
            ready[microbatch] = (worker, op.end_ticks)
            if kind is OpKind.I:
                weights.append((microbatch, worker, number, op.end_ticks))
            elif kind is OpKind.B:
                self._final(op, last)
            if not waiting[microbatch]:
                del waiting[microbatch]
        assert split or not weights
        self._close(rng, reduced, last)
        return self.ops

    def _chain(self, rng: random.Random, route: Sequence[Stop]) -> list[tuple[OpKind, Worker, int]]:
        """Fs along the route and backwards back, without the Ws."""
        backward = OpKind.I if self.schedule.backward == "split" else OpKind.B
        numbered = [(worker, rng.choice(self.slices[layers])) for worker, layers in route]
        forwards = [(OpKind.F, *stop) for stop in numbered]
        return [*forwards, *((backward, *stop) for stop in reversed(numbered))]

    def _final(self, op: Op, last: list[int]) -> None:
        for layer in range(*self.schedule.layers_of(op.slice)):
            last[layer] = max(last[layer], op.end_ticks)

    def _close(
        self, rng: random.Random, reduced: Sequence[LayerRange], last: Sequence[int]
    ) -> None:
        """The As, one range after the other, and the Os."""
        for layers in rng.sample(reduced, len(reduced)):
            holders = []
            for worker in self.free:
                held_layers = self.schedule.held_layers(worker)
                if any(first <= layers[0] and layers[1] <= end for first, end in held_layers):
                    holders.append(worker)
            begin = max(*last[layers[0] : layers[1]], *(self.free[worker] for worker in holders))
            for worker in holders:
                self._start(OpKind.A, rng.choice(self.slices[layers]), None, worker, begin)
        end = max(last) if self.schedule.optimizer == "synchronous" else 0
        for seat in self.schedule.seats:
            begin = max(end, self.free[seat.worker])
            times = self.schedule.times
            if seat.holds is None:
                length = times.optimizer[seat.role.column]
            else:
                of_layer = times.optimizer_of_layer
                length = sum(of_layer[layer] for layers in seat.holds for layer in range(*layers))
            self.ops[seat.worker].append(
                Op(OpKind.O, None, None, None, seat.worker, begin, begin + length)
            )

    def _start(
        self,
        kind: OpKind,
        number: int,
        microbatch: tuple[int, int] | None,
        worker: Worker,
        begin: int,
    ) -> Op:
        start = max(begin, self.free[worker])
        end = start + self.schedule.times.duration_ticks(kind, number, worker)
        op = Op(kind, number, *(microbatch or (None, None)), worker, start, end)
        self.ops[worker].append(op)
        self.free[worker] = end
        return op


def _with_memory(rng: random.Random, schedule: Schedule) -> Schedule:
    """Set memory limits that just hold.

    Each column has the room that the fullest of its workers needs.
    """
    grid = schedule.grid
    of_layer = [rng.randint(0, 2) for _ in range(grid.layer_count)]
    sizes = tuple(sum(of_layer[first:end]) for first, end in schedule.layers_by_slice)
    memory = Memory(
        unit=0.5,
        capacity=(0,) * grid.columns,
        activation=sizes,
        weight_stash=tuple(size // 2 for size in sizes),
        weights=tuple(rng.randint(0, 4) for _ in range(grid.layer_count)),
    )
    room = [0] * grid.columns
    for worker, peak in memory_peaks(replace(schedule, memory=memory)).items():
        seat = schedule.seat_of[worker]
        if seat.holds is None:
            room[seat.role.column] = max(room[seat.role.column], peak)
            continue
        column_weights = sum_over_ranges(
            memory.weights_before, schedule.held_layers_of_column(worker.column)
        )
        needed = peak + sum_over_ranges(memory.weights_before, seat.holds) - column_weights
        room[worker.column] = max(room[worker.column], needed)
    return replace(schedule, memory=replace(memory, capacity=tuple(room)))
