"""Ops: what a worker does one after the other, as a program stores it and as it happens; seats, which run programs."""

from enum import StrEnum
from typing import Literal

import msgspec

from slipstream.schedules.grid import Worker
from slipstream.schedules.layers import LayerRange

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
    slice: int | None
    microbatch: int | None
    start_ticks: int
    pipeline: int | None = None


Program = tuple[ProgramOp, ...]


class Seat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """A live worker: `[worker, role, program, holds]`. Role equals worker unless normalisation moved it."""

    worker: Worker
    role: Worker
    program: int
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
