"""A worker's program: what it does in an iteration, one instruction after the other.

A schedule is lowered to programs once. An instruction is one line of text, in the style of
torch.distributed.pipelining (`0F1`), with the pipeline of the micro-batch:

    0F1.2                              op F of micro-batch 1.2 at slice 0; likewise I, W and B
    1RECV_F1.2 from 1.0 #17            receive the activation that 1F1.2 takes
    1RECV_B1.2 from 1.2 #21 frees 3    receive the gradient that 1I1.2 or 1B1.2 takes
    1SEND_F1.2 to 1.2 #18              send the activation that 1F1.2 has made
    1SEND_B1.2 to 1.0 #22              send the gradient that 1I1.2 or 1B1.2 has made
    1A                                 sum the gradients of slice 1 over all holders of its layers
    O                                  step the optimizer

The number after `#` names a tensor at both of its ends. On each worker, numbers ascend from one
transfer to the next. So workers cannot wait for each other in a circle, even if each makes its
transfers strictly one after the other. What `frees` means is at `Instruction.frees`.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import msgspec

from slipstream.schedules.crossings import Crossing, crossings_by_worker
from slipstream.schedules.graph import early_reduction_order, pipeline_groups
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.precedence import Tensor
from slipstream.schedules.schedule import (
    COMPUTE_KINDS,
    BackwardMode,
    Grid,
    Op,
    OpKind,
    OptimizerMode,
    Schedule,
    Worker,
)

Sums = tuple[tuple[LayerRange, tuple[Worker, ...]], ...]
"""Ranges of layers whose gradients a worker reduces, each with all workers that take part."""
Ties = tuple[tuple[int, tuple[Worker, ...]], ...]
"""Groups of layers with shared parameters that a worker holds: (group's number, all holders)."""


class TransferKind(StrEnum):
    """Kinds of transfer, named as in torch.distributed.pipelining."""

    RECV_F = "RECV_F"  # receive an activation
    RECV_B = "RECV_B"  # receive a gradient
    SEND_F = "SEND_F"  # send an activation
    SEND_B = "SEND_B"  # send a gradient


RECEIVES = frozenset({TransferKind.RECV_F, TransferKind.RECV_B})
"""Kinds of transfer that receive a tensor."""
_KINDS: Mapping[str, OpKind | TransferKind] = {
    kind.value: kind for kind in (*OpKind, *TransferKind)
}
# Numbers have at most 18 digits: `int` would raise a plain ValueError for more than 4300.
_LINE = re.compile(
    r"(\d{0,18})([A-Z_]+)(?:(\d{1,18})\.(\d{1,18}))?"
    r"(?: (from|to) (\d{1,18})\.(\d{1,18}) #(\d{1,18})(?: frees (\d{1,18}))?)?"
)


class ProgramError(ValueError):
    """Error of one line for text that is no instruction."""


class Instruction(msgspec.Struct, frozen=True, gc=False):
    """Instruction of a worker's program: an op, or a transfer to or from another worker."""

    kind: OpKind | TransferKind
    slice: int | None = None
    """Slice of the op, or of the tensor that is transferred; None for O.

    A received tensor is taken at this slice; a sent one was made there.
    """
    pipeline: int | None = None
    """Pipeline of the micro-batch, in which it has number `microbatch`; None for A and O."""
    microbatch: int | None = None
    peer: Worker | None = None
    """Worker at the other end of a transfer; None for an op."""
    number: int = 0
    """Number of a transfer, by which both ends name it; 0 for an op."""
    frees: int = 0
    """Number of this worker's first tensors to `peer` that a receive proves to have arrived.

    `peer` took these tensors as inputs before it made the received one.
    """

    def __str__(self) -> str:
        op = f"{'' if self.slice is None else self.slice}{self.kind}"
        if self.microbatch is not None:
            op = f"{op}{self.pipeline}.{self.microbatch}"
        if self.peer is None:
            return op
        way = "from" if self.kind in RECEIVES else "to"
        line = f"{op} {way} {self.peer} #{self.number}"
        return f"{line} frees {self.frees}" if self.frees else line

    @classmethod
    def parse(cls, text: str, pipelines: Sequence[int] | None = None) -> "Instruction":
        """Parse a line of a program. Raises ProgramError.

        The line names pipelines by number; if `pipelines` is given, by the index in it. Raises
        IndexError for an index beyond it.
        """
        match = _LINE.fullmatch(text)
        kind = None if match is None else _KINDS.get(match[2])
        # Each kind has its own parts: transfers a peer, A and O no micro-batch, O no slice.
        if (
            match is None
            or kind is None
            or (match[5] is not None) != isinstance(kind, TransferKind)
            or (match[3] is None) != (kind in (OpKind.A, OpKind.O))
            or (match[1] == "") != (kind is OpKind.O)
        ):
            raise ProgramError(
                f"{text!r} is no instruction; expected one such as '0F1.2' (see docs/formats.md)"
            )
        slice_, _, pipeline, microbatch, _, peer, column, number, frees = match.groups()

        # Stored programs name pipelines by index, so that equal ones are stored once.
        def name(number: str) -> int:
            return int(number) if pipelines is None else pipelines[int(number)]

        return cls(
            kind=kind,
            slice=int(slice_) if slice_ else None,
            pipeline=None if pipeline is None else name(pipeline),
            microbatch=None if microbatch is None else int(microbatch),
            peer=None if peer is None else Worker(name(peer), int(column)),
            number=int(number or 0),
            frees=int(frees or 0),
        )

    def with_pipeline_numbers(self, numbers: Mapping[int, int]) -> "Instruction":
        """Return a copy in which pipelines have new numbers; `numbers` has these by old number."""
        peer = self.peer
        return Instruction(
            kind=self.kind,
            slice=self.slice,
            pipeline=None if self.pipeline is None else numbers[self.pipeline],
            microbatch=self.microbatch,
            peer=None if peer is None else Worker(numbers[peer.pipeline], peer.column),
            number=self.number,
            frees=self.frees,
        )


class ValueName(NamedTuple):
    """Name of a value between slices: an activation or gradient of a micro-batch.

    The value belongs to the boundary before layer `layer`.
    """

    tensor: Tensor
    layer: int
    pipeline: int
    microbatch: int


class WorkerProgram(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Program of one live worker, with all that the worker must know of the schedule."""

    worker: Worker
    grid: Grid
    slices: tuple[LayerRange, ...] = ()
    """Ranges of layers that are no stages; their numbers follow those of the stages."""
    backward: BackwardMode
    optimizer: OptimizerMode
    failed: tuple[Worker, ...]
    """Workers of the grid that take no part."""
    holds: tuple[LayerRange, ...]
    """Layers that the worker holds, as ascending ranges that do not touch."""
    instructions: tuple[Instruction, ...]
    sums: Sums = ()
    ties: Ties = ()

    @property
    def members(self) -> tuple[Worker, ...]:
        """Workers of the grid that take part, sorted."""
        down = set(self.failed)
        return tuple(worker for worker in self.grid.workers() if worker not in down)

    @cached_property
    def ops(self) -> tuple[Instruction, ...]:
        """Instructions that are no transfers, in order."""
        return tuple(
            instruction for instruction in self.instructions if isinstance(instruction.kind, OpKind)
        )

    @cached_property
    def transfers(self) -> tuple[Instruction, ...]:
        """Instructions that are transfers, in order."""
        return tuple(
            instruction
            for instruction in self.instructions
            if isinstance(instruction.kind, TransferKind)
        )

    @property
    def connections(self) -> set[tuple[Worker, Worker]]:
        """Pairs (source, target) of workers, one of them this one, that exchange tensors."""
        connections = set()
        for transfer in self.transfers:
            if transfer.peer is not None:
                receives = transfer.kind in RECEIVES
                ends = (transfer.peer, self.worker) if receives else (self.worker, transfer.peer)
                connections.add(ends)
        return connections

    @property
    def computes_after_reducing(self) -> bool:
        """True if a compute op follows an all-reduce, so that the two can overlap."""
        kinds = [op.kind for op in self.ops]
        return OpKind.A in kinds and not COMPUTE_KINDS.isdisjoint(kinds[kinds.index(OpKind.A) :])

    def layers_of(self, slice: int) -> LayerRange:
        """Return the layers of a slice, by its number: stages first, then `slices`."""
        stages = self.grid.layers_by_stage
        return stages[slice] if slice < len(stages) else self.slices[slice - len(stages)]

    def input_of(self, instruction: Instruction) -> ValueName | None:
        """Return the name of the value between slices that an op or a send takes.

        None if it takes none, as the first F of a micro-batch.
        """
        match instruction.kind:
            case OpKind.F | TransferKind.SEND_B:
                return self._value_at(instruction, instruction.kind is OpKind.F, begins=True)
            case OpKind.I | OpKind.B | TransferKind.SEND_F:
                return self._value_at(
                    instruction, instruction.kind is TransferKind.SEND_F, begins=False
                )
        return None

    def output_of(self, instruction: Instruction) -> ValueName | None:
        """Return the name of the value between slices that an op or a receive makes.

        None if it makes none, as the last F of a micro-batch.
        """
        match instruction.kind:
            case OpKind.I | OpKind.B | TransferKind.RECV_F:
                return self._value_at(
                    instruction, instruction.kind is TransferKind.RECV_F, begins=True
                )
            case OpKind.F | TransferKind.RECV_B:
                return self._value_at(instruction, instruction.kind is OpKind.F, begins=False)
        return None

    def _value_at(
        self, instruction: Instruction, activation: bool, *, begins: bool
    ) -> ValueName | None:
        """Return the value where a slice begins or ends; None at the model's ends."""
        assert instruction.slice is not None and instruction.pipeline is not None
        assert instruction.microbatch is not None
        layer = self.layers_of(instruction.slice)[0 if begins else 1]
        if layer in (0, self.grid.layer_count):
            return None
        return ValueName(
            "activation" if activation else "gradient",
            layer,
            instruction.pipeline,
            instruction.microbatch,
        )


def build_program(
    schedule: Schedule, worker: Worker, ties: Sequence[Sequence[Worker]] = ()
) -> WorkerProgram:
    """Return the program of one live worker of a schedule.

    The schedule must pass `schedules.check`. `ties` has the holders of each group of layers with
    shared parameters.
    """
    # Tensors are numbered within the pipelines that share micro-batches with the worker's.
    seat = schedule.seat_of[worker]
    group = next(group for group in pipeline_groups(schedule) if seat.role.pipeline in group)
    instructions = tuple(lower_ops(schedule, worker, crossings_by_worker(schedule, group)[worker]))
    return WorkerProgram(
        worker=worker,
        grid=schedule.grid,
        slices=schedule.slices,
        backward=schedule.backward,
        optimizer=schedule.optimizer,
        failed=tuple(role for role in schedule.grid.workers() if role not in schedule.seat_of),
        holds=schedule.held_layers(worker),
        instructions=instructions,
        sums=tuple(
            (layers, workers)
            for layers, workers in find_reductions(schedule).items()
            if worker in workers
        ),
        ties=tuple(
            (number, tuple(sorted(workers)))
            for number, workers in enumerate(ties)
            if worker in workers
        ),
    )


def find_reduced_ranges(schedule: Schedule) -> list[set[LayerRange]]:
    """Return, for each program in order, the ranges of layers whose gradients it reduces."""
    ranges: list[set[LayerRange]] = []
    for program in schedule.programs:
        slices = {op.slice for op in program if op.kind is OpKind.A and op.slice is not None}
        ranges.append(set(map(schedule.layers_of, slices)))
    return ranges


def find_reductions(schedule: Schedule) -> dict[LayerRange, tuple[Worker, ...]]:
    """Return the live workers that reduce gradients together, by range of layers, ascending."""
    ranges = find_reduced_ranges(schedule)
    workers: dict[LayerRange, set[Worker]] = defaultdict(set)
    for seat in schedule.seats:
        for layers in ranges[seat.program]:
            workers[layers].add(seat.worker)
    return {layers: tuple(sorted(workers[layers])) for layers in sorted(workers)}


def lower_ops(
    schedule: Schedule, worker: Worker, crossings: Sequence[Crossing]
) -> Iterator[Instruction]:
    """Iterate over the instructions of a live worker.

    `crossings` has the tensors that the worker sends or receives, sorted by number. A send comes
    directly after the op that has made the tensor. A receive comes before the op that takes the
    tensor, and before all transfers of higher numbers. Unless reductions overlap compute, it also
    comes before each reduction that is planned to start when the tensor has been made, or later:
    the sender may take part in that reduction, and sends first.
    """
    ops = schedule.ops(worker)
    before: dict[int, list[Instruction]] = defaultdict(list)
    after: dict[int, list[Instruction]] = defaultdict(list)
    # Backward, since a transfer comes before those of higher numbers: `place` is where the next
    # higher one is.
    place, follows_op = len(ops), False
    for crossing, transfer in reversed(
        list(zip(crossings, _lower_transfers(ops, worker, crossings), strict=True))
    ):
        if crossing.source == worker:
            place, follows_op = crossing.made, True
        elif (latest := _find_latest_receive(schedule, ops, crossing)) <= place:
            place, follows_op = latest, False
        (after if follows_op else before)[place].append(transfer)
    # Reductions that overlap compute begin as early as their gradients are there.
    order: Iterable[int] = range(len(ops))
    if schedule.has_overlap:
        order = early_reduction_order(schedule, ops)
    for place in order:
        op = ops[place]
        yield from reversed(before[place])
        yield Instruction(op.kind, op.slice, op.pipeline, op.microbatch)
        yield from reversed(after[place])


def _find_latest_receive(schedule: Schedule, ops: Sequence[Op], crossing: Crossing) -> int:
    """Return the index of the op before which the worker must have received a tensor."""
    if schedule.has_overlap:
        return crossing.taken
    earlier_ops = enumerate(ops[: crossing.taken])
    reductions = [place for place, op in earlier_ops if op.kind is OpKind.A]
    if not reductions:
        return crossing.taken
    # A receive must not wait until after a reduction for which the sender waits, too.
    made = schedule.ops(crossing.source)[crossing.made].end_ticks
    return next((place for place in reductions if ops[place].start_ticks >= made), crossing.taken)


def _lower_transfers(
    ops: Sequence[Op], worker: Worker, crossings: Sequence[Crossing]
) -> Iterator[Instruction]:
    """Iterate over the instructions for the transfers of a worker, in the order of `crossings`."""
    last_taken: dict[Worker, list[int]] = defaultdict(list)
    # For each target and send to it: how far the target's program is when it has taken this send
    # and all earlier ones.
    for crossing in crossings:
        forward = crossing.tensor == "activation"
        if crossing.source == worker:
            op, taken = ops[crossing.made], last_taken[crossing.target]
            taken.append(max(crossing.taken, taken[-1] if taken else 0))
            yield Instruction(
                TransferKind.SEND_F if forward else TransferKind.SEND_B,
                op.slice,
                op.pipeline,
                op.microbatch,
                crossing.target,
                crossing.number,
            )
        else:
            op = ops[crossing.taken]
            # Sends that the source had taken before it made this tensor.
            frees = bisect_right(last_taken[crossing.source], crossing.made)
            yield Instruction(
                TransferKind.RECV_F if forward else TransferKind.RECV_B,
                op.slice,
                op.pipeline,
                op.microbatch,
                crossing.source,
                crossing.number,
                frees,
            )
