"""Define ops, as stored and as they happen, and their ticks and memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Annotated

import msgspec

from slipstream.schedules.grid import MAX_MICROBATCHES, Natural, Ratio, Ticks, Worker
from slipstream.schedules.layers import LayerRange, prefix_sums, sum_over_ranges


class OpKind(StrEnum):
    """Kinds of op, named as in torch.distributed.pipelining."""

    F = "F"  # forward
    I = "I"  # backward for the input
    W = "W"  # backward for the weights
    B = "B"  # I then W, fused
    A = "A"  # gradient all-reduce of a slice over all live workers that hold its layers
    O = "O"  # optimizer step of a worker


COMPUTE_KINDS = frozenset({OpKind.F, OpKind.I, OpKind.W, OpKind.B})


class ProgramOp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """Op as a program stores it: `[kind, slice, microbatch, start_ticks, pipeline]`.

    `slice` is an index for `Schedule.layers_of`, and None for O. `microbatch` is None for A and O.
    `pipeline`, that of the micro-batch, is None if it is the pipeline of the role that runs the op.
    """

    kind: OpKind
    slice: Natural | None
    microbatch: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MICROBATCHES)] | None
    start_ticks: Ticks
    pipeline: Natural | None = None


Program = tuple[ProgramOp, ...]


class Seat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """Live worker in a schedule, as `[worker, role, program, holds]`.

    The role is the worker itself unless it was moved. `program` is an index of `Schedule.programs`.
    """

    worker: Worker
    role: Worker
    program: Natural
    holds: tuple[LayerRange, ...] | None = None
    """Layers that the worker holds, as ascending ranges with gaps; None: those of its role."""


class Op(msgspec.Struct, frozen=True, gc=False, order=True):
    """Op of a live worker, with its micro-batch, and its start and end in ticks.

    `pipeline` is that of the micro-batch, not of the worker. `Schedule.op_text` names the layers of
    the slice.
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
        microbatch = f"micro-batch {self.pipeline}.{self.microbatch}"
        return f"{self.kind}({microbatch}, slice {self.slice}) on {self.worker}"


class Slow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Worker whose compute ops take `per_mille` / 1000 of the usual time. Ticks are rounded up."""

    worker: Worker
    per_mille: Annotated[int, msgspec.Meta(ge=1, le=10**6)]


class LayerCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Least time and memory of each layer, for bounds that hold for all layouts.

    Layers may need finer units than whole stages. There are `per_tick` of their time units in a
    tick of the schedule, and `per_unit` of their memory units in a unit of its memory. Both are
    fractions (numerator, denominator).
    """

    per_tick: Ratio = (1, 1)
    per_unit: Ratio = (1, 1)
    forward: tuple[Ticks, ...]
    backward_input: tuple[Ticks, ...]
    backward_weight: tuple[Ticks, ...]
    optimizer: tuple[Ticks, ...]
    all_reduce: tuple[Ticks, ...]
    activation: tuple[Ticks, ...]
    """Activation memory of each layer; like all memory here, 0 if memory is unlimited."""
    weight_stash: tuple[Ticks, ...]
    weights: tuple[Ticks, ...]


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Durations of ops in ticks, one for each slice (`Schedule.layers_by_slice`).

    Only `optimizer` has one duration per column instead, and `transfer` a single one.
    """

    forward: tuple[Ticks, ...]
    backward_input: tuple[Ticks, ...]
    backward_weight: tuple[Ticks, ...]
    all_reduce: tuple[Ticks, ...]
    optimizer: tuple[Ticks, ...]
    transfer: Ticks
    slow: tuple[Slow, ...] = ()
    """Workers whose compute ops take longer or shorter than usual, sorted."""
    optimizer_of_layer: tuple[Ticks, ...] = ()
    """Optimizer ticks of each layer; the O of a seat with `holds` takes their sum."""
    of_layers: LayerCosts | msgspec.UnsetType = msgspec.UNSET
    """Costs of single layers. A file has this key only if its bound also covers other layouts."""
    overlap: bool | msgspec.UnsetType = msgspec.UNSET
    """True if an all-reduce (A) occupies only links, so that its workers compute meanwhile.

    Each worker takes part in one A at a time. If not true, an A occupies its workers, too. A file
    has this key only if it is true.
    """

    def duration_ticks(self, kind: OpKind, where: int, worker: Worker) -> int:
        """Return the duration of an op in ticks on a physical worker.

        `where` is the number of the op's slice, for A too. For O, it is the column of the worker's
        role. Compute ops take longer or shorter on a worker in `slow`, in whole ticks, rounded up.
        For O of a worker whose seat lists its layers, use `optimizer_ticks`.
        """
        # The speed of a worker applies to compute ops only.
        if kind is OpKind.O:
            return self.optimizer[where]
        if kind is OpKind.A:
            return self.all_reduce[where]
        if kind is OpKind.B:
            backward_input = self.duration_ticks(OpKind.I, where, worker)
            return backward_input + self.duration_ticks(OpKind.W, where, worker)
        ticks = _ticks_by_slice(self, kind)[where]
        return -(-ticks * self.per_mille_of.get(worker, 1000) // 1000)

    def optimizer_ticks(self, seat: Seat) -> int:
        """Return the ticks of a live worker's optimizer step.

        The step covers the layers that its seat lists, or else those of its role's column.
        """
        if seat.holds is None:
            return self.optimizer[seat.role.column]
        return sum_over_ranges(self._optimizer_before, seat.holds)

    @cached_property
    def _optimizer_before(self) -> tuple[int, ...]:
        return prefix_sums(self.optimizer_of_layer)

    @cached_property
    def per_mille_of(self) -> Mapping[Worker, int]:
        """Time of a compute op on each worker in `slow`, in thousandths of usual."""
        return {slow.worker: slow.per_mille for slow in self.slow}


def _ticks_by_slice(times: Times, kind: OpKind) -> tuple[int, ...]:
    """Return the usual ticks of F, I or W at each slice."""
    if kind is OpKind.F:
        return times.forward
    return times.backward_input if kind is OpKind.I else times.backward_weight


class Room(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Worker with its own capacity for activations, unlike that of its column.

    The capacity is in multiples of `Memory.unit`.
    """

    worker: Worker
    capacity: Ticks


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Memory of the workers and what ops take of it, in multiples of `unit`.

    `unit` is an amount of memory in the job's own unit.
    """

    unit: Annotated[float, msgspec.Meta(ge=1e-300, le=1e300)]
    capacity: tuple[Ticks, ...]
    """Memory for activations of a worker that holds its own stages, one value per column."""
    activation: tuple[Ticks, ...]
    """Memory that a micro-batch holds from F's start to I's end, by slice."""
    weight_stash: tuple[Ticks, ...]
    """Memory that a micro-batch holds from I's end to W's end, by slice."""
    weights: tuple[Ticks, ...] = ()
    """Memory of each layer's parameters, gradients and optimizer state, for seats with `holds`."""
    capacity_of: tuple[Room, ...] | msgspec.UnsetType = msgspec.UNSET
    """Workers whose capacity differs from their column's; left out if there are none."""

    def capacity_for(self, worker: Worker, column: int) -> int:
        """Return the memory for activations of a worker that holds the layers of `column`.

        This is the worker's own value in `capacity_of` or, if it has none there, the column's.
        """
        return self._capacity_of.get(worker, self.capacity[column])

    @cached_property
    def _capacity_of(self) -> Mapping[Worker, int]:
        return {room.worker: room.capacity for room in self.capacity_of or ()}

    @cached_property
    def weights_before(self) -> tuple[int, ...]:
        """Memory of the weights of the first 0, 1, 2, ... layers."""
        return prefix_sums(self.weights)


def place_ops(program: Program, seat: Seat, times: Times) -> Iterator[Op]:
    """Iterate over the ops of a program as the worker of a seat runs it.

    Each op gets its worker, its pipeline and its end.
    """
    own_pipeline, worker = seat.role.pipeline, seat.worker
    # A program has thousands of ops, but few different durations.
    ticks_of: dict[tuple[OpKind, int | None], int] = {}
    for op in program:
        key = (op.kind, op.slice)
        if key not in ticks_of:
            ticks_of[key] = (
                times.optimizer_ticks(seat)
                if op.slice is None
                else times.duration_ticks(op.kind, op.slice, worker)
            )
        pipeline = own_pipeline if op.pipeline is None else op.pipeline
        owner = None if op.microbatch is None else pipeline
        end_ticks = op.start_ticks + ticks_of[key]
        yield Op(op.kind, op.slice, owner, op.microbatch, worker, op.start_ticks, end_ticks)


def with_pipeline_numbers(program: Program, numbers: Mapping[int, int] | Sequence[int]) -> Program:
    """Return a copy of a program that names other pipelines by new numbers.

    `numbers` has the new number of each pipeline, by the old one. If nothing changes, the result is
    the program itself.
    """
    if all(op.pipeline is None or numbers[op.pipeline] == op.pipeline for op in program):
        return program
    return tuple(_with_pipeline_number(op, numbers) for op in program)


def _with_pipeline_number(op: ProgramOp, numbers: Mapping[int, int] | Sequence[int]) -> ProgramOp:
    if op.pipeline is None:
        return op
    return ProgramOp(op.kind, op.slice, op.microbatch, op.start_ticks, numbers[op.pipeline])


def compute_period_ticks(ops: Iterable[Op]) -> int:
    """Return the longest busy window of a worker, in ticks; 0 without ops."""
    first: dict[Worker, int] = {}
    last: dict[Worker, int] = {}
    for op in ops:
        first[op.worker] = min(first.get(op.worker, op.start_ticks), op.start_ticks)
        last[op.worker] = max(last.get(op.worker, op.end_ticks), op.end_ticks)
    return max((last[worker] - first[worker] for worker in first), default=0)
