"""Define schedules as plain, frozen data that planner, checker, runtime and command line share.

A model is a sequence of layers. A *slice* is a range of layers that one worker runs for one micro-batch; usually it is
a stage. The *route* of a micro-batch is the slices that it passes: together they cover all layers in order, and each is
run by a worker that holds its layers.

Times are integer ticks of `tick_seconds` each; intervals are half-open, [start, end). Memory is counted in integer
multiples of `Memory.unit`. A program is stored once and shared by every worker that runs it. Its ops therefore name the
pipeline of a micro-batch only if it differs from the pipeline of the role that runs them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, Self, TypeVar

import msgspec

from slipstream.schedules.layers import LayerRange as LayerRange
from slipstream.schedules.layers import layers_text, merge_ranges, prefix_sums, sum_over_ranges

T = TypeVar("T")

# --- Errors -----------------------------------------------------------------------------------------------------------


class NoScheduleError(RuntimeError):
    """Error: no schedule exists for the given failures and speeds of workers. The message is one line with the reason;
    it is empty if the run has no planner for this case."""


# --- Ranges of numbers, which reading a file checks -------------------------------------------------------------------


MAX_WORKERS = 2**17
MAX_MICROBATCHES = 2**16
Natural = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)]
Ticks = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Time, or amount of memory: an integer that a double represents exactly."""
TickSeconds = Annotated[float, msgspec.Meta(ge=1e-12, le=1e6)]
Ratio = tuple[Annotated[int, msgspec.Meta(ge=1, le=2**53)], Annotated[int, msgspec.Meta(ge=1, le=2**53)]]
"""Exact fraction, as (numerator, denominator)."""


# --- The shape of a job: workers, virtual stages and their layers -----------------------------------------------------


class Worker(NamedTuple):
    """Worker, or role of a worker: the process that holds column `column` of pipeline `pipeline`.

    Without virtual stages, the column is the stage. The text form is `pipeline.column`, e.g. `1.2`.
    """

    pipeline: Natural
    column: Natural

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.column}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the name of a worker, `pipeline.column`. Raises ValueError, which quotes the text, if it has another
        form."""
        pipeline, dot, column = text.partition(".")
        if not (dot and pipeline.isdecimal() and column.isdecimal() and text.isascii() and len(text) <= 16):
            raise ValueError(f"{text!r} is not a worker: write PIPELINE.STAGE, for example 1.2")
        return cls(int(pipeline), int(column))


Speeds = tuple[tuple[Worker, float], ...]
"""Workers that do not run at the usual speed, sorted, each with the factor by which its ops take longer."""
HeldLayers = tuple[tuple[Worker, tuple[LayerRange, ...]], ...]
"""Layers of the schedule's model that each live worker holds, sorted by worker."""


class VirtualStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Virtual stage: the worker column that holds it and, if known, its half-open range of model layers."""

    column: Natural
    layers: LayerRange | None = None


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True,
           dict=True):
    """Shape of a job. `stages` are the virtual stages in the order in which a micro-batch visits them.

    Bidirectional pipelines (Chimera, Li & Hoefler 2021) have several chains: `stages` then lists them one after the
    other, with equally many stages each, and a micro-batch visits only one chain. Stages at the same place of different
    chains are *copies*: they hold the same layers, and their gradients are reduced together.
    """

    pipelines: Count
    columns: Count
    microbatches: tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_MICROBATCHES)], ...]
    """Number of micro-batches per iteration, one value per pipeline."""
    stages: tuple[VirtualStage, ...]
    chains: Count = 1
    """Number of chains: runs of virtual stages, of which a micro-batch passes one; 2 in bidirectional pipelines, else
    1.

    Micro-batch m of a pipeline passes chain m modulo `chains`.
    """

    @property
    def depth(self) -> int:
        """Number of virtual stages that a micro-batch visits."""
        return len(self.stages) // self.chains

    def stages_of_microbatch(self, microbatch: int) -> range:
        """Return the numbers of the virtual stages that a micro-batch passes, in order, given its number in its
        pipeline."""
        return self._stages_by_chain[microbatch % self.chains]

    @cached_property
    def _stages_by_chain(self) -> tuple[range, ...]:
        return tuple(range(first, first + self.depth) for first in range(0, len(self.stages), self.depth))

    def is_last(self, stage: int) -> bool:
        """Return whether a micro-batch passes this stage last."""
        return (stage + 1) % self.depth == 0

    def original_stage(self, stage: int) -> int:
        """Return the number of the stage in the first chain that has the same layers; in pipelines of one direction,
        the stage itself."""
        return stage % self.depth

    def workers(self) -> Iterator[Worker]:
        """Iterate over all workers of the grid, failed ones included, in ascending order."""
        for pipeline in range(self.pipelines):
            for column in range(self.columns):
                yield Worker(pipeline, column)

    def stages_of_column(self, column: int) -> tuple[int, ...]:
        """Return the virtual stages that a worker of this column holds, ascending."""
        return self._stages_by_column[column]

    @cached_property
    def _stages_by_column(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.columns)]
        for index, stage in enumerate(self.stages):
            held[stage.column].append(index)
        return tuple(map(tuple, held))

    @cached_property
    def held_layers_by_column(self) -> tuple[tuple[LayerRange, ...], ...]:
        """Layers of the stages of each column, as ascending ranges that do not touch, indexed by column."""
        return tuple(merge_ranges(self.layers_of(stage) for stage in held) for held in self._stages_by_column)

    @cached_property
    def layers_by_stage(self) -> tuple[LayerRange, ...]:
        """Range of layers of each virtual stage, indexed by the stage's number.

        If every stage names its layers, and the stages of each chain cover consecutive ranges from layer 0 on, with at
        least one layer each, these are the ranges. Otherwise every stage counts as one layer, numbered by its place in
        its chain. A chain is the stages that a micro-batch passes, in order; bidirectional pipelines have two.
        """
        given = tuple(stage.layers for stage in self.stages)
        named = tuple(layers for layers in given if layers is not None)
        chains = [named[first:first + self.depth] for first in range(0, len(given), self.depth)]
        if len(named) == len(given) and all(_is_tiling_from_zero(chain) for chain in chains):
            return named
        return tuple((stage % self.depth, stage % self.depth + 1) for stage in range(len(given)))

    @property
    def layer_count(self) -> int:
        """Number of layers of the model. A route covers layers 0 to `layer_count` - 1."""
        return self.layers_by_stage[self.depth - 1][1]

    def layers_of(self, stage: int) -> LayerRange:
        """Return the range of layers of a virtual stage, by its number."""
        return self.layers_by_stage[stage]

    @property
    def total_microbatches(self) -> int:
        """Number of micro-batches of all pipelines in one iteration."""
        return sum(self.microbatches)


def _is_tiling_from_zero(ranges: Sequence[LayerRange]) -> bool:
    """Return whether the ranges are non-empty and follow one another without gaps, beginning at 0."""
    return ranges[0][0] == 0 and all(first < end for first, end in ranges) and all(
        before[1] == after[0] for before, after in pairwise(ranges))


# --- Ops, as a program stores them and as they happen; seats, which run programs --------------------------------------


Origin = Literal["own", "rerouted", "shed"]
"""Relation of a worker to a micro-batch that it runs.

`own`: the micro-batch is of the worker's own pipeline. `rerouted`: it is of another pipeline whose own worker is down.
`shed`: it is of another pipeline whose own worker is alive.
"""


class OpKind(StrEnum):
    """Kinds of op, with the letters of torch.distributed.pipelining."""

    F = "F"  # forward
    I = "I"  # backward for the input
    W = "W"  # backward for the weights
    B = "B"  # I then W, fused
    A = "A"  # gradient all-reduce of a slice over all live workers that hold its layers
    O = "O"  # optimizer step of a worker


COMPUTE_KINDS = frozenset({OpKind.F, OpKind.I, OpKind.W, OpKind.B})


class ProgramOp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """Op as a program stores it: `[kind, slice, microbatch, start_ticks]`, then the pipeline if it is not the role's.

    The field `slice` is an index for `Schedule.layers_of`, None for O; `microbatch` is None for A and O. If `pipeline`
    is None, it is the pipeline of the role that runs the op.
    """

    kind: OpKind
    slice: Natural | None
    microbatch: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MICROBATCHES)] | None
    start_ticks: Ticks
    pipeline: Natural | None = None


Program = tuple[ProgramOp, ...]


class Seat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """Live worker in a schedule, as `[worker, role, program, holds]`. The role is the worker itself unless it was
    moved.

    The field `program` is an index of `Schedule.programs`.
    """

    worker: Worker
    role: Worker
    program: Natural
    holds: tuple[LayerRange, ...] | None = None
    """Layers that the worker holds, as ascending ranges that do not touch. None: the layers of its role's stages."""


class Op(msgspec.Struct, frozen=True, gc=False, order=True):
    """Op of a live worker, with the number of its micro-batch's pipeline, and start and end in ticks.

    `Schedule.op_text` names the layers of its slice.
    """

    kind: OpKind
    slice: int | None
    pipeline: int | None
    microbatch: int | None
    worker: Worker
    start_ticks: int
    end_ticks: int

    def __str__(self) -> str:
        if self.kind is OpKind.O:
            return f"O on {self.worker}"
        if self.kind is OpKind.A:
            return f"A(slice {self.slice}) on {self.worker}"
        return f"{self.kind}(micro-batch {self.pipeline}.{self.microbatch}, slice {self.slice}) on {self.worker}"


# --- What ops take: time in ticks, and room on a worker ---------------------------------------------------------------


class Slow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Entry for a worker whose compute ops take `per_mille` / 1000 of the usual time, rounded up to a tick."""

    worker: Worker
    per_mille: Annotated[int, msgspec.Meta(ge=1, le=10**6)]


class LayerCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Least time and memory of each layer, one value per layer. Bounds over all layouts are computed from these.

    Layers may need finer units than whole stages. There are `per_tick` of their time units in a tick of the schedule,
    and `per_unit` of their memory units in a unit of its memory. Both are fractions (numerator, denominator).
    """

    per_tick: Ratio = (1, 1)
    per_unit: Ratio = (1, 1)
    forward: tuple[Ticks, ...]
    backward_input: tuple[Ticks, ...]
    backward_weight: tuple[Ticks, ...]
    optimizer: tuple[Ticks, ...]
    all_reduce: tuple[Ticks, ...]
    activation: tuple[Ticks, ...]
    """Activation memory of each layer. All memory fields are 0 if memory is unlimited."""
    weight_stash: tuple[Ticks, ...]
    weights: tuple[Ticks, ...]


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Durations of ops in ticks, by the number of the slice (see `Schedule.layers_by_slice`); `optimizer` has one per
    column, `transfer` is one for all."""

    forward: tuple[Ticks, ...]
    backward_input: tuple[Ticks, ...]
    backward_weight: tuple[Ticks, ...]
    all_reduce: tuple[Ticks, ...]
    optimizer: tuple[Ticks, ...]
    transfer: Ticks
    slow: tuple[Slow, ...] = ()
    optimizer_of_layer: tuple[Ticks, ...] = ()
    """Optimizer ticks of each layer: the O of a seat with `holds` takes the sum over the layers that it holds."""
    of_layers: LayerCosts | msgspec.UnsetType = msgspec.UNSET
    """Costs of single layers. A file has this key only if its bound also covers other layouts."""
    overlap: bool | msgspec.UnsetType = msgspec.UNSET
    """True if an all-reduce (A) occupies the links of its workers, one A at a time, while they compute.

    Otherwise A occupies links and compute. A file has this key only if it is true.
    """

    def duration_ticks(self, kind: OpKind, where: int, worker: Worker) -> int:
        """Return the duration of an op in ticks on a physical worker; compute ops take longer or shorter on a worker in
        `slow`.

        The argument `where` is the number of the op's slice, for A too: stages are numbered first, then the other
        slices of the schedule (`Schedule.layers_by_slice`). For O, it is the column of the worker's role; use
        `optimizer_ticks` for a worker whose seat lists its layers. All durations of single ops are looked up here.
        """
        if kind is OpKind.O:
            return self.optimizer[where]
        if kind is OpKind.A:
            return self.all_reduce[where]
        if kind is OpKind.B:
            return self.duration_ticks(OpKind.I, where, worker) + self.duration_ticks(OpKind.W, where, worker)
        ticks = _ticks_by_slice(self, kind)[where]
        return -(-ticks * self.per_mille_of.get(worker, 1000) // 1000)

    def optimizer_ticks(self, seat: Seat) -> int:
        """Return the ticks of a live worker's optimizer step: by its column, or by its layers if its seat lists
        them."""
        if seat.holds is None:
            return self.optimizer[seat.role.column]
        return sum_over_ranges(self._optimizer_before, seat.holds)

    @cached_property
    def _optimizer_before(self) -> tuple[int, ...]:
        return prefix_sums(self.optimizer_of_layer)

    @cached_property
    def per_mille_of(self) -> Mapping[Worker, int]:
        """Time of each slow worker for any compute op, in thousandths of the usual time."""
        return {slow.worker: slow.per_mille for slow in self.slow}


def _ticks_by_slice(times: Times, kind: OpKind) -> tuple[int, ...]:
    """Return the usual ticks of F, I or W of each slice."""
    if kind is OpKind.F:
        return times.forward
    return times.backward_input if kind is OpKind.I else times.backward_weight


class Room(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Entry for a worker whose memory for activations differs from that of its column, with the amount, in multiples of
    `Memory.unit`."""

    worker: Worker
    capacity: Ticks


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Memory of the workers and what ops take of it, in multiples of `unit`, which is given in the job's unit."""

    unit: Annotated[float, msgspec.Meta(ge=1e-300, le=1e300)]
    capacity: tuple[Ticks, ...]
    """Room for activations of a worker that holds the layers of its own stages, one value per column."""
    activation: tuple[Ticks, ...]
    """Memory held per micro-batch from the start of F to the end of I, one value per slice, stages first."""
    weight_stash: tuple[Ticks, ...]
    """Memory held per micro-batch from the end of I to the end of W, one value per slice, stages first."""
    weights: tuple[Ticks, ...] = ()
    """Memory of parameters, gradients and optimizer state, one value per layer. Used for seats with `holds`."""
    capacity_of: tuple[Room, ...] | msgspec.UnsetType = msgspec.UNSET
    """Workers whose capacity differs from that of their column. A file has this key only if there are any."""

    def capacity_for(self, worker: Worker, column: int) -> int:
        """Return the memory for activations of a worker that holds the layers of `column`: its own value if
        `capacity_of` has one, else that of the column."""
        return self._capacity_of.get(worker, self.capacity[column])

    @cached_property
    def _capacity_of(self) -> Mapping[Worker, int]:
        return {room.worker: room.capacity for room in self.capacity_of or ()}

    @cached_property
    def weights_before(self) -> tuple[int, ...]:
        """Prefix sums of `weights`: the memory of the first 0, 1, 2, ... layers."""
        return prefix_sums(self.weights)


# --- The question that a bound on the period answers: among which schedules none is shorter ---------------------------


class Scope(StrEnum):
    """Set of schedules of which none is shorter than a lower bound. Scopes differ in what workers may hold and run.

    The scopes `OWN` to `LAYERS` are ordered from the narrowest to the widest: a bound for a wider one also holds for a
    narrower one. `PLACEMENT` is outside of this order: of the others, its bounds hold for `OWN` only.
    """

    OWN = "own micro-batches"
    """Workers keep their layers. A live worker runs its stages for all micro-batches of its pipeline; of other
    pipelines it runs only micro-batches of failed workers."""
    STAGES = "whole stages"
    """Workers keep their layers, and any holder of a stage may run it for any micro-batch."""
    PLACE = "layers in place"
    """Workers keep their layers, and slices of a micro-batch may begin and end within a stage."""
    ROLES = "roles"
    """Any roles may be vacant, as many as workers failed, and any live workers may play the others."""
    LAYERS = "any layers"
    """Any live worker may hold any layers."""
    PLACEMENT = "any placement"
    """No worker has failed, and pipelines run their own micro-batches. Their workers may hold any virtual stages, and
    may recompute activations."""

    def is_valid_for(self, narrower: "Scope") -> bool:
        """Return whether a bound that is proven for this scope is also proven for `narrower`."""
        if Scope.PLACEMENT in (self, narrower):
            return narrower in (self, Scope.OWN)
        return _WIDTH[narrower] <= _WIDTH[self]

    @property
    def description(self) -> str:
        """Words that say, after `no schedule is shorter`, for which schedules the bound holds."""
        return _WORDS[self]


_WIDTH = {scope: width for width, scope in enumerate(Scope)}
_WORDS = {Scope.OWN: "with layers and micro-batches in place",
          Scope.STAGES: "with whole stages in place", Scope.PLACE: "with layers in place",
          Scope.ROLES: "for any assignment of roles", Scope.LAYERS: "for any placement of layers",
          Scope.PLACEMENT: "whatever the placement"}


# --- Schedules --------------------------------------------------------------------------------------------------------


BackwardMode = Literal["split", "fused"]
OptimizerMode = Literal["staggered", "synchronous"]
Status = Literal["optimal", "feasible"]


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Schedule of one iteration of all live workers, repeated every `period_ticks`. Its rules are those of
    `schedules.check`."""

    job: str
    tick_seconds: TickSeconds
    grid: Grid
    slices: tuple[LayerRange, ...] = ()
    """Ranges of layers that a worker runs for a micro-batch and that are no stages; their numbers follow the
    stages'."""
    times: Times
    memory: Memory | None
    backward: BackwardMode
    optimizer: OptimizerMode
    failed: tuple[Worker, ...]
    """Physical workers that are down, sorted."""
    seats: tuple[Seat, ...]
    """Live workers, sorted, each with its role and the number of its program."""
    programs: tuple[Program, ...]
    period_ticks: Ticks
    lower_bound_ticks: Ticks
    """Proven lower bound: no schedule in `scope` has a smaller period."""
    status: Status
    method: str
    bound_scope: Scope | msgspec.UnsetType = msgspec.UNSET
    """Scope of the lower bound (what the schedules that it covers may change), if the file gives it. Older files do
    not."""

    def __repr__(self) -> str:
        """Return one line about the schedule without its ops, which can be hundreds of thousands of characters."""
        down = ", ".join(map(str, self.failed[:8])) + (", ..." if len(self.failed) > 8 else "")
        return (f"Schedule({self.job!r}: {self.grid.pipelines} pipelines x {self.grid.columns} stages, "
                f"{f'{down} down, ' if down else ''}period {self.seconds(self.period_ticks):.6g} s, {self.status})")

    @cached_property
    def scope(self) -> Scope:
        """Scope of the lower bound: what the schedules that it covers may change. If the file gives no scope, it is the
        narrowest one that includes this schedule."""
        if self.bound_scope is not msgspec.UNSET:
            return self.bound_scope
        if any(seat.holds is not None for seat in self.seats):
            return Scope.LAYERS
        if self.slices:
            return Scope.PLACE
        return Scope.STAGES if self.failed or self.times.slow or len(set(self.grid.microbatches)) > 1 else Scope.OWN

    def with_bound(self, ticks: int, scope: Scope | msgspec.UnsetType) -> "Schedule":
        """Return a copy of this schedule with another proven lower bound, in ticks, and the scope for which it is
        proven."""
        assert ticks <= self.period_ticks, f"a bound of {ticks} ticks is above the period of {self.period_ticks}"
        return msgspec.structs.replace(self, lower_bound_ticks=ticks, bound_scope=scope,
                                       status="optimal" if ticks == self.period_ticks else "feasible")

    @cached_property
    def seat_of(self) -> Mapping[Worker, Seat]:
        """Seat (role, program, held layers) of each live worker."""
        return {seat.worker: seat for seat in self.seats}

    @property
    def has_overlap(self) -> bool:
        """True if reductions overlap with compute."""
        return self.times.overlap is True

    @property
    def members(self) -> tuple[Worker, ...]:
        """Live workers, sorted."""
        return tuple(seat.worker for seat in self.seats)

    @cached_property
    def player_of(self) -> Mapping[Worker, Worker]:
        """Physical worker that plays each role. A role that no worker plays is missing."""
        return {seat.role: seat.worker for seat in self.seats}

    @property
    def moves(self) -> tuple[Seat, ...]:
        """Seats whose worker plays a role other than its own. For a role of another column, the worker must load
        layers."""
        return tuple(seat for seat in self.seats if seat.worker != seat.role)

    @cached_property
    def equivalence_class_of(self) -> Mapping[Worker, int]:
        """Number of the class of each live worker; workers of one class run the same ops at the same times and speed.

        Even thousands of workers usually have few classes. Numbers are in order of first appearance.
        """
        numbers: dict[tuple[object, ...], int] = {}
        return {seat.worker: numbers.setdefault(
            (seat.program, self.times.per_mille_of.get(seat.worker), seat.role.column, seat.holds), len(numbers))
            for seat in self.seats}

    @property
    def representative_seats(self) -> list[Seat]:
        """First seat of each class of workers that run the same ops (`equivalence_class_of`)."""
        first: dict[int, Seat] = {}
        for seat in self.seats:
            first.setdefault(self.equivalence_class_of[seat.worker], seat)
        return list(first.values())

    def compute_for_each(self, value: Callable[[Worker], T]) -> dict[Worker, T]:
        """Return the result of `value` for each live worker, by worker. The result must depend only on the worker's
        ops: `value` is called once per class of equivalent workers."""
        values = [value(seat.worker) for seat in self.representative_seats]
        return {worker: values[number] for worker, number in self.equivalence_class_of.items()}

    def ops(self, worker: Worker) -> list[Op]:
        """Return the ops of a live worker, in program order."""
        seat = self.seat_of[worker]
        return list(place_ops(self.programs[seat.program], seat, self.times))

    def all_ops(self) -> Iterator[Op]:
        """Iterate over the ops of all live workers, worker by worker."""
        for seat in self.seats:
            yield from place_ops(self.programs[seat.program], seat, self.times)

    def ops_on_compute(self, worker: Worker) -> list[Op]:
        """Return the ops that occupy a worker's compute, in order: all but A if reductions overlap, else all."""
        return [op for op in self.ops(worker) if not (self.has_overlap and op.kind is OpKind.A)]

    def seconds(self, ticks: int) -> float:
        """Convert ticks to seconds."""
        return ticks * self.tick_seconds

    @property
    def gap(self) -> float | None:
        """Relative gap between period and lower bound, period / bound - 1; None if no bound above 0 is proven."""
        if not self.lower_bound_ticks:
            return None if self.period_ticks else 0.0
        return self.period_ticks / self.lower_bound_ticks - 1

    def origin(self, op: Op) -> Origin:
        """Return whose work an op is: `own` if its micro-batch is of its worker's pipeline, else `rerouted` if the
        micro-batch's own worker is down, or `shed` if that is alive.

        Ops without a micro-batch are `own`.
        """
        if op.pipeline is None or op.microbatch is None or op.slice is None or \
                op.pipeline == self.seat_of[op.worker].role.pipeline:
            return "own"
        return "rerouted" if self.is_own_worker_down(op.pipeline, op.microbatch, op.slice) else "shed"

    @property
    def rerouted(self) -> int:
        """Number of pairs of a micro-batch and a slice that another pipeline's worker runs because their own worker is
        down."""
        return self._foreign_slice_counts[True]

    @property
    def shed(self) -> int:
        """Number of pairs of a micro-batch and a slice that another pipeline's worker runs although their own worker is
        alive."""
        return self._foreign_slice_counts[False]

    @cached_property
    def _foreign_slice_counts(self) -> Mapping[bool, int]:
        """Number of pairs (micro-batch, slice) that another pipeline's worker runs: under the key True those whose own
        worker is down, under False the others."""
        count = {True: 0, False: 0}
        named = [[op for op in program if op.kind is OpKind.F and op.pipeline is not None] for program in self.programs]
        for seat in self.seats:
            for op in named[seat.program]:
                if op.pipeline != seat.role.pipeline:
                    assert op.pipeline is not None and op.microbatch is not None and op.slice is not None
                    count[self.is_own_worker_down(op.pipeline, op.microbatch, op.slice)] += 1
        return count

    # --- Slices, holdings and routes ----------------------------------------------------------------------------------

    def layers_of(self, slice: int) -> LayerRange:
        """Return the range of layers of a slice, by its number: stages come first, then `slices`."""
        return self.layers_by_slice[slice]

    @cached_property
    def layers_by_slice(self) -> tuple[LayerRange, ...]:
        """Layers of each slice, stages first."""
        return self.grid.layers_by_stage + self.slices

    def slice_text(self, slice: int) -> str:
        """Return text that names a slice: `stage 3` or, if it is not a stage, `layers 4 to 6`."""
        return f"stage {slice}" if slice < len(self.grid.stages) else layers_text(self.layers_of(slice))

    def op_text(self, op: Op) -> str:
        """Describe an op in words, with the stage or the layers of its slice."""
        if op.slice is None:
            return str(op)
        microbatch = "" if op.microbatch is None else f"micro-batch {op.pipeline}.{op.microbatch}, "
        return f"{op.kind}({microbatch}{self.slice_text(op.slice)}) on {op.worker}"

    def held_layers(self, worker: Worker) -> tuple[LayerRange, ...]:
        """Return the layers that a live worker holds, as ascending ranges that do not touch."""
        return self.held_layers_of_seat(self.seat_of[worker])

    def held_layers_of_seat(self, seat: Seat) -> tuple[LayerRange, ...]:
        """Return the layers that the worker of a seat holds, as ascending ranges that do not touch."""
        return self.held_layers_of_column(seat.role.column) if seat.holds is None else seat.holds

    def held_layers_of_column(self, column: int) -> tuple[LayerRange, ...]:
        """Return the layers of a column's stages, as ascending ranges that do not touch."""
        return self.grid.held_layers_by_column[column]

    def has_moved_layers(self, seat: Seat) -> bool:
        """Return whether the worker of a seat holds other layers than those of its role's stages."""
        return seat.holds is not None and seat.holds != self.held_layers_of_column(seat.role.column)

    def route_of(self, pipeline: int, microbatch: int) -> Sequence[int]:
        """Return the numbers of the slices that a micro-batch passes, in order. Empty if no worker runs the
        micro-batch."""
        return self.common_route or self.routes.get((pipeline, microbatch), ())

    @cached_property
    def common_route(self) -> Sequence[int]:
        """Numbers of all stages, in order, if every micro-batch passes exactly these; else empty."""
        return self.grid.stages_of_microbatch(0) if not self.slices and self.grid.chains == 1 else ()

    @cached_property
    def routes(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """Slices that each micro-batch (pipeline, number) passes, in the order of their layers."""
        visited: dict[tuple[int, int], list[int]] = defaultdict(list)
        for seat in self.seats:
            for op in self.programs[seat.program]:
                if op.kind is OpKind.F:
                    assert op.microbatch is not None and op.slice is not None
                    visited[seat.role.pipeline if op.pipeline is None else op.pipeline, op.microbatch].append(op.slice)
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # many micro-batches share a route
        return {microbatch: known.setdefault(route, route) for microbatch, slices in visited.items()
                for route in [tuple(sorted(slices, key=lambda slice: (self.layers_by_slice[slice], slice)))]}

    def is_own_worker_down(self, pipeline: int, microbatch: int, slice: int) -> bool:
        """Return whether a worker is down that would run these layers in the micro-batch's own pipeline.

        If so, a worker of another pipeline that runs the slice runs it *re-routed*; otherwise *shed*.
        """
        chain = microbatch % self.grid.chains
        key = (pipeline, chain, slice)
        known = self._own_is_down
        if key not in known:
            first, end = self.layers_of(slice)
            own = (stage for stage in self.grid.stages_of_microbatch(chain) if self.grid.layers_of(stage)[0] < end
                   and first < self.grid.layers_of(stage)[1])
            known[key] = any(Worker(pipeline, self.grid.stages[stage].column) not in self.player_of for stage in own)
        return known[key]

    @cached_property
    def _own_is_down(self) -> dict[tuple[int, int, int], bool]:
        return {}


def place_ops(program: Program, seat: Seat, times: Times) -> Iterator[Op]:
    """Iterate over the ops of a seat's worker: those of the program, with worker, pipeline, and end in ticks added."""
    own_pipeline, worker = seat.role.pipeline, seat.worker
    ticks_of: dict[tuple[OpKind, int | None], int] = {}
    for op in program:
        key = (op.kind, op.slice)
        if key not in ticks_of:
            ticks_of[key] = times.optimizer_ticks(seat) if op.slice is None else \
                times.duration_ticks(op.kind, op.slice, worker)
        pipeline = None if op.microbatch is None else own_pipeline if op.pipeline is None else op.pipeline
        yield Op(op.kind, op.slice, pipeline, op.microbatch, worker, op.start_ticks, op.start_ticks + ticks_of[key])


def with_pipeline_numbers(program: Program, numbers: Mapping[int, int] | Sequence[int]) -> Program:
    """Return a copy of a program in which re-routed micro-batches have new pipeline numbers (`numbers`, by old number),
    or the program itself if none changes."""
    if all(op.pipeline is None or numbers[op.pipeline] == op.pipeline for op in program):
        return program
    return tuple(op if op.pipeline is None else
                 ProgramOp(op.kind, op.slice, op.microbatch, op.start_ticks, numbers[op.pipeline]) for op in program)


def compute_period_ticks(ops: Iterable[Op]) -> int:
    """Return the period in ticks: the longest time of a worker from its first start to its last end; 0 without ops."""
    first: dict[Worker, int] = {}
    last: dict[Worker, int] = {}
    for op in ops:
        first[op.worker] = min(first.get(op.worker, op.start_ticks), op.start_ticks)
        last[op.worker] = max(last.get(op.worker, op.end_ticks), op.end_ticks)
    return max((last[worker] - first[worker] for worker in first), default=0)
