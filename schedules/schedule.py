"""What a schedule is: plain, frozen data, shared by planner, checker, runtime and command line.

The model is a row of layers. A *slice* is a range of layers that one worker runs for one micro-batch; a stage is the
usual one. What a micro-batch passes is its *route*: slices that tile all layers, each on a worker that holds them.

Times are integer ticks (`tick_seconds` says how long one is), intervals half-open [start, end). Memory is counted in
integer multiples of `Memory.unit`. A program is stored once and shared by every worker that runs it, so its ops name
the pipeline of a micro-batch only where it differs from the pipeline of the role that runs it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, Self, TypeVar

import msgspec

from slipstream.schedules.layers import LayerRange as LayerRange
from slipstream.schedules.layers import joined_ranges, layers_text, total, totals

T = TypeVar("T")

# --- Errors -----------------------------------------------------------------------------------------------------------


class NoScheduleError(RuntimeError):
    """No schedule can be had for what is asked. The message is one line, or empty where failures end the run."""


# --- Ranges of numbers, which reading a file checks -------------------------------------------------------------------


MAX_WORKERS = 2**17
MAX_MICROBATCHES = 2**16
Natural = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)]
Ticks = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A time, or an amount of memory: whole numbers that a double still has."""
TickSeconds = Annotated[float, msgspec.Meta(ge=1e-12, le=1e6)]
Ratio = tuple[Annotated[int, msgspec.Meta(ge=1, le=2**53)], Annotated[int, msgspec.Meta(ge=1, le=2**53)]]
"""A numerator and a denominator."""


# --- The shape of a job: workers, virtual stages and their layers -----------------------------------------------------


class Worker(NamedTuple):
    """A worker, or the role of one: the process that holds column `column` of pipeline `pipeline`.

    Without virtual stages the column is the stage. Written `pipeline.column`, e.g. `1.2`.
    """

    pipeline: Natural
    column: Natural

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.column}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `pipeline.column`. Raises ValueError that names the text."""
        pipeline, dot, column = text.partition(".")
        if not (dot and pipeline.isdecimal() and column.isdecimal() and text.isascii() and len(text) <= 16):
            raise ValueError(f"{text!r} is not a worker: write PIPELINE.STAGE, for example 1.2")
        return cls(int(pipeline), int(column))


Speeds = tuple[tuple[Worker, float], ...]
"""All workers that do not take the usual time, sorted, each with its factor of it."""
HeldLayers = tuple[tuple[Worker, tuple[LayerRange, ...]], ...]
"""The layers of the schedules that each live worker holds, sorted."""


class VirtualStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A virtual stage: the worker column that holds it and, when known, its half-open range of model layers."""

    column: Natural
    layers: LayerRange | None = None


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True,
           dict=True):
    """The job's shape. `stages` are the virtual stages in the order in which a micro-batch visits them.

    With several chains (bidirectional pipelines: Chimera, Li & Hoefler 2021) they are as many runs of equal length, one
    after the other, and a micro-batch visits one run only. Stages at the same place of different chains are *copies*:
    they hold the same layers, and their gradients are reduced together.
    """

    pipelines: Count
    columns: Count
    microbatches: tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_MICROBATCHES)], ...]
    """Micro-batches per iteration, one number a pipeline."""
    stages: tuple[VirtualStage, ...]
    chains: Count = 1
    """Micro-batch m of a pipeline goes along chain m modulo `chains`."""

    @property
    def depth(self) -> int:
        """Virtual stages that a micro-batch visits."""
        return len(self.stages) // self.chains

    def path(self, microbatch: int) -> range:
        """The virtual stages that a micro-batch visits, in order."""
        return self._paths[microbatch % self.chains]

    @cached_property
    def _paths(self) -> tuple[range, ...]:
        return tuple(range(first, first + self.depth) for first in range(0, len(self.stages), self.depth))

    def is_last(self, stage: int) -> bool:
        """Whether a chain ends with this stage."""
        return (stage + 1) % self.depth == 0

    def original(self, stage: int) -> int:
        """The same for all copies of a stage: the one in the first chain."""
        return stage % self.depth

    def workers(self) -> Iterator[Worker]:
        """Every worker of the grid, failed ones included, sorted."""
        for pipeline in range(self.pipelines):
            for column in range(self.columns):
                yield Worker(pipeline, column)

    def stages_of(self, column: int) -> tuple[int, ...]:
        """The virtual stages a worker of this column holds, ascending."""
        return self._stages_by_column[column]

    @cached_property
    def _stages_by_column(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.columns)]
        for index, stage in enumerate(self.stages):
            held[stage.column].append(index)
        return tuple(map(tuple, held))

    @cached_property
    def held_by_column(self) -> tuple[tuple[LayerRange, ...], ...]:
        """[column] the layers of its stages, as ascending ranges that do not touch."""
        return tuple(joined_ranges(self.layers_of(stage) for stage in held) for held in self._stages_by_column)

    @cached_property
    def layers_by_stage(self) -> tuple[LayerRange, ...]:
        """The layers of each virtual stage.

        They are the model's where the stages of each chain name them, from 0 on and at least one each. Else every
        stage counts as one layer.
        """
        given = tuple(stage.layers for stage in self.stages)
        named = tuple(layers for layers in given if layers is not None)
        chains = [named[first:first + self.depth] for first in range(0, len(given), self.depth)]
        if len(named) == len(given) and all(_tile_from_zero(chain) for chain in chains):
            return named
        return tuple((stage % self.depth, stage % self.depth + 1) for stage in range(len(given)))

    @property
    def layer_count(self) -> int:
        """Layers of the model: a route tiles 0 to `layer_count`."""
        return self.layers_by_stage[self.depth - 1][1]

    def layers_of(self, stage: int) -> LayerRange:
        """The layers of a virtual stage."""
        return self.layers_by_stage[stage]

    @property
    def total_microbatches(self) -> int:
        """Micro-batches of all pipelines in one iteration."""
        return sum(self.microbatches)


def _tile_from_zero(ranges: Sequence[LayerRange]) -> bool:
    return ranges[0][0] == 0 and all(first < end for first, end in ranges) and all(
        before[1] == after[0] for before, after in pairwise(ranges))


# --- Ops, as a program stores them and as they happen; seats, which run programs --------------------------------------


Origin = Literal["own", "rerouted", "shed"]
"""Whose micro-batch a worker runs: one of its own pipeline, or of another whose own worker is down, or alive."""


class OpKind(StrEnum):
    """Kinds of op, with the letters torch.distributed.pipelining uses."""

    F = "F"  # forward
    I = "I"  # backward for the input
    W = "W"  # backward for the weights
    B = "B"  # I then W, fused
    A = "A"  # gradient all-reduce of a slice over all live workers that hold its layers
    O = "O"  # optimizer step of a worker


COMPUTE_KINDS = frozenset({OpKind.F, OpKind.I, OpKind.W, OpKind.B})


class ProgramOp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """An op as a program stores it: `[kind, slice, microbatch, start_ticks]`, then the pipeline if not the role's.

    `slice` is a number of `Schedule.layers_of`, None for O; `microbatch` is None for A and O. `pipeline` None means the
    pipeline of the role that runs it.
    """

    kind: OpKind
    slice: Natural | None
    microbatch: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MICROBATCHES)] | None
    start_ticks: Ticks
    pipeline: Natural | None = None


Program = tuple[ProgramOp, ...]


class Seat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """A live worker: `[worker, role, program, holds]`. Role equals worker unless normalisation moved it."""

    worker: Worker
    role: Worker
    program: Natural
    holds: tuple[LayerRange, ...] | None = None
    """The layers it holds: ascending ranges that do not touch. None: those of its role's stages."""


class Op(msgspec.Struct, frozen=True, gc=False, order=True):
    """An op in place: on a physical worker, with absolute pipeline and both ends of its interval.

    `Schedule.op_text` says which layers its slice has.
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
    """A worker whose compute ops take `per_mille` / 1000 of the usual time, rounded up to a tick."""

    worker: Worker
    per_mille: Annotated[int, msgspec.Meta(ge=1, le=10**6)]


class LayerCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What each layer costs at least, one value a layer: what bounds for all layouts count.

    Layers may need finer units than whole stages: `per_tick` of them are a tick of the schedule, and `per_unit` a unit
    of its memory, as fractions (numerator, denominator).
    """

    per_tick: Ratio = (1, 1)
    per_unit: Ratio = (1, 1)
    forward: tuple[Ticks, ...]
    backward_input: tuple[Ticks, ...]
    backward_weight: tuple[Ticks, ...]
    optimizer: tuple[Ticks, ...]
    all_reduce: tuple[Ticks, ...]
    activation: tuple[Ticks, ...]
    """0 where memory is unlimited; so are the next."""
    weight_stash: tuple[Ticks, ...]
    weights: tuple[Ticks, ...]


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Durations in ticks: one a slice, stages first; `optimizer` one a column; `transfer` one hop between workers."""

    forward: tuple[Ticks, ...]
    backward_input: tuple[Ticks, ...]
    backward_weight: tuple[Ticks, ...]
    all_reduce: tuple[Ticks, ...]
    optimizer: tuple[Ticks, ...]
    transfer: Ticks
    slow: tuple[Slow, ...] = ()
    optimizer_of_layer: tuple[Ticks, ...] = ()
    """One a layer: the O of a seat with `holds` takes the sum over what it holds."""
    of_layers: LayerCosts | msgspec.UnsetType = msgspec.UNSET
    """A file has this key only where the bound is one for layouts, too."""
    overlap: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether A occupies the links of its workers, one A at a time, and leaves their compute to other ops; else it
    occupies both. A file has this key only where it does."""

    def duration_ticks(self, kind: OpKind, where: int, worker: Worker) -> int:
        """How long an op takes on a physical worker: the one place where durations are looked up.

        `where` is the slice; for O, the column whose role the worker plays (see also `optimizer_ticks`).
        """
        if kind is OpKind.O:
            return self.optimizer[where]
        if kind is OpKind.A:
            return self.all_reduce[where]
        if kind is OpKind.B:
            return self.duration_ticks(OpKind.I, where, worker) + self.duration_ticks(OpKind.W, where, worker)
        ticks = _per_slice(self, kind)[where]
        return -(-ticks * self.per_mille_of.get(worker, 1000) // 1000)

    def optimizer_ticks(self, seat: Seat) -> int:
        """How long the O of a live worker takes: by its column, or by the layers that it holds."""
        if seat.holds is None:
            return self.optimizer[seat.role.column]
        return total(self._optimizer_before, seat.holds)

    @cached_property
    def _optimizer_before(self) -> tuple[int, ...]:
        return totals(self.optimizer_of_layer)

    @cached_property
    def per_mille_of(self) -> Mapping[Worker, int]:
        """The slow workers, each with its share of the usual time."""
        return {slow.worker: slow.per_mille for slow in self.slow}


def _per_slice(times: Times, kind: OpKind) -> tuple[int, ...]:
    if kind is OpKind.F:
        return times.forward
    return times.backward_input if kind is OpKind.I else times.backward_weight


class Room(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A worker that has another capacity than its column."""

    worker: Worker
    capacity: Ticks


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Room on a worker, in multiples of `unit`."""

    unit: Annotated[float, msgspec.Meta(ge=1e-300, le=1e300)]
    capacity: tuple[Ticks, ...]
    """One a column: what a worker has for activations beside the layers of its own stages."""
    activation: tuple[Ticks, ...]
    """One a slice, stages first: held from F start to I end, per micro-batch."""
    weight_stash: tuple[Ticks, ...]
    """One a slice, stages first: held from I end to W end, per micro-batch."""
    weights: tuple[Ticks, ...] = ()
    """One a layer: parameters, gradients and the optimizer's state, for seats with `holds`."""
    capacity_of: tuple[Room, ...] | msgspec.UnsetType = msgspec.UNSET
    """Workers that have another one; a file has this key only where there are any."""

    def beside(self, worker: Worker, column: int) -> int:
        """The room of a worker beside the layers of a column, which may be the one of a role that it plays."""
        return self._capacity_of.get(worker, self.capacity[column])

    @cached_property
    def _capacity_of(self) -> Mapping[Worker, int]:
        return {one.worker: one.capacity for one in self.capacity_of or ()}

    @cached_property
    def weights_before(self) -> tuple[int, ...]:
        """The weights of the first 0, 1, 2 ... layers."""
        return totals(self.weights)


# --- The question that a bound on the period answers: among which schedules none is shorter ---------------------------


class Scope(StrEnum):
    """From the narrowest question to the widest: what is proven of a wider one holds of a narrower one. The last one is
    wider than the first only."""

    OWN = "own micro-batches"
    """Workers keep their layers. A live worker runs its stages of all micro-batches of its pipeline, and of no others
    but those of failed workers."""
    STAGES = "whole stages"
    """Workers keep their layers, and any holder of a stage may run it for any micro-batch."""
    PLACE = "layers in place"
    """Workers keep their layers, and a micro-batch may be cut within a stage."""
    ROLES = "roles"
    """So many failures, whichever roles are left vacant: live workers may take over others. Slow ones keep theirs."""
    LAYERS = "any layers"
    """Any live worker may hold any layers."""
    PLACEMENT = "any placement"
    """Of whole pipelines, each of which runs its own micro-batches: its workers may hold any virtual stages, and
    compute activations again."""

    def holds_for(self, narrower: "Scope") -> bool:
        """Whether what is proven for this question is proven for another one."""
        if Scope.PLACEMENT in (self, narrower):
            return narrower in (self, Scope.OWN)
        return _WIDTH[narrower] <= _WIDTH[self]

    @property
    def words(self) -> str:
        """What follows `no schedule is shorter`."""
        return _WORDS[self]


_WIDTH = {scope: width for width, scope in enumerate(Scope)}
_WORDS = {Scope.OWN: "with layers and micro-batches in place",
          Scope.STAGES: "with whole stages in place", Scope.PLACE: "with layers in place",
          Scope.ROLES: "whoever plays which role", Scope.LAYERS: "wherever layers are",
          Scope.PLACEMENT: "whatever the placement"}


# --- Schedules --------------------------------------------------------------------------------------------------------


BackwardMode = Literal["split", "fused"]
OptimizerMode = Literal["staggered", "synchronous"]
Status = Literal["optimal", "feasible"]


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """One iteration of every live worker. Repeats every `period_ticks`; its rules are those of `schedules.check`."""

    job: str
    tick_seconds: TickSeconds
    grid: Grid
    slices: tuple[LayerRange, ...] = ()
    """Slices beyond the stages, all different."""
    times: Times
    memory: Memory | None
    backward: BackwardMode
    optimizer: OptimizerMode
    failed: tuple[Worker, ...]
    """Physical workers that are down, sorted."""
    seats: tuple[Seat, ...]
    """Every live worker, sorted."""
    programs: tuple[Program, ...]
    period_ticks: Ticks
    lower_bound_ticks: Ticks
    """Proven: no schedule has a smaller period, of those that `scope` tells."""
    status: Status
    method: str
    bound_scope: Scope | msgspec.UnsetType = msgspec.UNSET
    """Which question the bound answers; files of before do not say."""

    def __repr__(self) -> str:
        """One line: hundreds of thousands of characters of ops tell nobody anything."""
        down = ", ".join(map(str, self.failed[:8])) + (", ..." if len(self.failed) > 8 else "")
        return (f"Schedule({self.job!r}: {self.grid.pipelines} pipelines x {self.grid.columns} stages, "
                f"{f'{down} down, ' if down else ''}period {self.seconds(self.period_ticks):.6g} s, {self.status})")

    @cached_property
    def scope(self) -> Scope:
        """Which question the bound answers; the narrowest that it can be where a file does not say."""
        if self.bound_scope is not msgspec.UNSET:
            return self.bound_scope
        if any(seat.holds is not None for seat in self.seats):
            return Scope.LAYERS
        if self.slices:
            return Scope.PLACE
        return Scope.STAGES if self.failed or self.times.slow or len(set(self.grid.microbatches)) > 1 else Scope.OWN

    def with_bound(self, ticks: int, scope: Scope | msgspec.UnsetType) -> "Schedule":
        """The same schedule with another proven bound."""
        assert ticks <= self.period_ticks, f"a bound of {ticks} ticks is above the period of {self.period_ticks}"
        return msgspec.structs.replace(self, lower_bound_ticks=ticks, bound_scope=scope,
                                       status="optimal" if ticks == self.period_ticks else "feasible")

    @cached_property
    def seat_of(self) -> Mapping[Worker, Seat]:
        """Seats by physical worker."""
        return {seat.worker: seat for seat in self.seats}

    @property
    def overlaps(self) -> bool:
        """Whether reductions go on beside compute."""
        return self.times.overlap is True

    @property
    def members(self) -> tuple[Worker, ...]:
        """All live workers, sorted."""
        return tuple(seat.worker for seat in self.seats)

    @cached_property
    def player_of(self) -> Mapping[Worker, Worker]:
        """The physical worker that plays each role; a role that no worker plays is down."""
        return {seat.role: seat.worker for seat in self.seats}

    @property
    def moves(self) -> tuple[Seat, ...]:
        """Seats whose worker plays a role other than its own: it must load that role's layers."""
        return tuple(seat for seat in self.seats if seat.worker != seat.role)

    @cached_property
    def alike(self) -> Mapping[Worker, int]:
        """Live workers that run the same ops, for the same time and at the same times, have one number, by first use:
        of thousands, most do."""
        numbers: dict[tuple[object, ...], int] = {}
        return {seat.worker: numbers.setdefault(
            (seat.program, self.times.per_mille_of.get(seat.worker), seat.role.column, seat.holds), len(numbers))
            for seat in self.seats}

    @property
    def different(self) -> list[Seat]:
        """The first seat of each of these numbers."""
        first: dict[int, Seat] = {}
        for seat in self.seats:
            first.setdefault(self.alike[seat.worker], seat)
        return list(first.values())

    def of_each(self, value: Callable[[Worker], T]) -> dict[Worker, T]:
        """What follows from the ops of each live worker, found once for all that are alike."""
        found = [value(seat.worker) for seat in self.different]
        return {worker: found[number] for worker, number in self.alike.items()}

    def ops(self, worker: Worker) -> list[Op]:
        """The ops of one live worker in program order, in place."""
        seat = self.seat_of[worker]
        return list(place(self.programs[seat.program], seat, self.times))

    def all_ops(self) -> Iterator[Op]:
        """The ops of all live workers, worker by worker."""
        for seat in self.seats:
            yield from place(self.programs[seat.program], seat, self.times)

    def occupying(self, worker: Worker) -> list[Op]:
        """The ops that occupy a worker's compute, one after the other: all, but A where reductions go on beside."""
        return [op for op in self.ops(worker) if not (self.overlaps and op.kind is OpKind.A)]

    def seconds(self, ticks: int) -> float:
        """Ticks as seconds."""
        return ticks * self.tick_seconds

    @property
    def gap(self) -> float:
        """How far the period can at most be from the best possible one: period / bound - 1."""
        return self.period_ticks / self.lower_bound_ticks - 1 if self.lower_bound_ticks else 0.0

    def origin(self, op: Op) -> Origin:
        """Whose micro-batch a worker runs: one of its role's pipeline, or one re-routed or shed to it."""
        if op.pipeline is None or op.microbatch is None or op.slice is None or \
                op.pipeline == self.seat_of[op.worker].role.pipeline:
            return "own"
        return "rerouted" if self.own_is_down(op.pipeline, op.microbatch, op.slice) else "shed"

    @property
    def rerouted(self) -> int:
        """Slices of micro-batches that a worker of another pipeline runs because their own worker is down."""
        return self._foreign[True]

    @property
    def shed(self) -> int:
        """Slices of micro-batches that a worker of another pipeline runs although their own worker is alive."""
        return self._foreign[False]

    @cached_property
    def _foreign(self) -> Mapping[bool, int]:
        count = {True: 0, False: 0}
        named = [[op for op in program if op.kind is OpKind.F and op.pipeline is not None] for program in self.programs]
        for seat in self.seats:
            for op in named[seat.program]:
                if op.pipeline != seat.role.pipeline:
                    assert op.pipeline is not None and op.microbatch is not None and op.slice is not None
                    count[self.own_is_down(op.pipeline, op.microbatch, op.slice)] += 1
        return count

    # --- Slices, holdings and routes ----------------------------------------------------------------------------------

    def layers_of(self, slice: int) -> LayerRange:
        """The layers of a slice: a stage, or one of `slices`."""
        return self.layers_by_slice[slice]

    @cached_property
    def layers_by_slice(self) -> tuple[LayerRange, ...]:
        """The layers of each slice, stages first."""
        return self.grid.layers_by_stage + self.slices

    def slice_text(self, slice: int) -> str:
        """`stage 3` or, for a slice that is no stage, `layers 4 to 6`."""
        return f"stage {slice}" if slice < len(self.grid.stages) else layers_text(self.layers_of(slice))

    def op_text(self, op: Op) -> str:
        """An op in words, with the stage or the layers of its slice."""
        if op.slice is None:
            return str(op)
        microbatch = "" if op.microbatch is None else f"micro-batch {op.pipeline}.{op.microbatch}, "
        return f"{op.kind}({microbatch}{self.slice_text(op.slice)}) on {op.worker}"

    def holds(self, worker: Worker) -> tuple[LayerRange, ...]:
        """The layers that a live worker holds, as ascending ranges that do not touch."""
        return self.holds_of(self.seat_of[worker])

    def holds_of(self, seat: Seat) -> tuple[LayerRange, ...]:
        """The layers that the worker of a seat holds, as ascending ranges that do not touch."""
        return self.holds_of_column(seat.role.column) if seat.holds is None else seat.holds

    def holds_of_column(self, column: int) -> tuple[LayerRange, ...]:
        """The layers of a column's stages, as ascending ranges that do not touch."""
        return self.grid.held_by_column[column]

    def holds_others(self, seat: Seat) -> bool:
        """Whether the worker of a seat holds other layers than those of its role's stages."""
        return seat.holds is not None and seat.holds != self.holds_of_column(seat.role.column)

    def path(self, pipeline: int, microbatch: int) -> Sequence[int]:
        """The slices of a micro-batch's route, in order; empty for one that no worker runs."""
        return self.usual_path or self.routes.get((pipeline, microbatch), ())

    @cached_property
    def usual_path(self) -> Sequence[int]:
        """The route of all micro-batches, where all pass the stages of the one chain; else nothing."""
        return self.grid.path(0) if not self.slices and self.grid.chains == 1 else ()

    @cached_property
    def routes(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """The slices that each micro-batch (pipeline, number) passes, in the order of their layers."""
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for seat in self.seats:
            for op in self.programs[seat.program]:
                if op.kind is OpKind.F:
                    assert op.microbatch is not None and op.slice is not None
                    found[seat.role.pipeline if op.pipeline is None else op.pipeline, op.microbatch].append(op.slice)
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # many micro-batches share a route
        return {microbatch: known.setdefault(route, route) for microbatch, slices in found.items()
                for route in [tuple(sorted(slices, key=lambda slice: (self.layers_by_slice[slice], slice)))]}

    def own_is_down(self, pipeline: int, microbatch: int, slice: int) -> bool:
        """Whether a worker of the micro-batch's own pipeline that would run these layers by its column is down.

        A worker of another pipeline that runs the slice runs it *re-routed* then, else *shed*.
        """
        chain = microbatch % self.grid.chains
        key = (pipeline, chain, slice)
        known = self._own_is_down
        if key not in known:
            first, end = self.layers_of(slice)
            own = (stage for stage in self.grid.path(chain) if self.grid.layers_of(stage)[0] < end
                   and first < self.grid.layers_of(stage)[1])
            known[key] = any(Worker(pipeline, self.grid.stages[stage].column) not in self.player_of for stage in own)
        return known[key]

    @cached_property
    def _own_is_down(self) -> dict[tuple[int, int, int], bool]:
        return {}


def place(program: Program, seat: Seat, times: Times) -> Iterator[Op]:
    """Turn a stored program into the ops of one live worker."""
    own, worker = seat.role.pipeline, seat.worker
    cost: dict[tuple[OpKind, int | None], int] = {}
    for op in program:
        key = (op.kind, op.slice)
        if key not in cost:
            cost[key] = times.optimizer_ticks(seat) if op.slice is None else \
                times.duration_ticks(op.kind, op.slice, worker)
        pipeline = None if op.microbatch is None else own if op.pipeline is None else op.pipeline
        yield Op(op.kind, op.slice, pipeline, op.microbatch, worker, op.start_ticks, op.start_ticks + cost[key])


def renamed(program: Program, numbers: Mapping[int, int] | Sequence[int]) -> Program:
    """A program with the pipelines of its re-routed micro-batches renumbered. The same object where none changes."""
    if all(op.pipeline is None or numbers[op.pipeline] == op.pipeline for op in program):
        return program
    return tuple(op if op.pipeline is None else
                 ProgramOp(op.kind, op.slice, op.microbatch, op.start_ticks, numbers[op.pipeline]) for op in program)


def period_ticks(ops: Iterable[Op]) -> int:
    """Steady-state period: the longest busy window (first start to last end) of any worker. 0 without ops."""
    first: dict[Worker, int] = {}
    last: dict[Worker, int] = {}
    for op in ops:
        first[op.worker] = min(first.get(op.worker, op.start_ticks), op.start_ticks)
        last[op.worker] = max(last.get(op.worker, op.end_ticks), op.end_ticks)
    return max((last[worker] - first[worker] for worker in first), default=0)
