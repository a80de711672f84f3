"""Read and write measured traces: when each op ran, for `slipstream show`."""

import math
from collections import defaultdict
from pathlib import Path

import msgspec

from slipstream.schedules.document import DocumentError, DocumentKind
from slipstream.schedules.files import write_atomically
from slipstream.schedules.schedule import Op, OpKind, Worker

FORMAT = "slipstream.trace"
VERSION = 1
MAX_FILE_BYTES = 64 * 2**20
MAX_SECONDS = 1e9
TICK_SECONDS = 1e-9
"""Seconds in a tick when measured ops are shown like planned ones."""


class MeasuredTraceError(DocumentError):
    """Error of one line for a trace file that cannot be read."""


class MeasuredOp(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False
):
    """Op as measured; in JSON, an array of these fields in this order.

    The op ran from its start to before its end. `slice` is None for O; `pipeline` and `microbatch`
    are None for A and O.
    """

    worker: Worker
    kind: OpKind
    slice: int | None
    pipeline: int | None
    microbatch: int | None
    start_seconds: float
    end_seconds: float


class OpTime(msgspec.Struct, frozen=True, array_like=True):
    """Median seconds that ops of one kind took at one slice, in an iteration."""

    kind: OpKind
    slice: int
    number: int
    """Number of ops that were measured."""
    seconds: float
    """Median of the ops' seconds, each divided by its sample's relative cost, if known."""
    misfit: float | None = None
    """Root mean square of (duration / median - 1); None if no costs are known.

    This error says how far the samples' costs are from measured times.
    """


class MeasuredIteration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Ops of all workers in one iteration, timed from its start; in JSON, `[iteration, ops]`."""

    iteration: int
    ops: tuple[MeasuredOp, ...]


class MeasuredTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured times of the ops of some iterations, as stored in a file."""

    format: str = FORMAT
    version: int = VERSION
    job: str
    iterations: tuple[MeasuredIteration, ...]


_KIND = DocumentKind(
    name="trace",
    format=FORMAT,
    version=VERSION,
    content=MeasuredTrace,
    bulk=("iterations",),
    max_bytes=MAX_FILE_BYTES,
    error=MeasuredTraceError,
)


def decode_measured_trace(data: bytes, source: str = "trace") -> MeasuredTrace:
    """Decode a measured trace. Raises MeasuredTraceError, whose message names `source`."""
    trace = _KIND.decode(data, source)
    for iteration in trace.iterations:
        for op in iteration.ops:
            if not (
                math.isfinite(op.start_seconds)
                and 0 <= op.start_seconds <= op.end_seconds <= MAX_SECONDS
            ):
                raise MeasuredTraceError(
                    f"{source}: iteration {iteration.iteration}: {op.kind} on {op.worker} runs "
                    f"from {op.start_seconds} s to {op.end_seconds} s; expected 0 <= start <= end"
                )
    return trace


def encode_measured_trace(trace: MeasuredTrace) -> bytes:
    """Encode a trace as canonical JSON: one line that ends with a newline."""
    return msgspec.json.encode(trace) + b"\n"


def read_measured_trace(path: Path) -> MeasuredTrace:
    """Read a trace file. Raises MeasuredTraceError if it cannot be read."""
    return decode_measured_trace(_KIND.read_bytes(path), str(path))


def write_measured_trace(trace: MeasuredTrace, path: Path) -> None:
    """Write a trace file atomically. Raises OSError."""
    write_atomically(path, encode_measured_trace(trace))


def placed_ops(iteration: MeasuredIteration) -> dict[Worker, list[Op]]:
    """Return each worker's measured ops as `Op`, sorted by start. A tick is TICK_SECONDS."""
    ops: dict[Worker, list[Op]] = defaultdict(list)
    for op in iteration.ops:
        ops[op.worker].append(
            Op(
                op.kind,
                op.slice,
                op.pipeline,
                op.microbatch,
                op.worker,
                round(op.start_seconds / TICK_SECONDS),
                round(op.end_seconds / TICK_SECONDS),
            )
        )
    # A trace file may list ops in any order.
    for program in ops.values():
        program.sort(key=lambda op: (op.start_ticks, op.end_ticks))
    return {worker: ops[worker] for worker in sorted(ops)}
