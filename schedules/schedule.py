"""What a schedule is: plain, frozen data, shared by planner, checker, runtime and command line.

Times are integer ticks (`tick_seconds` says how long one is), intervals half-open [start, end). Memory is counted in
integer multiples of `Memory.unit`. A program is stored once and shared by every worker that runs it, so its ops name
the pipeline of a micro-batch only where it differs from the pipeline of the role that runs it.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple, Self

import msgspec

BackwardMode = Literal["split", "fused"]
OptimizerMode = Literal["staggered", "synchronous"]
Status = Literal["optimal", "feasible"]


class OpKind(StrEnum):
    """Kinds of op, with the letters torch.distributed.pipelining uses."""

    F = "F"  # forward
    I = "I"  # backward for the input
    W = "W"  # backward for the weights
    B = "B"  # I then W, fused
    A = "A"  # gradient all-reduce over a stage's live workers
    O = "O"  # optimizer step of a worker


COMPUTE_KINDS = frozenset({OpKind.F, OpKind.I, OpKind.W, OpKind.B})


class Worker(NamedTuple):
    """A worker, or the role of one: the process that holds column `column` of pipeline `pipeline`.

    Without virtual stages the column is the stage. Written `pipeline.column`, e.g. `1.2`.
    """

    pipeline: int
    column: int

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.column}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `pipeline.column`. Raises ValueError that names the text."""
        pipeline, dot, column = text.partition(".")
        if not (dot and pipeline.isdecimal() and column.isdecimal() and text.isascii() and len(text) <= 16):
            raise ValueError(f"{text!r} is no worker: write PIPELINE.STAGE, for example 1.2")
        return cls(int(pipeline), int(column))


class VirtualStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A virtual stage: the worker column that holds it and, when known, its half-open range of model layers."""

    column: int
    layers: tuple[int, int] | None = None


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The job's shape. `stages` are the virtual stages in the order in which a micro-batch visits them.

    With several chains (bidirectional pipelines: Chimera, Li & Hoefler 2021) they are as many runs of equal length, one
    after the other, and a micro-batch visits one run only. Stages at the same place of different chains are *copies*:
    they hold the same layers, and their gradients are reduced together.
    """

    pipelines: int
    columns: int
    microbatches: tuple[int, ...]
    """Micro-batches per iteration, one number a pipeline."""
    stages: tuple[VirtualStage, ...]
    chains: int = 1
    """Micro-batch m of a pipeline goes along chain m modulo `chains`."""

    @property
    def depth(self) -> int:
        """Virtual stages that a micro-batch visits."""
        return len(self.stages) // self.chains

    def path(self, microbatch: int) -> range:
        """The virtual stages that a micro-batch visits, in order."""
        first = microbatch % self.chains * self.depth
        return range(first, first + self.depth)

    def is_first(self, stage: int) -> bool:
        """Whether a chain begins with this stage."""
        return stage % self.depth == 0

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
        return tuple(index for index, stage in enumerate(self.stages) if stage.column == column)

    @property
    def total_microbatches(self) -> int:
        """Micro-batches of all pipelines in one iteration."""
        return sum(self.microbatches)


class Slow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A worker whose compute ops take `per_mille` / 1000 of the usual time, rounded up to a tick."""

    worker: Worker
    per_mille: int


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Durations in ticks: one per virtual stage; `optimizer` one per column; `transfer` one hop between workers."""

    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    all_reduce: tuple[int, ...]
    optimizer: tuple[int, ...]
    transfer: int
    slow: tuple[Slow, ...] = ()

    def duration_ticks(self, kind: OpKind, where: int, worker: Worker) -> int:
        """How long an op takes on a physical worker: the one place where durations are looked up.

        `where` is the virtual stage; for O, the column whose role the worker plays.
        """
        if kind is OpKind.O:
            return self.optimizer[where]
        if kind is OpKind.A:
            return self.all_reduce[where]
        if kind is OpKind.B:
            return self.duration_ticks(OpKind.I, where, worker) + self.duration_ticks(OpKind.W, where, worker)
        ticks = _per_stage(self, kind)[where]
        return -(-ticks * self.per_mille_of.get(worker, 1000) // 1000)

    @cached_property
    def per_mille_of(self) -> Mapping[Worker, int]:
        """The slow workers, each with its share of the usual time."""
        return {slow.worker: slow.per_mille for slow in self.slow}


def _per_stage(times: Times, kind: OpKind) -> tuple[int, ...]:
    if kind is OpKind.F:
        return times.forward
    return times.backward_input if kind is OpKind.I else times.backward_weight


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Room for activations: `capacity` one per column, the others one per virtual stage, in multiples of `unit`."""

    unit: float
    capacity: tuple[int, ...]
    activation: tuple[int, ...]
    """Held from F start to I end, per micro-batch."""
    weight_stash: tuple[int, ...]
    """Held from I end to W end, per micro-batch."""


class ProgramOp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """An op as a program stores it: `[kind, stage, microbatch, start_ticks]`, then the pipeline if re-routed.

    `stage` is None for O, `microbatch` for A and O. `pipeline` None means the pipeline of the role that runs it.
    """

    kind: OpKind
    stage: int | None
    microbatch: int | None
    start_ticks: int
    pipeline: int | None = None


Program = tuple[ProgramOp, ...]


class Seat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """A live worker: `[worker, role, program]`. Role equals worker unless normalisation moved it."""

    worker: Worker
    role: Worker
    program: int


class Op(msgspec.Struct, frozen=True, gc=False, order=True):
    """An op in place: on a physical worker, with absolute pipeline and both ends of its interval."""

    kind: OpKind
    stage: int | None
    pipeline: int | None
    microbatch: int | None
    worker: Worker
    start_ticks: int
    end_ticks: int

    def __str__(self) -> str:
        if self.kind is OpKind.O:
            return f"O on {self.worker}"
        if self.kind is OpKind.A:
            return f"A(stage {self.stage}) on {self.worker}"
        return f"{self.kind}(micro-batch {self.pipeline}.{self.microbatch}, stage {self.stage}) on {self.worker}"


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """One iteration of every live worker. Repeats every `period_ticks`; its rules are those of `schedules.check`."""

    job: str
    tick_seconds: float
    grid: Grid
    times: Times
    memory: Memory | None
    backward: BackwardMode
    optimizer: OptimizerMode
    failed: tuple[Worker, ...]
    """Physical workers that are down, sorted."""
    seats: tuple[Seat, ...]
    """Every live worker, sorted."""
    programs: tuple[Program, ...]
    period_ticks: int
    lower_bound_ticks: int
    """Proven: no schedule for this failure set has a smaller period."""
    status: Status
    method: str

    @cached_property
    def seat_of(self) -> Mapping[Worker, Seat]:
        """Seats by physical worker."""
        return {seat.worker: seat for seat in self.seats}

    @cached_property
    def player_of(self) -> Mapping[Worker, Worker]:
        """The physical worker that plays each role; a role that no worker plays is down."""
        return {seat.role: seat.worker for seat in self.seats}

    @property
    def moves(self) -> tuple[Seat, ...]:
        """Seats whose worker plays a role other than its own: it must load that role's layers."""
        return tuple(seat for seat in self.seats if seat.worker != seat.role)

    def ops(self, worker: Worker) -> list[Op]:
        """The ops of one live worker in program order, in place."""
        seat = self.seat_of[worker]
        return list(place(self.programs[seat.program], seat, self.times))

    def all_ops(self) -> Iterator[Op]:
        """The ops of all live workers, worker by worker."""
        for seat in self.seats:
            yield from place(self.programs[seat.program], seat, self.times)

    def seconds(self, ticks: int) -> float:
        """Ticks as seconds."""
        return ticks * self.tick_seconds

    @property
    def gap(self) -> float:
        """How far the period can at most be from the best possible one: period / bound - 1."""
        return self.period_ticks / self.lower_bound_ticks - 1 if self.lower_bound_ticks else 0.0

    @property
    def rerouted(self) -> int:
        """Micro-batches at a stage that a peer runs because their own worker is down."""
        return sum(1 for seat in self.seats for op in self.programs[seat.program]
                   if op.kind is OpKind.F and op.pipeline is not None)


def place(program: Program, seat: Seat, times: Times) -> Iterator[Op]:
    """Turn a stored program into the ops of one live worker."""
    own, worker = seat.role.pipeline, seat.worker
    cost: dict[tuple[OpKind, int | None], int] = {}
    for op in program:
        key = (op.kind, op.stage)
        if key not in cost:
            where = seat.role.column if op.stage is None else op.stage
            cost[key] = times.duration_ticks(op.kind, where, worker)
        pipeline = None if op.microbatch is None else own if op.pipeline is None else op.pipeline
        yield Op(op.kind, op.stage, pipeline, op.microbatch, worker, op.start_ticks, op.start_ticks + cost[key])


def period_ticks(ops: Iterable[Op]) -> int:
    """Steady-state period: the longest busy window (first start to last end) of any worker. 0 without ops."""
    first: dict[Worker, int] = {}
    last: dict[Worker, int] = {}
    for op in ops:
        first[op.worker] = min(first.get(op.worker, op.start_ticks), op.start_ticks)
        last[op.worker] = max(last.get(op.worker, op.end_ticks), op.end_ticks)
    return max((last[worker] - first[worker] for worker in first), default=0)
