"""The scheduling problem in whole ticks: costs and holders of layers, routes, bounds."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import msgspec

from slipstream.planner.model.reduce_groups import Held, ReduceGroups, find_holding_groups
from slipstream.schedules.graph import component_roots
from slipstream.schedules.layers import LayerRange, layers_in, prefix_sums, sum_over_ranges
from slipstream.schedules.memory import peak_memory, weights_of
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
    """Proven lower bound on the period of every schedule that a scope includes."""

    ticks: int
    scope: Scope
    counts: str = ""
    """Description, in words, of what the bound counts, such as the work of all workers."""

    def __or__(self, other: "Bound") -> "Bound":
        """Return the larger of two bounds of one scope, the first of equals."""
        assert self.scope is other.scope, f"a bound for {self.scope} and one for {other.scope} are not comparable"
        return other if other.ticks > self.ticks else self


# --- What each layer costs --------------------------------------------------------------------------------------------


class LayerSums(NamedTuple):
    """Prefix sums over the L layers. Value i of L + 1 values is the sum of those before i."""

    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    all_reduce: tuple[int, ...]
    closing: tuple[int, ...]
    activation: tuple[int, ...]
    weight_stash: tuple[int, ...]
    weights: tuple[int, ...]
    peak_memory: tuple[int, ...]


class LayerTicks(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Costs of each of the L layers, in ticks and memory units. Memory values are 0 where memory is
    unlimited.

    The tuples are empty if no micro-batch is cut within a stage and no layer moves: ticks may be
    too coarse for layers.
    """

    forward: tuple[int, ...] = ()
    backward_input: tuple[int, ...] = ()
    backward_weight: tuple[int, ...] = ()
    optimizer: tuple[int, ...] = ()
    all_reduce: tuple[int, ...] = ()
    activation: tuple[int, ...] = ()
    """Memory units of a micro-batch from F's start to I's end, by layer."""
    weight_stash: tuple[int, ...] = ()
    """Memory units of a micro-batch from I's end to W's end, by layer."""
    weights: tuple[int, ...] = ()
    """Memory units of parameters, gradients and optimizer state, by layer."""

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Ticks of F, I and W of each layer, at the usual speed."""
        return tuple(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))

    @cached_property
    def closing(self) -> tuple[int, ...]:
        """Ticks of all-reduce and step that each layer adds to an iteration's end."""
        return tuple(map(sum, zip(self.all_reduce, self.optimizer, strict=True)))

    @cached_property
    def peak_memory(self) -> tuple[int, ...]:
        """Most memory units of a micro-batch at each layer: activation or weight stash."""
        return tuple(map(peak_memory, self.activation, self.weight_stash))

    @cached_property
    def prefix_sums(self) -> LayerSums:
        """Sums of all costs over the layers before each layer."""
        return LayerSums(*(prefix_sums(getattr(self, name)) for name in LayerSums._fields))

    def sum_over_slices(self, name: str, slices: Iterable[LayerRange]) -> tuple[int, ...]:
        """Return the total of the cost `name` for each of these ranges of layers."""
        before = getattr(self.prefix_sums, name)
        return tuple(before[end] - before[first] for first, end in slices)


# --- What a layout is -------------------------------------------------------------------------------------------------


UNLIMITED = 2**40
"""Value of `LiveWorker.room` for a worker whose memory is unlimited."""


class LiveWorker(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Speed, memory and held layers of a live worker. Two workers with equal values are
    interchangeable."""

    per_mille: int = 1000
    """Time of its compute ops, per mille of the usual; 2000 is half speed."""
    room: int = UNLIMITED
    """Memory units for the weights of held layers and for activations together."""
    holds: Held
    """Layers that the worker holds, now or in a layout."""


class MicroBatch(NamedTuple):
    """Name of a micro-batch: the pipeline that reads it, and its number there."""

    pipeline: int
    microbatch: int


class RouteSlice(NamedTuple):
    """One slice of a route: its layers, and the worker that runs them."""

    layers: LayerRange
    worker: Worker


Route = tuple[RouteSlice, ...]
"""Slices that a micro-batch passes, in order. Their layers cover all layers of the model without a
gap."""


def choose_evenly(some: int, count: int) -> set[int]:
    """Return `some` numbers out of 0 to `count` - 1, evenly spaced."""
    return {(2 * step + 1) * count // (2 * some) for step in range(some)}


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Held layers of each worker, and route of each micro-batch, to be ordered."""

    kind: str
    """Words that say how the layout was made, e.g. "re-cut pipelines, floating layers"."""
    holds: Mapping[Worker, tuple[LayerRange, ...]]
    """Layers of every live worker: ascending, disjoint ranges that do not touch."""
    routes: Mapping[MicroBatch, Route]
    """Route of every micro-batch of an iteration."""


# --- What is fixed, before anything is decided ------------------------------------------------------------------------


LayersMode = Literal["fixed", "move"]


class NoPlanError(NoScheduleError):
    """Raised when no schedule can exist. The message says why."""


class NoRoomError(NoPlanError):
    """Raised when no worker has room for a micro-batch at a whole stage. Parts may fit."""

    def __init__(self, lack: str, outcome: str = ": no schedule can run it") -> None:
        super().__init__(lack, outcome)
        self.lack = lack
        """Part of the message that says what room is lacking, and where."""

    def __str__(self) -> str:
        """Return the message in one line."""
        return "".join(self.args)


class Unit(NamedTuple):
    """One micro-batch at one slice of its route. Its F, I and W run on the same worker."""

    slice: int
    """Number of the slice: a stage, or that of stages plus an index of `Problem.slices`."""
    pipeline: int
    microbatch: int


class Visit(NamedTuple):
    """One slice of a route by its number, and the layout's worker for it."""

    slice: int
    worker: Worker


class LayoutScope(msgspec.Struct, frozen=True, kw_only=True):
    """Restrictions on the layouts that a plan may choose from."""

    layers: LayersMode = "fixed"
    """"move" if workers may come to hold other layers, "fixed" if not."""
    from_checkpoint: bool = False
    """True if layers that no live worker holds may be loaded from a checkpoint."""
    sliced: bool = True
    """True if a micro-batch may change workers within a stage."""

    @property
    def bound_scope(self) -> Scope:
        """Scope for which bounds are proven if a plan may choose from these layouts."""
        return Scope.LAYERS if self.layers == "move" else Scope.PLACE if self.sliced else Scope.STAGES


IN_PLACE = LayoutScope()


class Problem(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Scheduling problem: a job with failures, held layers, and routes."""

    name: str
    tick_seconds: float
    grid: Grid
    times: Times
    """Ticks of ops by slice number, stages first. `memory` has the same indices."""
    memory: Memory | None
    workers: Mapping[Worker, LiveWorker]
    """Live workers in sorted order. All other workers of the grid are down."""
    groups: ReduceGroups
    """Groups of workers that hold the same layers, and so reduce their gradients together."""
    backward: BackwardMode = "split"
    optimizer: OptimizerMode = "staggered"
    sharing: bool = False
    """True if any live holder of a slice may run all micro-batches of it.

    False: only those of failed workers change workers.
    """
    shedding: bool = False
    """True if, without `sharing`, peers of a lost worker may hand on micro-batches."""
    parts: tuple[int, ...] = ()
    """Number of equal layers, by stage, into which a micro-batch may be cut.

    It is 0 if the layers of the stage differ; empty if micro-batches are never cut. The problem
    itself has whole stages; only its bound counts the parts.
    """
    slices: tuple[LayerRange, ...] = ()
    """Layers of the slices that are not stages. They are numbered after the stages."""
    routes: Mapping[MicroBatch, tuple[Visit, ...]]
    """Route of each micro-batch: the slices that it passes, in order.

    With layers in place, these are the stages of its direction on the workers of its pipeline, some
    of which may be down.
    """
    rounds_down: bool = False
    """True if costs are rounded down, for bounds, those of slow workers, too."""
    assigned: bool = False
    """True if the routes decide which worker runs each unit, as in a layout. All holders then share
    micro-batches.

    False with layers in place: the workers are still to be chosen.
    """
    question: LayoutScope = IN_PLACE
    """Rules for layouts, in a problem from which layouts are made."""
    costs: LayerTicks = LayerTicks()
    """Ticks and memory of single layers, in a problem from which layouts are made."""

    @cached_property
    def live_workers(self) -> tuple[Worker, ...]:
        """Live workers, sorted."""
        return tuple(self.workers)

    @cached_property
    def failed(self) -> frozenset[Worker]:
        """Workers of the grid that are down."""
        return frozenset(worker for worker in self.grid.workers() if worker not in self.workers)

    @cached_property
    def has_slow_workers(self) -> bool:
        """True if a live worker's compute time differs from the usual one."""
        return any(worker.per_mille != 1000 for worker in self.workers.values())

    @cached_property
    def has_unequal_room(self) -> bool:
        """True if live workers of one column differ in memory."""
        return len({(worker.column, properties.room) for worker, properties in self.workers.items()}) > \
            len({worker.column for worker in self.workers})

    @cached_property
    def column_of(self) -> tuple[int, ...]:
        """Column of each virtual stage, by stage."""
        return tuple(stage.column for stage in self.grid.stages)

    @cached_property
    def reduction_root(self) -> tuple[int, ...]:
        """First column that reduces gradients with a column, by column.

        It is the column itself unless pipelines are bidirectional, where another holds copies of
        its stages.
        """
        return tuple(component_roots(self.grid.columns, ((column, self.column_of[self.grid.original_stage(stage)])
                                                         for stage, column in enumerate(self.column_of))))

    @cached_property
    def op_kinds(self) -> tuple[OpKind, ...]:
        """Kinds of a unit's compute ops, in order: F, I, W, or F, B."""
        return (OpKind.F, OpKind.I, OpKind.W) if self.backward == "split" else (OpKind.F, OpKind.B)

    @property
    def gradient_kind(self) -> OpKind:
        """Op that frees the activation and sends the gradient: I, or B when fused."""
        return self.op_kinds[1]

    @cached_property
    def live_pipelines_by_column(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the pipelines whose worker in the column is alive, for each column."""
        return tuple(tuple(pipeline for pipeline in range(self.grid.pipelines)
                           if Worker(pipeline, column) not in self.failed) for column in range(self.grid.columns))

    @cached_property
    def layers_by_slice(self) -> tuple[LayerRange, ...]:
        """Layers of each slice, by slice number."""
        return (*self.grid.layers_by_stage, *self.slices)

    @cached_property
    def holders_by_slice(self) -> tuple[tuple[Worker, ...], ...]:
        """Live workers that hold each slice, sorted, by slice number.

        With layers in place and one direction, only those in the stage's column. With two
        directions, workers of both columns that hold its layers.
        """
        members: list[list[Worker]] = [[] for _ in self.groups.held]
        for worker in self.live_workers:
            members[self.group_number(worker)].append(worker)
        by_slice = [sorted(worker for group in groups for worker in members[group])
                    for groups in find_holding_groups(self.layers_by_slice, self.groups.held)]
        if not self.assigned and self.grid.chains == 1:
            by_slice = [[worker for worker in workers if worker.column == column]
                        for column, workers in zip(self.column_of, by_slice, strict=True)]
        return tuple(map(tuple, by_slice))

    @property
    def has_unequal_time(self) -> bool:
        """True if holders that may share micro-batches take different times for their own."""
        return self.sharing and not self.assigned and (self.has_slow_workers or len(set(self.grid.microbatches)) > 1)

    @cached_property
    def hosts_by_slice(self) -> tuple[tuple[Worker, ...], ...]:
        """Live holders of each slice with room for a micro-batch, sorted, by number."""
        if self.memory is None:
            return self.holders_by_slice
        room = {worker: state.room - weights_of(self.memory, state.holds) for worker, state in self.workers.items()}
        return tuple(tuple(worker for worker in holders if peak_memory(*self.held_amounts(number)) <= room[worker])
                     for number, holders in enumerate(self.holders_by_slice))

    def held_amounts(self, slice_: int) -> tuple[int, int]:
        """Return the activation and the stash of a micro-batch at a slice, in memory units.

        They are 0 where the memory is unlimited, and for what is held for no time. That is the
        stash of a W that takes no time, as it may end when I does, and the activation of the
        model's end if F and I take none.
        """
        if self.memory is None:
            return 0, 0
        ends = self.layers_by_slice[slice_][1] == self.grid.layer_count
        passes = not ends or self.usual_ticks(OpKind.F, slice_) + self.usual_ticks(self.gradient_kind, slice_) > 0
        stashes = self.backward == "split" and self.usual_ticks(OpKind.W, slice_) > 0
        return passes * self.memory.activation[slice_], stashes * self.memory.weight_stash[slice_]

    def allowed_hosts(self, slice_: int, pipeline: int) -> tuple[Worker, ...]:
        """Return the workers that may run slice number `slice_` for the micro-batches of this
        pipeline."""
        hosts = self.hosts_by_slice[slice_]
        if self.sharing:
            return hosts
        own = self.home_worker(slice_, pipeline)
        may_hand_on = self.shedding and len(self.live_pipelines_by_column[self.column_of[slice_]]) < self.grid.pipelines
        return hosts if may_hand_on or own not in hosts else (own,)

    @cached_property
    def host_operation_count(self) -> int:
        """Number of pairs of op and possible worker: the size of a CP-SAT model."""
        return sum(len(self.allowed_hosts(unit.slice, unit.pipeline))
                   for unit in self.iterate_units()) * len(self.op_kinds)

    def home_worker(self, stage: int, pipeline: int) -> Worker:
        """Return the worker of this pipeline in the column of the stage."""
        return Worker(pipeline, self.column_of[stage])

    def op_ticks(self, kind: OpKind, slice_: int, worker: Worker) -> int:
        """Return the ticks of op `kind` (not O) of a slice on a worker."""
        if kind is OpKind.A or not self.has_slow_workers:
            return self.usual_ticks(kind, slice_)
        if kind is OpKind.B:
            return self.op_ticks(OpKind.I, slice_, worker) + self.op_ticks(OpKind.W, slice_, worker)
        slowed = self.usual_ticks(kind, slice_) * self.workers[worker].per_mille
        return slowed // 1000 if self.rounds_down else -(-slowed // 1000)

    def usual_ticks(self, kind: OpKind, slice_: int) -> int:
        """Return the ticks of op `kind` (not O) of a slice at the usual speed."""
        return self._ticks_by_op[kind, slice_]

    @cached_property
    def _ticks_by_op(self) -> dict[tuple[OpKind, int], int]:
        nobody = Worker(-1, -1)
        return {(kind, number): self.times.duration_ticks(kind, number, nobody)
                for kind in OpKind if kind is not OpKind.O for number in range(len(self.layers_by_slice))}

    def copies_of(self, stage: int) -> tuple[int, ...]:
        """Return the stages of all directions with this stage's layers, itself included."""
        if self.grid.chains == 1:
            return (stage,)
        layers = self.layers_by_slice
        return tuple(other for other in range(len(self.grid.stages)) if layers[other] == layers[stage])

    def fastest_ticks(self, kind: OpKind, stage: int) -> int:
        """Return an op's ticks at a stage or its copies, on the fastest holder."""
        holders = self.holders_by_slice[stage]
        return min(self.op_ticks(kind, copy, worker) for copy in self.copies_of(stage)
                   for worker in (holders if self.has_slow_workers else holders[:1]))

    def min_transfer_ticks(self, stage: int) -> int:
        """Return the least ticks of an activation from a stage to the next."""
        same = self.column_of[stage] == self.column_of[stage + 1]
        # With several chains, a worker holds stages of both directions, and may run consecutive ones.
        can_stay = self.grid.chains > 1 and (self.sharing or self.failed)
        return 0 if same or can_stay else self.times.transfer

    @property
    def bound_scope(self) -> Scope:
        """Scope for which lower bounds of this problem, in place, are proven."""
        return Scope.OWN if not self.sharing else Scope.PLACE if self.can_cut_stages else Scope.STAGES

    @property
    def can_cut_stages(self) -> bool:
        """True if a schedule may cut micro-batches within a stage."""
        return any(count != 1 for count in self.parts)

    def count_parts(self, stage: int) -> int:
        """Return the number of slices that a stage may be cut into for a micro-batch.

        It is the number of its layers if they are equal, otherwise 0; 1 if no stage may be cut.
        """
        return self.parts[stage] if self.parts else 1

    @cached_property
    def min_path_ticks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Least ticks of a micro-batch's F and I or B on the first n stages.

        Both are by n, from 0 on. Each stage but the last of the model includes the transfer between
        it and the next one.
        """
        stages = range(len(self.grid.stages))
        hops = [self.min_transfer_ticks(stage) for stage in stages[:-1]] + [0]
        forward, back = (tuple(accumulate((self.fastest_ticks(kind, stage) + hops[stage] for stage in stages),
                                          initial=0))
                         for kind in (OpKind.F, self.gradient_kind))
        return forward, back

    def group_number(self, worker: Worker) -> int:
        """Return the index of a worker's group, which shares one deadline."""
        return self.groups.number_of[self.workers[worker].holds]

    def optimizer_ticks(self, worker: Worker) -> int:
        """Return the ticks of the optimizer step of a live worker."""
        held, usual = self.workers[worker].holds, self.grid.held_layers_by_column
        if held == usual[worker.column]:
            return self.times.optimizer[worker.column]
        # Ticks of single layers are rounded separately, so their sum may differ from those of their stage.
        return self.times.optimizer[usual.index(held)] if held in usual else \
            sum(sum(self.times.optimizer_of_layer[first:end]) for first, end in held)

    @cached_property
    def number_of_slice(self) -> Mapping[LayerRange, int]:
        """Number of the slice with a range of layers; the first if several have it."""
        return {layers: number for number, layers in reversed(list(enumerate(self.layers_by_slice)))}

    def reduction_ticks(self, layers: LayerRange) -> int:
        """Return the ticks of the gradient reduction of the slice with these layers."""
        return self.times.all_reduce[self.number_of_slice[layers]]

    @cached_property
    def can_reduce_early(self) -> bool:
        """True if a worker may reduce some layers before all compute ops of the others.

        This requires reductions that take no time; otherwise each would occupy all holders at once.
        """
        return self.groups.has_shared_reductions and self.optimizer == "staggered" and not any(self.times.all_reduce)

    @cached_property
    def reduces_in_bubbles(self) -> bool:
        """True if a reduction that takes time may lie in a bubble.

        It may precede the last compute op of its workers. This requires that they reduce several
        virtual stages, each with the workers of the same layers only.
        """
        timed = [group for layers, groups in self.groups.reductions for group in groups if self.reduction_ticks(layers)]
        return not self.groups.has_shared_reductions and any(
            sum(group in groups for _, groups in self.groups.reductions) > 1 for group in set(timed))

    @property
    def anneals_reductions(self) -> bool:
        """True if annealing chooses when reductions begin, in bubbles or with offset windows."""
        return self.reduces_in_bubbles and self.optimizer == "staggered"

    def ticks_after_group(self, worker: Worker) -> int:
        """Return the ticks from the end of a worker's group to its window's.

        A group ends after its last reduction, and the optimizer step follows. If reductions are not
        timed one by one, it counts as ended after its compute ops, and the ticks of its reductions
        are added.
        """
        return self.optimizer_ticks(worker) + (0 if self.times_each_reduction
                                               else self.ticks_of_reductions(self.group_number(worker)))

    @property
    def times_each_reduction(self) -> bool:
        """True if reductions have own times, shared or in bubbles; else they follow all compute."""
        return self.groups.has_shared_reductions or self.reduces_in_bubbles

    def ticks_of_reductions(self, group: int) -> int:
        """Return the ticks of all reductions in which a group takes part."""
        return self._reduction_ticks_by_group[group]

    @cached_property
    def _reduction_ticks_by_group(self) -> tuple[int, ...]:
        """Ticks of all reductions in which a group takes part, by group."""
        return tuple(sum(self.reduction_ticks(layers) for layers, groups in self.groups.reductions if group in groups)
                     for group in range(len(self.groups.held)))

    @property
    def max_optimizer_ticks(self) -> int:
        """Ticks of the longest optimizer step of a live worker."""
        return max(map(self.optimizer_ticks, self.workers))

    def column_closing_ticks(self, column: int) -> int:
        """Return the ticks of reductions and step for exactly a column's stages."""
        return sum(self.times.all_reduce[stage]
                   for stage in self.grid.stages_of_column(column)) + self.times.optimizer[column]

    def iterate_units(self, pipelines: Iterable[int] | None = None) -> Iterator[Unit]:
        """Yield the units of pipelines (default: all), by pipeline, micro-batch and route."""
        for pipeline in range(self.grid.pipelines) if pipelines is None else pipelines:
            for microbatch in range(self.grid.microbatches[pipeline]):
                for visit in self.routes[MicroBatch(pipeline, microbatch)]:
                    yield Unit(visit.slice, pipeline, microbatch)

    @property
    def operation_count(self) -> int:
        """Number of compute ops in one iteration, which is the size of the problem."""
        return sum(map(len, self.routes.values())) * len(self.op_kinds)

    # --- What layouts are made from -----------------------------------------------------------------------------------

    @cached_property
    def path_by_chain(self) -> tuple[tuple[tuple[LayerRange, int], ...], ...]:
        """Stages of each direction, in order, as pairs (range of layers, column)."""
        return tuple(tuple((self.grid.layers_of(stage), self.column_of[stage])
                           for stage in self.grid.stages_of_microbatch(chain))
                     for chain in range(self.grid.chains))

    @cached_property
    def live_by_pipeline(self) -> tuple[tuple[Worker, ...], ...]:
        """Live workers of each pipeline, sorted."""
        workers: list[list[Worker]] = [[] for _ in range(self.grid.pipelines)]
        for worker in self.live_workers:
            workers[worker.pipeline].append(worker)
        return tuple(map(tuple, workers))

    @cached_property
    def min_slowness(self) -> int:
        """Compute time of the fastest live worker, per mille of the usual time."""
        return min(map(self.slowness, self.live_workers))

    def slowness(self, worker: Worker) -> int:
        """Return the compute time of a worker, per mille of the usual time."""
        return self.workers[worker].per_mille

    def list_held_layers(self, worker: Worker) -> tuple[int, ...]:
        """Return the numbers of the layers that a worker holds in this problem, ascending."""
        return tuple(layer for layers in self.workers[worker].holds for layer in range(*layers))

    def moved_memory(self, holds: Mapping[Worker, Held]) -> int:
        """Return the memory units, or number without weights, of layers in `holds` not held
        here."""
        weights = self.costs.weights if any(self.costs.weights) else (1,) * self.grid.layer_count
        return sum(weights[layer] for worker, ranges in holds.items() if ranges != self.workers[worker].holds
                   for layer in layers_in(ranges).difference(self.list_held_layers(worker)))

    def held_closing_ticks(self, worker: Worker) -> int:
        """Return the ticks of all-reduces and steps of a worker's present layers."""
        return sum_over_ranges(self.costs.prefix_sums.closing, self.workers[worker].holds)

    def slice_ticks(self, layers: LayerRange, worker: Worker) -> int:
        """Return the ticks of F, I and W together of these layers on a worker. Each op is rounded
        up separately."""
        slow = self.slowness(worker)
        return sum(-(-(sums[layers[1]] - sums[layers[0]]) * slow // 1000) for sums in self.costs.prefix_sums[:3])

    @cached_property
    def ample_ticks(self) -> int:
        """Ticks beyond any load: the slowest worker runs everything."""
        slowest = max(map(self.slowness, self.live_workers))
        return sum(self.costs.work) * self.grid.total_microbatches * slowest // 1000 + sum(self.costs.closing) + 1


class HeldRange(NamedTuple):
    """Consecutive layers, and the workers that hold all of them."""

    layers: LayerRange
    holders: tuple[Worker, ...]


def iterate_held_ranges(problem: Problem) -> Iterator[HeldRange]:
    """Yield ranges of layers with their holders. Raises LookupError if one has none alive."""
    cuts = {end for path in problem.path_by_chain for layers, _ in path for end in layers}
    cuts |= {end for properties in problem.workers.values() for layers in properties.holds for end in layers}
    for first, end in pairwise(sorted(cuts)):
        holders = tuple(worker for worker, properties in problem.workers.items()
                        if any(low <= first and end <= high for low, high in properties.holds))
        if not holders:
            raise LookupError(f"no live worker holds layer {first}")
        yield HeldRange((first, end), holders)
