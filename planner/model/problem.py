"""The scheduling problem in whole ticks: what each layer costs, who holds what, what is decided; bounds as values."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import msgspec

from slipstream.schedules.graph import joined
from slipstream.schedules.layers import LayerRange, total, totals
from slipstream.schedules.schedule import (
    BackwardMode,
    Grid,
    Memory,
    NoScheduleError,
    OpKind,
    OptimizerMode,
    Scope,
    Times,
    Worker,
)

# --- Bounds -----------------------------------------------------------------------------------------------------------


class Bound(msgspec.Struct, frozen=True):
    """No schedule that the question allows has a shorter period."""

    ticks: int
    scope: Scope
    counts: str = ""
    """What it counts, in words."""

    def __or__(self, other: "Bound") -> "Bound":
        """The larger of two bounds, which answer the same question; the first of equals."""
        assert self.scope is other.scope, f"a bound for {self.scope} and one for {other.scope} are not comparable"
        return other if other.ticks > self.ticks else self


# --- What each layer costs --------------------------------------------------------------------------------------------


class LayerSums(NamedTuple):
    """[layer] sums over all layers before it, L + 1 values each."""

    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    all_reduce: tuple[int, ...]
    closing: tuple[int, ...]
    activation: tuple[int, ...]
    weight_stash: tuple[int, ...]
    weights: tuple[int, ...]
    most: tuple[int, ...]


class LayerTicks(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One value for each of the L layers; memory is 0 where it is unlimited.

    Without values where nothing is cut and no layer moves: then the ticks may be too coarse for single layers.
    """

    forward: tuple[int, ...] = ()
    backward_input: tuple[int, ...] = ()
    backward_weight: tuple[int, ...] = ()
    optimizer: tuple[int, ...] = ()
    all_reduce: tuple[int, ...] = ()
    activation: tuple[int, ...] = ()
    """Of a micro-batch, from F to I;"""
    weight_stash: tuple[int, ...] = ()
    """from I to W."""
    weights: tuple[int, ...] = ()
    """Parameters, gradients and optimizer state."""

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Ticks of F, I and W of each layer for one micro-batch, at the usual speed."""
        return tuple(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))

    @cached_property
    def closing(self) -> tuple[int, ...]:
        """Ticks of each layer at the end of an iteration on a worker that holds it: all-reduce and optimizer."""
        return tuple(map(sum, zip(self.all_reduce, self.optimizer, strict=True)))

    @cached_property
    def most(self) -> tuple[int, ...]:
        """The most that a micro-batch ever holds of each layer: its activation, or after its I its stash."""
        return tuple(map(max, self.activation, self.weight_stash))

    @cached_property
    def sums(self) -> LayerSums:
        """Sums over the layers before each one."""
        return LayerSums(*(totals(getattr(self, name)) for name in LayerSums._fields))

    def of_slices(self, name: str, slices: Iterable[LayerRange]) -> tuple[int, ...]:
        """The values of this name, of ranges of layers."""
        before = getattr(self.sums, name)
        return tuple(before[end] - before[first] for first, end in slices)


# --- What a layout is -------------------------------------------------------------------------------------------------


Held = tuple[LayerRange, ...]
"""What a worker holds: ascending ranges that do not touch."""
UNLIMITED = 2**40
"""Room of a worker where memory is unlimited."""


def groups_that_hold(ranges: Sequence[LayerRange], groups: Sequence[Held]) -> list[list[int]]:
    """[range] the numbers of the groups that hold all of its layers, ascending. One pass over what is held."""
    order = sorted(range(len(ranges)), key=lambda number: ranges[number])
    firsts = [ranges[number][0] for number in order]
    found: list[list[int]] = [[] for _ in ranges]
    for group, held in enumerate(groups):
        for low, high in held:
            for number in order[bisect_left(firsts, low):bisect_left(firsts, high)]:
                if ranges[number][1] <= high:
                    found[number].append(group)
    return found


class LiveWorker(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that planning knows of a live worker: two that are equal may change places."""

    per_mille: int = 1000
    """Time of its compute ops as a multiple of the usual one: 1000 is normal, 2000 half speed."""
    room: int = UNLIMITED
    """Memory for weights and activations together."""
    holds: Held
    """Its layers: now, or in a layout."""


class MicroBatch(NamedTuple):
    """The micro-batch of this number that this pipeline reads in an iteration."""

    pipeline: int
    microbatch: int


class RouteSlice(NamedTuple):
    """One slice of a route: layers, and the worker that runs their F, I and W."""

    layers: LayerRange
    worker: Worker


Route = tuple[RouteSlice, ...]
"""Its layers tile 0..L-1 in order."""


def evenly(some: int, count: int) -> set[int]:
    """So many of the numbers below a count, in equal steps."""
    return {(2 * step + 1) * count // (2 * some) for step in range(some)}


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What an order in time is then searched for."""

    kind: str
    """How it was made, in a few words, e.g. "re-cut pipelines, floating layers"."""
    holds: Mapping[Worker, tuple[LayerRange, ...]]
    """Every live worker: ascending, disjoint ranges that do not touch."""
    routes: Mapping[MicroBatch, Route]
    """Every micro-batch of an iteration."""


# --- What is fixed, before anything is decided ------------------------------------------------------------------------


LayersMode = Literal["fixed", "move"]


class NoPlanError(NoScheduleError):
    """No schedule can exist; the message says why."""


class Unit(NamedTuple):
    """A micro-batch at a slice of its route: its F, I and W share one worker."""

    slice: int
    """The number of a stage, or one beyond them: `Problem.slices`."""
    pipeline: int
    microbatch: int


class Visit(NamedTuple):
    """A slice of a route, and the worker that the layout has for it."""

    slice: int
    worker: Worker


class LayoutScope(msgspec.Struct, frozen=True, kw_only=True):
    """Which layouts a plan may choose from."""

    layers: LayersMode = "fixed"
    """Whether workers may come to hold other layers."""
    from_checkpoint: bool = False
    """Whether layers that no live worker holds may be loaded from a checkpoint."""
    sliced: bool = True
    """Whether a route may be cut within what its workers hold; False: whole micro-batches at each worker."""

    @property
    def scope(self) -> Scope:
        """Of what is proven for it."""
        return Scope.LAYERS if self.layers == "move" else Scope.PLACE if self.sliced else Scope.STAGES


IN_PLACE = LayoutScope()


class Problem(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A job with its failures, and a layout: who holds which layers, what a micro-batch passes."""

    name: str
    tick_seconds: float
    grid: Grid
    times: Times
    """By slice, stages first; so is `memory`."""
    memory: Memory | None
    workers: Mapping[Worker, LiveWorker]
    """The live workers, sorted; the others of the grid are down."""
    groups: tuple[Held, ...]
    """The layers that the workers of each group hold."""
    reductions: tuple[tuple[LayerRange, tuple[int, ...]], ...]
    """Layers whose gradients are reduced together, ascending, and the groups that hold them."""
    backward: BackwardMode = "split"
    optimizer: OptimizerMode = "staggered"
    sharing: bool = False
    """Any live holder of a slice may run any micro-batch of it. Else only micro-batches of failed workers go to others.
    """
    shedding: bool = False
    """Without sharing: of a stage that has lost a worker, live ones may hand on micro-batches of their own, too."""
    parts: tuple[int, ...] = ()
    """By stage, into how many equal layers a micro-batch may be cut, 0 where layers are not equal; (): never. What is
    planned here are whole stages: it is the bound that counts them.
    """
    slices: tuple[LayerRange, ...] = ()
    """Those beside the stages, which have the next numbers."""
    routes: Mapping[MicroBatch, tuple[Visit, ...]]
    """The slices that each micro-batch passes, in order; in place, the stages of its chain on workers of its pipeline,
    which may be down."""
    assigned: bool = False
    """Whether the routes say who runs what, as those of layouts that were made do: then all holders share. In place,
    that is to be chosen."""
    question: LayoutScope = IN_PLACE
    """Of a problem that layouts are made for."""
    costs: LayerTicks = LayerTicks()
    """Of such a problem."""

    @cached_property
    def live(self) -> tuple[Worker, ...]:
        """The workers that are not down, sorted."""
        return tuple(self.workers)

    @cached_property
    def failed(self) -> frozenset[Worker]:
        """The workers that are down."""
        return frozenset(worker for worker in self.grid.workers() if worker not in self.workers)

    @cached_property
    def slow(self) -> bool:
        """Whether some live worker takes another time than the usual one."""
        return any(worker.per_mille != 1000 for worker in self.workers.values())

    @cached_property
    def roomier(self) -> bool:
        """Whether some live workers have more room than others of their column."""
        return len({(worker.column, one.room) for worker, one in self.workers.items()}) > \
            len({worker.column for worker in self.workers})

    @cached_property
    def column_of(self) -> tuple[int, ...]:
        """The worker column of each virtual stage."""
        return tuple(stage.column for stage in self.grid.stages)

    @cached_property
    def tied(self) -> tuple[int, ...]:
        """For each column, the first of those whose workers reduce gradients together; with one chain, itself."""
        return tuple(joined(self.grid.columns, ((column, self.column_of[self.grid.original(stage)])
                                                for stage, column in enumerate(self.column_of))))

    @cached_property
    def kinds(self) -> tuple[OpKind, ...]:
        """The compute ops of a unit, in order."""
        return (OpKind.F, OpKind.I, OpKind.W) if self.backward == "split" else (OpKind.F, OpKind.B)

    @property
    def gradient_kind(self) -> OpKind:
        """The op whose end frees the activation and sends the gradient on: I, or B when fused."""
        return self.kinds[1]

    @cached_property
    def live_by_column(self) -> tuple[tuple[int, ...], ...]:
        """For each column, the pipelines whose worker there is live."""
        return tuple(tuple(pipeline for pipeline in range(self.grid.pipelines)
                           if Worker(pipeline, column) not in self.failed) for column in range(self.grid.columns))

    @cached_property
    def layers_of(self) -> tuple[LayerRange, ...]:
        """[slice] its layers."""
        return (*self.grid.layers_by_stage, *self.slices)

    @cached_property
    def ahead(self) -> tuple[int, ...]:
        """[slice] stages of a chain from the one on in which it begins."""
        grid = self.grid
        first = [low for low, _ in self.layers_of[:grid.depth]]
        return (*(grid.depth - grid.original(stage) for stage in range(len(grid.stages))),
                *(grid.depth + 1 - bisect_right(first, low) for low, _ in self.slices))

    def path(self, pipeline: int, microbatch: int) -> Sequence[int]:
        """The slices that a micro-batch passes, in order."""
        return [visit.slice for visit in self.routes[MicroBatch(pipeline, microbatch)]]

    @cached_property
    def holders(self) -> tuple[tuple[Worker, ...], ...]:
        """[slice] the live workers that hold it, sorted; in place, those of its stage's column."""
        members: list[list[Worker]] = [[] for _ in self.groups]
        for worker in self.live:
            members[self.group(worker)].append(worker)
        found = [sorted(worker for group in groups for worker in members[group])
                 for groups in groups_that_hold(self.layers_of, self.groups)]
        if not self.assigned:
            found = [[worker for worker in workers if worker.column == column]
                     for column, workers in zip(self.column_of, found, strict=True)]
        return tuple(map(tuple, found))

    @property
    def unequal_time(self) -> bool:
        """Whether some live workers have less time for their own micro-batches than others, which may run them, have
        for theirs."""
        return self.sharing and not self.assigned and (self.slow or len(set(self.grid.microbatches)) > 1)

    def hosts(self, slice_: int, pipeline: int) -> tuple[Worker, ...]:
        """The workers that may run this slice of this pipeline's micro-batches."""
        if self.sharing:
            return self.holders[slice_]
        own = self.worker(slice_, pipeline)
        short = self.shedding and len(self.holders[slice_]) < self.grid.pipelines
        return self.holders[slice_] if short or own in self.failed else (own,)

    @cached_property
    def operations_by_host(self) -> int:
        """Compute ops, counted once per possible host."""
        return sum(len(self.hosts(unit.slice, unit.pipeline)) for unit in self.units()) * len(self.kinds)

    def worker(self, stage: int, pipeline: int) -> Worker:
        """The worker of this pipeline that holds the stage by its column."""
        return Worker(pipeline, self.column_of[stage])

    def cost(self, kind: OpKind, slice_: int, worker: Worker) -> int:
        """Ticks of a compute op or A of this slice on a worker."""
        if kind is OpKind.A or not self.slow:
            return self.usual(kind, slice_)
        if kind is OpKind.B:
            return self.cost(OpKind.I, slice_, worker) + self.cost(OpKind.W, slice_, worker)
        return -(-self.usual(kind, slice_) * self.workers[worker].per_mille // 1000)

    def usual(self, kind: OpKind, slice_: int) -> int:
        """Ticks of a compute op or A of this slice on a worker that takes the usual time."""
        return self._usual[kind, slice_]

    @cached_property
    def _usual(self) -> dict[tuple[OpKind, int], int]:
        nobody = Worker(-1, -1)
        return {(kind, number): self.times.duration_ticks(kind, number, nobody)
                for kind in OpKind if kind is not OpKind.O for number in range(len(self.layers_of))}

    def fastest(self, kind: OpKind, slice_: int) -> int:
        """The least that this op takes on any live worker that holds the slice."""
        holders = self.holders[slice_]
        return min(self.cost(kind, slice_, worker) for worker in (holders if self.slow else holders[:1]))

    def hop(self, worker: Worker, other: Worker) -> int:
        """Ticks a tensor needs from one worker to another: 0 where they are the same."""
        return 0 if worker == other else self.times.transfer

    def hold(self, stage: int) -> int:
        """The most that a micro-batch ever holds at this stage: its activation, or after its I its stash."""
        return max(self.activation(stage), self.stash(stage))

    def least_room(self, stage: int) -> int:
        """What one micro-batch holds at most on its worker from its F of this stage until its W there has ended.

        The worker may hold deeper stages of the same chain; their W can be done before the gradient is back at this
        one. Where every worker has this room for each of its stages, a plan exists: one micro-batch after the other,
        each W directly after its I. Where one has not, none does.
        """
        held = most = 0
        for other in self.grid.stages_of(self.column_of[stage]):
            if other >= stage and other // self.grid.depth == stage // self.grid.depth:
                most = max(most, held + self.hold(other))
                held += self.activation(other)
        return most

    def least_hop(self, stage: int) -> int:
        """The least ticks that a tensor needs from a stage to the next one."""
        same = self.column_of[stage] == self.column_of[stage + 1]
        # With several chains, a worker holds layers of both directions, which may follow each other.
        return 0 if same or (self.sharing and self.grid.chains > 1) else self.times.transfer

    @property
    def scope(self) -> Scope:
        """The question that the problem asks, in place."""
        return Scope.OWN if not self.sharing else Scope.PLACE if self.sliced else Scope.STAGES

    @property
    def sliced(self) -> bool:
        """Whether a schedule may cut micro-batches within a stage."""
        return any(count != 1 for count in self.parts)

    def parts_of(self, stage: int) -> int:
        """Into how many equal layers a micro-batch may be cut at a stage; 0 where its layers are not equal."""
        return self.parts[stage] if self.parts else 1

    @cached_property
    def least_ways(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(forward, back): for 0, 1, 2 ... stages from the first on, the least ticks of their F, or of their I (or B),
        each with the way to the stage behind.
        """
        stages = range(len(self.grid.stages))
        hops = [self.least_hop(stage) for stage in stages[:-1]] + [0]
        forward, back = (tuple(accumulate((self.fastest(kind, stage) + hops[stage] for stage in stages), initial=0))
                         for kind in (OpKind.F, self.gradient_kind))
        return forward, back

    def activation(self, stage: int) -> int:
        """Memory held from F start to the end of I (or B); 0 where memory is unlimited."""
        return self.memory.activation[stage] if self.memory else 0

    def stash(self, stage: int) -> int:
        """Memory held from I end to W end; 0 when fused or where memory is unlimited."""
        return self.memory.weight_stash[stage] if self.memory and self.backward == "split" else 0

    def room(self, worker: Worker) -> int:
        """Memory for activations on a live worker."""
        one = self.workers[worker]
        return one.room - self._beside[one.holds]

    @cached_property
    def _beside(self) -> Mapping[Held, int]:
        """Memory of the weights of each group's layers."""
        before = self.memory.weights_before if self.memory and self.memory.weights else ()
        return {held: total(before, held) if before else 0 for held in self.groups}

    def group(self, worker: Worker) -> int:
        """The same for workers that have the same deadline: those that hold the same layers."""
        return self._number[self.workers[worker].holds]

    @cached_property
    def _number(self) -> Mapping[Held, int]:
        return {held: number for number, held in enumerate(self.groups)}

    def step(self, worker: Worker) -> int:
        """Ticks of the optimizer step of a live worker."""
        held, usual = self.workers[worker].holds, self.grid.held_by_column
        if held == usual[worker.column]:
            return self.times.optimizer[worker.column]
        # Layers may be rounded otherwise than the stages that they are of.
        return self.times.optimizer[usual.index(held)] if held in usual else \
            sum(sum(self.times.optimizer_of_layer[first:end]) for first, end in held)

    @cached_property
    def linked(self) -> tuple[tuple[int, ...], ...]:
        """[group] those that reduce some gradients with it, itself included: its window ends with the last of them."""
        found: list[set[int]] = [{group} for group in range(len(self.groups))]
        for _, groups in self.reductions:
            for group in groups:
                found[group].update(groups)
        return tuple(tuple(sorted(groups)) for groups in found)

    @cached_property
    def linking(self) -> bool:
        """Whether groups share reductions. Where none do, each reduces its gradients after its last compute op."""
        return any(len(groups) > 1 for _, groups in self.reductions)

    @cached_property
    def number_of(self) -> Mapping[LayerRange, int]:
        """The number of each slice, by its layers; of copies, that of the first."""
        return {layers: number for number, layers in reversed(list(enumerate(self.layers_of)))}

    def reduction_ticks(self, layers: LayerRange) -> int:
        """Ticks of the reduction of these layers."""
        return self.times.all_reduce[self.number_of[layers]]

    @cached_property
    def interleaved(self) -> bool:
        """Whether a worker may reduce some of its layers, done early, between compute ops of the others.

        Only where reductions take no time: else they would take that of all holders at once.
        """
        return self.linking and self.optimizer == "staggered" and not any(self.times.all_reduce)

    def after_group(self, worker: Worker) -> int:
        """Ticks from the end of a live worker's group to that of its window: the optimizer step.

        Where no groups share reductions, which then end with their compute ops, its reductions besides.
        """
        return self.step(worker) + (0 if self.linking else self._reducing[self.group(worker)])

    @cached_property
    def _reducing(self) -> tuple[int, ...]:
        """[group] ticks of its reductions."""
        return tuple(sum(self.reduction_ticks(layers) for layers, groups in self.reductions if group in groups)
                     for group in range(len(self.groups)))

    @property
    def longest_step(self) -> int:
        """Ticks of the longest optimizer step."""
        return max(map(self.step, self.workers))

    def column_closing(self, column: int) -> int:
        """`after_group` of a worker that holds the stages of its column."""
        return sum(self.times.all_reduce[stage] for stage in self.grid.stages_of(column)) + self.times.optimizer[column]

    def units(self, pipelines: Iterable[int] | None = None) -> Iterator[Unit]:
        """Every unit of the given pipelines (default: all), by pipeline, micro-batch, place in the route."""
        for pipeline in range(self.grid.pipelines) if pipelines is None else pipelines:
            for microbatch in range(self.grid.microbatches[pipeline]):
                for slice_ in self.path(pipeline, microbatch):
                    yield Unit(slice_, pipeline, microbatch)

    @property
    def operations(self) -> int:
        """Compute ops in one iteration: the size of the problem."""
        return sum(map(len, self.routes.values())) * len(self.kinds)

    # --- What layouts are made from -----------------------------------------------------------------------------------

    @cached_property
    def paths(self) -> tuple[tuple[tuple[LayerRange, int], ...], ...]:
        """One for each chain: the stages that its micro-batches visit, in order, as (layers, worker column)."""
        return tuple(tuple((self.grid.layers_of(stage), self.column_of[stage]) for stage in self.grid.path(chain))
                     for chain in range(self.grid.chains))

    @cached_property
    def live_of(self) -> tuple[tuple[Worker, ...], ...]:
        """[pipeline] its live workers, sorted."""
        found: list[list[Worker]] = [[] for _ in range(self.grid.pipelines)]
        for worker in self.live:
            found[worker.pipeline].append(worker)
        return tuple(map(tuple, found))

    @cached_property
    def least_slowness(self) -> int:
        """Per mille of the usual time that the fastest live worker takes."""
        return min(map(self.slowness, self.live))

    def slowness(self, worker: Worker) -> int:
        """Per mille of the usual time that this worker takes."""
        return self.workers[worker].per_mille

    def layers_held(self, worker: Worker) -> tuple[int, ...]:
        """The layers that a worker holds now, ascending."""
        return tuple(layer for layers in self.workers[worker].holds for layer in range(*layers))

    def closing(self, worker: Worker) -> int:
        """Ticks of the all-reduces and the optimizer steps of the layers that a worker holds now."""
        return total(self.costs.sums.closing, self.workers[worker].holds)

    def slice_ticks(self, layers: LayerRange, worker: Worker) -> int:
        """Ticks of F, I and W of these layers on a worker; each op is rounded up by itself."""
        slow = self.slowness(worker)
        return sum(-(-(sums[layers[1]] - sums[layers[0]]) * slow // 1000) for sums in self.costs.sums[:3])

    @cached_property
    def ample_ticks(self) -> int:
        """More than the longest load can be: the slowest worker runs everything."""
        slowest = max(map(self.slowness, self.live))
        return sum(self.costs.work) * self.grid.total_microbatches * slowest // 1000 + sum(self.costs.closing) + 1


class Part(NamedTuple):
    """Consecutive layers and those who hold all of them."""

    layers: LayerRange
    holders: tuple[Worker, ...]


def parts_of(problem: Problem) -> Iterator[Part]:
    """The parts, in order of layers. Raises LookupError where no live worker holds a layer."""
    cuts = {end for path in problem.paths for layers, _ in path for end in layers}
    cuts |= {end for one in problem.workers.values() for layers in one.holds for end in layers}
    for first, end in pairwise(sorted(cuts)):
        holders = tuple(worker for worker, one in problem.workers.items()
                        if any(low <= first and end <= high for low, high in one.holds))
        if not holders:
            raise LookupError(f"no live worker holds layer {first}")
        yield Part((first, end), holders)
