"""Define the scheduling problem in whole ticks: costs, holders of layers, routes, bounds."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate, chain, pairwise
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

# --- Bounds ---------------------------------------------------------------------------------------


class Bound(msgspec.Struct, frozen=True):
    """Proven lower bound on the period of every schedule that a scope includes."""

    ticks: int
    scope: Scope
    counts: str = ""
    """Description, in words, of what the bound counts, such as the work of all workers."""

    def __or__(self, other: "Bound") -> "Bound":
        """Return the larger of two bounds of one scope; this one if they are equal."""
        assert self.scope is other.scope, (
            f"a bound for {self.scope} and one for {other.scope} are not comparable"
        )
        return other if other.ticks > self.ticks else self


# --- What each layer costs ------------------------------------------------------------------------


class LayerSums(NamedTuple):
    """Sums of each cost over the layers before each of the L layers.

    Every field has L + 1 values: value i is the sum over layers 0 to i - 1.
    """

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
    """Costs of each of the L layers, in ticks and memory units.

    Memory values are 0 if memory is unlimited. All tuples are empty in a problem of whole stages
    (`build_problem`), which needs no costs of single layers.
    """

    forward: tuple[int, ...] = ()
    backward_input: tuple[int, ...] = ()
    backward_weight: tuple[int, ...] = ()
    optimizer: tuple[int, ...] = ()
    all_reduce: tuple[int, ...] = ()
    activation: tuple[int, ...] = ()
    """Memory units of a micro-batch from F's start to I's end, by layer."""
    weight_stash: tuple[int, ...] = ()
    """Memory units of a micro-batch from I's end to W's end, by layer.

    0 if the backward is fused.
    """
    weights: tuple[int, ...] = ()
    """Memory units of parameters, gradients and optimizer state, by layer."""

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Ticks of F, I and W together, for each layer, at the usual speed."""
        return tuple(
            map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True))
        )

    @cached_property
    def closing(self) -> tuple[int, ...]:
        """Ticks of all-reduce and optimizer step, by layer."""
        return tuple(map(sum, zip(self.all_reduce, self.optimizer, strict=True)))

    @cached_property
    def peak_memory(self) -> tuple[int, ...]:
        """Most memory units that a micro-batch takes at any time, by layer."""
        return tuple(map(peak_memory, self.activation, self.weight_stash))

    @cached_property
    def prefix_sums(self) -> LayerSums:
        """Sums of each cost over the layers before each layer."""
        return LayerSums(*(prefix_sums(getattr(self, name)) for name in LayerSums._fields))

    def sum_over_slices(self, name: str, slices: Iterable[LayerRange]) -> tuple[int, ...]:
        """Return the sum of one cost, the field `name`, over each range of layers."""
        before = getattr(self.prefix_sums, name)
        return tuple(before[end] - before[first] for first, end in slices)


# --- What a layout is -----------------------------------------------------------------------------


UNLIMITED = 2**40
"""Value of `LiveWorker.memory` for a worker whose memory is unlimited."""


class LiveWorker(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Speed, memory and held layers of a live worker.

    Two workers with equal values are interchangeable.
    """

    per_mille: int = 1000
    """Time of its compute ops, per mille of the usual; 2000 is half speed."""
    memory: int = UNLIMITED
    """Memory units of the whole worker, for weights of held layers and for activations."""
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
"""Slices that a micro-batch passes, in order. Their layers cover the model without a gap."""


def choose_evenly(some: int, count: int) -> set[int]:
    """Return `some` evenly spaced numbers of 0 to `count` - 1, or all of these."""
    return {(2 * step + 1) * count // (2 * some) for step in range(some)}


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Held layers of each worker, and route of each micro-batch, without an order of ops."""

    kind: str
    """How the layout was made, in words that users read."""
    holds: Mapping[Worker, tuple[LayerRange, ...]]
    """Layers of every live worker: ascending, disjoint ranges that do not touch."""
    routes: Mapping[MicroBatch, Route]
    """Route of every micro-batch of an iteration."""


# --- What is fixed, before anything is decided ----------------------------------------------------


LayersMode = Literal["fixed", "move"]


class NoPlanError(NoScheduleError):
    """Raised when no schedule can exist, or none was found. The message says why."""


class NoRoomError(NoPlanError):
    """Raised when no worker has room for a micro-batch at some whole stage.

    A plan that cuts micro-batches within the stage may still exist.
    """

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
    """Number of the slice: its stage, or count of stages plus index in `Problem.slices`."""
    pipeline: int
    microbatch: int


class Visit(NamedTuple):
    """One slice of a route, by number, and its worker.

    If `Problem.assigned`, a layout has chosen the worker, and the search may still choose another.
    Otherwise it is that of the micro-batch's own pipeline, and may be down.
    """

    slice: int
    worker: Worker


class AllowedLayouts(msgspec.Struct, frozen=True, kw_only=True):
    """Restrictions on the layouts that a plan may choose from."""

    layers: LayersMode = "fixed"
    """"move" if workers may come to hold other layers, "fixed" if not."""
    from_checkpoint: bool = False
    """True if layers that no live worker holds may be loaded from a checkpoint."""
    sliced: bool = True
    """True if a micro-batch may change workers within a stage."""

    @property
    def bound_scope(self) -> Scope:
        """Scope of bounds that hold for every plan with one of these layouts."""
        if self.layers == "move":
            return Scope.LAYERS
        return Scope.PLACE if self.sliced else Scope.STAGES


IN_PLACE = AllowedLayouts()
"""Restriction to layouts in which no layer moves."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Scheduling problem of a job: its costs in ticks, live workers, held layers and routes."""

    name: str
    tick_seconds: float
    grid: Grid
    times: Times
    """Ticks of ops: of O by column, of others by slice number, stages first."""
    memory: Memory | None
    workers: Mapping[Worker, LiveWorker]
    """Live workers in sorted order. All other workers of the grid are down."""
    groups: ReduceGroups
    """Groups of workers that hold equal layers, and what these reduce together."""
    backward: BackwardMode = "split"
    optimizer: OptimizerMode = "staggered"
    sharing: bool = False
    """True if any live holder of a slice may run any micro-batch at it.

    False: only the micro-batches of workers that are down or lack room change workers.
    """
    shedding: bool = False
    """True if, without `sharing`, peers of a lost worker may hand on their own micro-batches."""
    parts: tuple[int, ...] = ()
    """Number of equal parts into which a micro-batch may be cut, by stage.

    Each part is a layer; the number is 0 if the layers of a stage differ. The tuple is empty if
    micro-batches are never cut. Only bounds use it, as the problem itself has whole stages.
    """
    slices: tuple[LayerRange, ...] = ()
    """Layers of the slices that are not stages; their numbers follow those of the stages."""
    routes: Mapping[MicroBatch, tuple[Visit, ...]]
    """Route of each micro-batch: the slices that it passes, in order.

    With layers in place, the route passes the stages of its direction on the workers of its
    pipeline, also on those that are down.
    """
    rounds_down: bool = False
    """True if all costs, those of slow workers too, are rounded down, as bounds require."""
    assigned: bool = False
    """True if the routes name the worker of each unit, as in a layout.

    `sharing` is then true, so that other holders may still run the unit. Otherwise the search
    chooses all workers.
    """
    question: AllowedLayouts = IN_PLACE
    """Which layouts are allowed, in a problem from which layouts are made."""
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
    def has_unequal_memory(self) -> bool:
        """True if live workers of one column differ in memory."""
        amounts = {(worker.column, state.memory) for worker, state in self.workers.items()}
        return len(amounts) > len({worker.column for worker in self.workers})

    @cached_property
    def column_of(self) -> tuple[int, ...]:
        """Column of each virtual stage, by the stage's number."""
        return tuple(stage.column for stage in self.grid.stages)

    @cached_property
    def reduction_root(self) -> tuple[int, ...]:
        """First of the columns that reduce gradients together, for each column.

        With bidirectional pipelines, a column does so with those that hold copies of its stages;
        else it is alone.
        """
        columns_of_copies = (
            (column, self.column_of[self.grid.original_stage(stage)])
            for stage, column in enumerate(self.column_of)
        )
        return tuple(component_roots(self.grid.columns, columns_of_copies))

    @cached_property
    def op_kinds(self) -> tuple[OpKind, ...]:
        """Kinds of a unit's compute ops, in order: F, I, W, or F, B."""
        return (OpKind.F, OpKind.I, OpKind.W) if self.backward == "split" else (OpKind.F, OpKind.B)

    @property
    def gradient_kind(self) -> OpKind:
        """Kind that frees the activation and sends the gradient: I, or B when fused."""
        return self.op_kinds[1]

    @cached_property
    def live_pipelines_by_column(self) -> tuple[tuple[int, ...], ...]:
        """For each column, the numbers of the pipelines whose worker there is alive."""
        # Once through all workers, as there may be thousands.
        pipelines: list[list[int]] = [[] for _ in range(self.grid.columns)]
        for worker in self.live_workers:
            pipelines[worker.column].append(worker.pipeline)
        return tuple(map(tuple, pipelines))

    @cached_property
    def layers_by_slice(self) -> tuple[LayerRange, ...]:
        """Layers of each slice, by slice number."""
        return (*self.grid.layers_by_stage, *self.slices)

    @cached_property
    def holders_by_slice(self) -> tuple[tuple[Worker, ...], ...]:
        """Live workers that hold each slice, sorted, by slice number.

        With layers in place and one direction, only workers of the stage's column count; with two
        directions, also those of the other column that holds its layers.
        """
        # Look at groups, not at workers: there are few groups, and a large job has thousands of
        # workers.
        members: list[list[Worker]] = [[] for _ in self.groups.held]
        for worker in self.live_workers:
            members[self.group_number(worker)].append(worker)
        by_slice = []
        for number, groups in enumerate(
            find_holding_groups(self.layers_by_slice, self.groups.held)
        ):
            workers = sorted(chain.from_iterable(members[group] for group in groups))
            # In place, a stage runs in its own column.
            if not self.assigned and self.grid.chains == 1:
                column = self.column_of[number]
                workers = [worker for worker in workers if worker.column == column]
            by_slice.append(tuple(workers))
        return tuple(by_slice)

    @property
    def has_unequal_time(self) -> bool:
        """True if workers that share work would take unequal time for their own micro-batches.

        False if `assigned`.
        """
        return (
            self.sharing
            and not self.assigned
            and (self.has_slow_workers or len(set(self.grid.microbatches)) > 1)
        )

    @cached_property
    def hosts_by_slice(self) -> tuple[tuple[Worker, ...], ...]:
        """Live holders with room for one micro-batch at the slice, sorted, by slice number."""
        if self.memory is None:
            return self.holders_by_slice
        room = {
            worker: state.memory - weights_of(self.memory, state.holds)
            for worker, state in self.workers.items()
        }
        # A worker that holds a slice is of no use if its weights leave too little memory.
        by_slice = []
        for number, holders in enumerate(self.holders_by_slice):
            need = peak_memory(*self.held_amounts(number))
            by_slice.append(tuple(worker for worker in holders if need <= room[worker]))
        return tuple(by_slice)

    def held_amounts(self, slice_: int) -> tuple[int, int]:
        """Return a micro-batch's (activation, stash) at a slice, in memory units.

        Both are 0 if memory is unlimited, and the stash if the backward is fused. What is held for
        no time counts as 0, too: the stash of a W that takes no ticks, and the activation at the
        model's last slice if F and I take none.
        """
        if self.memory is None:
            return 0, 0
        # No gradient comes from a later worker here, so I may start the moment F ends.
        ends = self.layers_by_slice[slice_][1] == self.grid.layer_count
        passes = (
            not ends
            or self.usual_ticks(OpKind.F, slice_) + self.usual_ticks(self.gradient_kind, slice_) > 0
        )
        # A fused backward leaves no stash for later.
        stashes = self.backward == "split" and self.usual_ticks(OpKind.W, slice_) > 0
        return passes * self.memory.activation[slice_], stashes * self.memory.weight_stash[slice_]

    def allowed_hosts(self, slice_: int, pipeline: int) -> tuple[Worker, ...]:
        """Return the workers that may run a slice for the micro-batches of a pipeline."""
        hosts = self.hosts_by_slice[slice_]
        if self.sharing:
            return hosts
        # Only the micro-batches of workers that are down or lack room change workers, and with
        # `shedding` those of a lost worker's peers.
        home = self.home_worker(slice_, pipeline)
        may_hand_on = (
            self.shedding
            and len(self.live_pipelines_by_column[self.column_of[slice_]]) < self.grid.pipelines
        )
        return hosts if may_hand_on or home not in hosts else (home,)

    @cached_property
    def host_operation_count(self) -> int:
        """Number of pairs (op, worker that may run it): the size of a CP-SAT model."""
        hosts = sum(
            len(self.allowed_hosts(unit.slice, unit.pipeline)) for unit in self.iterate_units()
        )
        return hosts * len(self.op_kinds)

    def home_worker(self, stage: int, pipeline: int) -> Worker:
        """Return the worker in a pipeline and a stage's column, which may be down."""
        return Worker(pipeline, self.column_of[stage])

    def op_ticks(self, kind: OpKind, slice_: int, worker: Worker) -> int:
        """Return the ticks of an op (not O) of a slice on a live worker.

        An A takes the usual time; a slow worker's other ops are rounded up, or down if
        `rounds_down`.
        """
        if kind is OpKind.A or not self.has_slow_workers:
            return self.usual_ticks(kind, slice_)
        # B takes as long as I and W, which are rounded one by one.
        if kind is OpKind.B:
            return self.op_ticks(OpKind.I, slice_, worker) + self.op_ticks(OpKind.W, slice_, worker)
        # For bounds, a slow worker's ticks must not be longer than they are.
        slowed = self.usual_ticks(kind, slice_) * self.workers[worker].per_mille
        return slowed // 1000 if self.rounds_down else -(-slowed // 1000)

    def usual_ticks(self, kind: OpKind, slice_: int) -> int:
        """Return the ticks of an op (not O) of a slice at usual speed."""
        return self._ticks_by_op[kind, slice_]

    @cached_property
    def _ticks_by_op(self) -> dict[tuple[OpKind, int], int]:
        nobody = Worker(-1, -1)
        return {
            (kind, number): self.times.duration_ticks(kind, number, nobody)
            for kind in OpKind
            if kind is not OpKind.O
            for number in range(len(self.layers_by_slice))
        }

    def copies_of(self, stage: int) -> tuple[int, ...]:
        """Return the stages of all directions with the layers of `stage`, itself included."""
        if self.grid.chains == 1:
            return (stage,)
        layers = self.layers_by_slice
        stages = range(len(self.grid.stages))
        return tuple(other for other in stages if layers[other] == layers[stage])

    def fastest_ticks(self, kind: OpKind, stage: int) -> int:
        """Return the least ticks of an op on any live holder of a stage.

        It must have one. With two directions, the stage's copy in the other one counts, too.
        """
        holders = self.holders_by_slice[stage]
        if not self.has_slow_workers:
            holders = holders[:1]
        return min(
            self.op_ticks(kind, copy, worker)
            for copy in self.copies_of(stage)
            for worker in holders
        )

    def min_transfer_ticks(self, stage: int) -> int:
        """Return the least ticks of an activation's transfer from a stage to the next.

        0 if one worker may run both.
        """
        same_column = self.column_of[stage] == self.column_of[stage + 1]
        # With two directions, a worker holds stages of both, and may run consecutive ones.
        can_stay = self.grid.chains > 1 and (self.sharing or self.failed)
        return 0 if same_column or can_stay else self.times.transfer

    @property
    def bound_scope(self) -> Scope:
        """Scope of the lower bounds that are proven for this problem, with layers in place."""
        if not self.sharing:
            return Scope.OWN
        return Scope.PLACE if self.can_cut_stages else Scope.STAGES

    @property
    def can_cut_stages(self) -> bool:
        """True if a schedule may cut micro-batches within a stage."""
        return any(count != 1 for count in self.parts)

    def count_parts(self, stage: int) -> int:
        """Return into how many equal parts a micro-batch may be cut at a stage.

        0 if the layers of the stage differ; 1 if micro-batches are never cut.
        """
        return self.parts[stage] if self.parts else 1

    @cached_property
    def min_path_ticks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Least ticks of a micro-batch on the first n stages, as (forward, backward).

        Both tuples are indexed by n, from 0 on; the backward counts I, or B if fused. Each stage
        but the last includes the transfer to the next. Stages of both directions are added up.
        """
        stages = range(len(self.grid.stages))
        hops = [self.min_transfer_ticks(stage) for stage in stages[:-1]] + [0]

        # One sum for each number of stages, so that any part of the way is a difference of two.
        def sum_over_path(kind: OpKind) -> tuple[int, ...]:
            ticks = (self.fastest_ticks(kind, stage) + hops[stage] for stage in stages)
            return tuple(accumulate(ticks, initial=0))

        return sum_over_path(OpKind.F), sum_over_path(self.gradient_kind)

    def group_number(self, worker: Worker) -> int:
        """Return the index of a live worker's group in `groups.held`."""
        return self.groups.number_of[self.workers[worker].holds]

    def optimizer_ticks(self, worker: Worker) -> int:
        """Return the ticks of the optimizer step of a live worker."""
        layers, usual = self.workers[worker].holds, self.grid.held_layers_by_column
        if layers == usual[worker.column]:
            return self.times.optimizer[worker.column]
        # Ticks of single layers are rounded separately, so that their sum may differ from those of
        # their stage.
        if layers in usual:
            return self.times.optimizer[usual.index(layers)]
        return sum(sum(self.times.optimizer_of_layer[first:end]) for first, end in layers)

    @cached_property
    def number_of_slice(self) -> Mapping[LayerRange, int]:
        """Number of each slice, by its layers; the first where several have the same."""
        return {
            layers: number for number, layers in reversed(list(enumerate(self.layers_by_slice)))
        }

    def reduction_ticks(self, layers: LayerRange) -> int:
        """Return the ticks of the gradient reduction of the slice with these layers."""
        return self.times.all_reduce[self.number_of_slice[layers]]

    @cached_property
    def can_reduce_early(self) -> bool:
        """True if reductions that groups share may precede compute ops of other layers.

        False if reductions take time, as each would then occupy all of its holders at once, and
        with a synchronous optimizer.
        """
        return (
            self.groups.has_shared_reductions
            and self.optimizer == "staggered"
            and not any(self.times.all_reduce)
        )

    @cached_property
    def reduces_in_bubbles(self) -> bool:
        """True if a reduction that takes time may precede its workers' last compute op.

        The reduction then lies in a bubble. Its group must have several reductions, and no groups
        may share any.
        """
        if self.groups.has_shared_reductions:
            return False
        # A group with a single reduction has no later compute op that its reduction could precede.
        counts: Counter[int] = Counter()
        timed: set[int] = set()
        for layers, groups in self.groups.reductions:
            counts.update(groups)
            if self.reduction_ticks(layers):
                timed.update(groups)
        return any(counts[group] > 1 for group in timed)

    @property
    def anneals_reductions(self) -> bool:
        """True if annealing chooses at which ticks reductions begin in bubbles.

        The optimizer is then staggered.
        """
        return self.reduces_in_bubbles and self.optimizer == "staggered"

    def ticks_after_group(self, worker: Worker) -> int:
        """Return the ticks from a group's end to the end of its worker's busy window.

        A group ends with its last reduction, and the optimizer step follows. If
        `times_each_reduction` is false, the group ends with its compute ops, and these ticks
        include its reductions.
        """
        ticks = self.optimizer_ticks(worker)
        if not self.times_each_reduction:
            ticks += self.ticks_of_reductions(self.group_number(worker))
        return ticks

    @property
    def times_each_reduction(self) -> bool:
        """True if each reduction has a start of its own.

        That is so if groups share reductions, or if some lie in bubbles. Otherwise, all reductions
        of a group follow its compute ops.
        """
        return self.groups.has_shared_reductions or self.reduces_in_bubbles

    def ticks_of_reductions(self, group: int) -> int:
        """Return the ticks of all reductions in which a group takes part."""
        return self._reduction_ticks_by_group[group]

    @cached_property
    def _reduction_ticks_by_group(self) -> tuple[int, ...]:
        ticks = [0] * len(self.groups.held)
        for layers, groups in self.groups.reductions:
            for group in groups:
                ticks[group] += self.reduction_ticks(layers)
        return tuple(ticks)

    @property
    def max_optimizer_ticks(self) -> int:
        """Ticks of the longest optimizer step of a live worker."""
        return max(map(self.optimizer_ticks, self.workers))

    def column_closing_ticks(self, column: int) -> int:
        """Return the closing ticks of a worker that holds only the layers of a column."""
        stages = self.grid.stages_of_column(column)
        reductions = sum(self.times.all_reduce[stage] for stage in stages)
        return reductions + self.times.optimizer[column]

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

    # --- What layouts are made from ---------------------------------------------------------------

    @cached_property
    def path_by_chain(self) -> tuple[tuple[tuple[LayerRange, int], ...], ...]:
        """Stages of each direction, in order, as pairs (range of layers, column)."""
        stages = list(zip(self.grid.layers_by_stage, self.column_of, strict=True))
        # Micro-batch number i takes direction i, so that it has the stages of that direction.
        paths = []
        for direction in range(self.grid.chains):
            numbers = self.grid.stages_of_microbatch(direction)
            paths.append(tuple(stages[number] for number in numbers))
        return tuple(paths)

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
        """Return the memory units of the layers that workers would receive to hold `holds`.

        If weights are unknown, return the number of these layers.
        """
        weights = self.costs.weights if any(self.costs.weights) else (1,) * self.grid.layer_count
        # A worker that keeps its layers is skipped first, as most workers do.
        return sum(
            weights[layer]
            for worker, ranges in holds.items()
            if ranges != self.workers[worker].holds
            for layer in layers_in(ranges).difference(self.list_held_layers(worker))
        )

    def held_closing_ticks(self, worker: Worker) -> int:
        """Return a worker's closing ticks for the layers that it holds in this problem."""
        return sum_over_ranges(self.costs.prefix_sums.closing, self.workers[worker].holds)

    def slice_ticks(self, layers: LayerRange, worker: Worker) -> int:
        """Return the ticks of F, I and W together of these layers on a worker.

        Each op is rounded up by itself.
        """
        slow = self.slowness(worker)
        return sum(
            -(-(sums[layers[1]] - sums[layers[0]]) * slow // 1000)
            for sums in self.costs.prefix_sums[:3]
        )

    @cached_property
    def ample_ticks(self) -> int:
        """Ticks in which the slowest worker could do everything; no worker needs more."""
        slowest = max(map(self.slowness, self.live_workers))
        work = sum(self.costs.work) * self.grid.total_microbatches * slowest // 1000
        return work + sum(self.costs.closing) + 1


class HeldRange(NamedTuple):
    """Consecutive layers, and the workers that hold all of them."""

    layers: LayerRange
    holders: tuple[Worker, ...]


def iterate_held_ranges(problem: Problem) -> Iterator[HeldRange]:
    """Yield ranges of layers, ascending, with the live workers that hold them.

    Raises LookupError if no live worker holds some range.
    """
    # The edges of all stages and of all held layers.
    cuts: set[int] = set()
    for path in problem.path_by_chain:
        cuts.update(*(layers for layers, _ in path))
    for properties in problem.workers.values():
        cuts.update(*properties.holds)
    # Between two cuts, all layers have the same holders.
    for first, end in pairwise(sorted(cuts)):
        holders = []
        for worker, properties in problem.workers.items():
            if any(low <= first and end <= high for low, high in properties.holds):
                holders.append(worker)
        if not holders:
            raise LookupError(f"no live worker holds layer {first}")
        yield HeldRange((first, end), tuple(holders))
