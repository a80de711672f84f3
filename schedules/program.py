"""A worker's program: what it does in an iteration, one instruction after the other.

A schedule is lowered to programs once. An instruction is one line of text, in the style of
torch.distributed.pipelining (`0F1`), with the pipeline of the micro-batch:

    0F1.2                              op F of micro-batch 1.2 at slice 0; likewise I, W and B
    1RECV_F1.2 from 1.0 #17            receive the activation that 1F1.2 takes
    1RECV_B1.2 from 1.2 #21 frees 3    receive the gradient that 1I1.2 or 1B1.2 takes
    1SEND_F1.2 to 1.2 #18              send the activation that 1F1.2 has made
    1SEND_B1.2 to 1.0 #22              send the gradient that 1I1.2 or 1B1.2 has made
    1A                                 sum the gradients of slice 1 over all workers that hold its layers
    O                                  step the optimizer

The number after `#` names a tensor at both of its ends. On each worker, numbers ascend from one
transfer to the next. So workers cannot wait for each other in a circle, even if each makes its
transfers strictly one after the other. What `frees` means is at `Instruction.frees`.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import msgspec

from slipstream.schedules.crossings import Crossing, crossings_by_worker
from slipstream.schedules.graph import early_reduction_order, pipeline_groups
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.precedence import Tensor
from slipstream.schedules.schedule import COMPUTE_KINDS, BackwardMode, Grid, Op, OpKind, OptimizerMode, Schedule, Worker

Sums = tuple[tuple[LayerRange, tuple[Worker, ...]], ...]
"""Ranges of layers whose gradients a worker reduces, each with all workers."""
Ties = tuple[tuple[int, tuple[Worker, ...]], ...]
"""Groups of layers with tied parameters that a worker holds: (number, all holders)."""


class TransferKind(StrEnum):
    """Kinds of transfers, with the words of torch.distributed.pipelining."""

    RECV_F = "RECV_F"  # receive an activation
    RECV_B = "RECV_B"  # receive a gradient
    SEND_F = "SEND_F"  # send an activation
    SEND_B = "SEND_B"  # send a gradient


RECEIVES = frozenset({TransferKind.RECV_F, TransferKind.RECV_B})
_KINDS: Mapping[str, OpKind | TransferKind] = {kind.value: kind for kind in (*OpKind, *TransferKind)}
_LINE = re.compile(r"(\d*)([A-Z_]+)(?:(\d+)\.(\d+))?(?: (from|to) (\d+)\.(\d+) #(\d+)(?: frees (\d+))?)?")


class ProgramError(ValueError):
    """Error for text that is no instruction. The message is one line."""


class Instruction(msgspec.Struct, frozen=True, gc=False):
    """Instruction of a worker's program: an op, or a transfer to or from another worker."""

    kind: OpKind | TransferKind
    slice: int | None = None
    """Slice of the op, or of a tensor's taker or maker; None for O.

    A received tensor is taken there; a sent one is made there.
    """
    pipeline: int | None = None
    """Pipeline of the micro-batch, whose number in it is `microbatch`; None for A and O."""
    microbatch: int | None = None
    peer: Worker | None = None
    """Worker at the other end of a transfer."""
    number: int = 0
    """Number of a transfer, by which both ends name it."""
    frees: int = 0
    """Number of first tensors of this worker to `peer` that have arrived there.

    Before `peer` made what is received here, it took these as inputs.
    """

    def __str__(self) -> str:
        op = f"{'' if self.slice is None else self.slice}{self.kind}"
        if self.microbatch is not None:
            op = f"{op}{self.pipeline}.{self.microbatch}"
        if self.peer is None:
            return op
        way = "from" if self.kind in RECEIVES else "to"
        return f"{op} {way} {self.peer} #{self.number}{f' frees {self.frees}' if self.frees else ''}"

    @classmethod
    def parse(cls, text: str, pipelines: Sequence[int] | None = None) -> "Instruction":
        """Parse a line of text, with pipelines named as in `pipelines`.

        By default, the text has their numbers. Raises ProgramError.
        """
        match = _LINE.fullmatch(text)
        kind = None if match is None else _KINDS.get(match[2])
        if match is None or kind is None or (match[5] is not None) != isinstance(kind, TransferKind) \
                or (match[3] is None) != (kind in (OpKind.A, OpKind.O)) or (match[1] == "") != (kind is OpKind.O):
            raise ProgramError(f"{text!r} is no instruction; expected one such as '0F1.2' (see docs/formats.md)")
        at, _, pipeline, microbatch, _, peer, column, number, frees = match.groups()

        def name(number: str) -> int:
            return int(number) if pipelines is None else pipelines[int(number)]

        return cls(kind, int(at) if at else None, None if pipeline is None else name(pipeline),
                   None if microbatch is None else int(microbatch),
                   None if peer is None else Worker(name(peer), int(column)), int(number or 0), int(frees or 0))

    def with_pipeline_numbers(self, numbers: Mapping[int, int]) -> "Instruction":
        """Return a copy in which each pipeline has the number that `numbers` gives it."""
        return Instruction(self.kind, self.slice, None if self.pipeline is None else numbers[self.pipeline],
                           self.microbatch,
                           None if self.peer is None else Worker(numbers[self.peer.pipeline], self.peer.column),
                           self.number, self.frees)


class ValueName(NamedTuple):
    """Name of the activation or gradient before layer `layer` of a micro-batch."""

    tensor: Tensor
    layer: int
    pipeline: int
    microbatch: int


class WorkerProgram(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Program of one live worker, with all that it must know of the schedule."""

    worker: Worker
    grid: Grid
    slices: tuple[LayerRange, ...] = ()
    """Ranges of layers that are no stages; their numbers follow the stages'."""
    backward: BackwardMode
    optimizer: OptimizerMode
    failed: tuple[Worker, ...]
    """Workers that take no part."""
    holds: tuple[LayerRange, ...]
    """Layers that the worker holds, as ascending ranges that do not touch."""
    instructions: tuple[Instruction, ...]
    sums: Sums = ()
    ties: Ties = ()

    @property
    def members(self) -> tuple[Worker, ...]:
        """Workers that take part, sorted."""
        down = set(self.failed)
        return tuple(worker for worker in self.grid.workers() if worker not in down)

    @cached_property
    def ops(self) -> tuple[Instruction, ...]:
        """Instructions without transfers, in order."""
        return tuple(one for one in self.instructions if isinstance(one.kind, OpKind))

    @cached_property
    def transfers(self) -> tuple[Instruction, ...]:
        """Transfers, in order."""
        return tuple(one for one in self.instructions if isinstance(one.kind, TransferKind))

    @property
    def connections(self) -> set[tuple[Worker, Worker]]:
        """Pairs (source, target) of workers between which this one transfers tensors."""
        return {(one.peer, self.worker) if one.kind in RECEIVES else (self.worker, one.peer)
                for one in self.transfers if one.peer is not None}

    @property
    def computes_after_reducing(self) -> bool:
        """True if compute follows the first A, so that reductions can run during compute."""
        kinds = [op.kind for op in self.ops]
        return OpKind.A in kinds and not COMPUTE_KINDS.isdisjoint(kinds[kinds.index(OpKind.A):])

    def layers_of(self, slice: int) -> LayerRange:
        """Return the layers of a slice, by its number: stages first, then `slices`."""
        stages = self.grid.layers_by_stage
        return stages[slice] if slice < len(stages) else self.slices[slice - len(stages)]

    def input_of(self, instruction: Instruction) -> ValueName | None:
        """Return the name of the value that an op or a send takes, if any."""
        match instruction.kind:
            case OpKind.F | TransferKind.SEND_B:
                return self._value_at(instruction, instruction.kind is OpKind.F, begins=True)
            case OpKind.I | OpKind.B | TransferKind.SEND_F:
                return self._value_at(instruction, instruction.kind is TransferKind.SEND_F, begins=False)
        return None

    def output_of(self, instruction: Instruction) -> ValueName | None:
        """Return the name of the value that an op or a receive makes, if any."""
        match instruction.kind:
            case OpKind.I | OpKind.B | TransferKind.RECV_F:
                return self._value_at(instruction, instruction.kind is TransferKind.RECV_F, begins=True)
            case OpKind.F | TransferKind.RECV_B:
                return self._value_at(instruction, instruction.kind is OpKind.F, begins=False)
        return None

    def _value_at(self, instruction: Instruction, activation: bool, *, begins: bool) -> ValueName | None:
        """Return the value at an end of an instruction's slice; None at the model's."""
        assert instruction.slice is not None and instruction.pipeline is not None
        assert instruction.microbatch is not None
        layer = self.layers_of(instruction.slice)[0 if begins else 1]
        if layer in (0, self.grid.layer_count):
            return None
        return ValueName("activation" if activation else "gradient", layer, instruction.pipeline,
                         instruction.microbatch)


def build_program(schedule: Schedule, worker: Worker, ties: Sequence[Sequence[Worker]] = ()) -> WorkerProgram:
    """Lower a schedule to the program of one live worker.

    `ties` has all holders of each group of layers with shared parameters.
    """
    seat = schedule.seat_of[worker]
    group = next(group for group in pipeline_groups(schedule) if seat.role.pipeline in group)
    instructions = tuple(lower_ops(schedule, worker, crossings_by_worker(schedule, group)[worker]))
    return WorkerProgram(
        worker=worker, grid=schedule.grid, slices=schedule.slices, backward=schedule.backward,
        optimizer=schedule.optimizer, failed=tuple(one for one in schedule.grid.workers()
                                                   if one not in schedule.seat_of),
        holds=schedule.held_layers(worker), instructions=instructions,
        sums=tuple((layers, workers) for layers, workers in find_reductions(schedule).items() if worker in workers),
        ties=tuple((number, tuple(sorted(workers))) for number, workers in enumerate(ties) if worker in workers))


def find_reduced_ranges(schedule: Schedule) -> list[set[LayerRange]]:
    """Return, for each program of the schedule, the ranges of layers whose gradients it reduces."""
    return [{schedule.layers_of(op.slice) for op in program if op.kind is OpKind.A and op.slice is not None}
            for program in schedule.programs]


def find_reductions(schedule: Schedule) -> dict[LayerRange, tuple[Worker, ...]]:
    """Return all live workers that sum gradients together, by range of layers, ascending."""
    ranges = find_reduced_ranges(schedule)
    workers: dict[LayerRange, set[Worker]] = defaultdict(set)
    for seat in schedule.seats:
        for layers in ranges[seat.program]:
            workers[layers].add(seat.worker)
    return {layers: tuple(sorted(workers[layers])) for layers in sorted(workers)}


def lower_ops(schedule: Schedule, worker: Worker, crossings: Sequence[Crossing]) -> Iterator[Instruction]:
    """Iterate over the instructions of a live worker; `crossings` are its transfers, by number.

    A send comes directly after the op that has made the tensor. A receive comes before the op that
    takes it, before all transfers of higher numbers, and before each reduction that does not start
    before the tensor is made: the sender may take part in it, and sends first.
    """
    ops = schedule.ops(worker)
    before: dict[int, list[Instruction]] = defaultdict(list)
    after: dict[int, list[Instruction]] = defaultdict(list)
    place, follows_op = len(ops), False  # where the transfer of the next higher number is
    for crossing, transfer in reversed(list(zip(crossings, _lower_transfers(ops, worker, crossings), strict=True))):
        if crossing.source == worker:
            place, follows_op = crossing.made, True
        elif (latest := _find_latest_receive(schedule, ops, crossing)) <= place:
            place, follows_op = latest, False
        (after if follows_op else before)[place].append(transfer)
    for place in early_reduction_order(schedule, ops) if schedule.has_overlap else range(len(ops)):
        op = ops[place]
        yield from reversed(before[place])
        yield Instruction(op.kind, op.slice, op.pipeline, op.microbatch)
        yield from reversed(after[place])


def _find_latest_receive(schedule: Schedule, ops: Sequence[Op], crossing: Crossing) -> int:
    """Return the position of the op before which the target receives a tensor."""
    reductions = [] if schedule.has_overlap else [
        place for place, op in enumerate(ops[:crossing.taken]) if op.kind is OpKind.A]
    if not reductions:
        return crossing.taken
    made = schedule.ops(crossing.source)[crossing.made].end_ticks
    return next((place for place in reductions if ops[place].start_ticks >= made), crossing.taken)


def _lower_transfers(ops: Sequence[Op], worker: Worker, crossings: Sequence[Crossing]) -> Iterator[Instruction]:
    """Iterate over the instructions for these transfers of a worker."""
    last_taken: dict[Worker, list[int]] = defaultdict(list)
    """Places, by target, of its program when it has taken all sends up to one."""
    for crossing in crossings:
        forward = crossing.tensor == "activation"
        if crossing.source == worker:
            op, taken = ops[crossing.made], last_taken[crossing.target]
            taken.append(max(crossing.taken, taken[-1] if taken else 0))
            yield Instruction(TransferKind.SEND_F if forward else TransferKind.SEND_B, op.slice, op.pipeline,
                              op.microbatch, crossing.target, crossing.number)
        else:
            op, frees = ops[crossing.taken], bisect_right(last_taken[crossing.source], crossing.made)
            yield Instruction(TransferKind.RECV_F if forward else TransferKind.RECV_B, op.slice, op.pipeline,
                              op.microbatch, crossing.source, crossing.number, frees)
