"""Read stage times from Chrome traces of the PyTorch profiler, Slipstream or other tools.

Complete events (`"ph": "X"`) of micro-batches' ops are read. torch.distributed.pipelining names
them `PP:2F0`; Slipstream names them `F 0.3` and has the stage among the arguments. For other tools
the caller gives a pattern.
"""

import gzip
import re
import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slipstream.planner.job.toml import round_times
from slipstream.schedules.schedule import OpKind

MAX_BYTES = 2**30
PYTORCH = r"PP:(?P<stage>\d+)(?P<kind>[FIBW])(?P<microbatch>\d+)"
OURS = re.compile(r"([FIBW]) (\d+\.\d+)")
KINDS = ("F", "I", "W", "B")
"""Kinds of op whose times a trace may have."""
GPU = "gpu_user_annotation"
"""Category in which the PyTorch profiler repeats named ranges with the GPU's times."""


class ProfilerTraceError(ValueError):
    """Error of one line for a trace from which no stage times can be read."""


class _Event(msgspec.Struct, frozen=True, gc=False):
    ph: str = ""
    name: Any = ""
    cat: str = ""
    dur: float = 0.0
    args: dict[str, Any] | None = None


class _ChromeTrace(msgspec.Struct, frozen=True):
    traceEvents: list[_Event]  # noqa: N815 - its name in the file


_LIST = msgspec.json.Decoder(list[_Event])
_OBJECT = msgspec.json.Decoder(_ChromeTrace)


class OpRange(NamedTuple):
    """One run of an op of a micro-batch, as a trace records it."""

    kind: OpKind
    stage: int
    microbatch: str | None
    seconds: float


def read_ranges(path: Path, pattern: str | None = None) -> list[OpRange]:
    """Read the runs of ops from a trace file, `.json` or `.json.gz`.

    `pattern` is a regular expression for the whole name of an op, with groups `kind` (F, I, W or
    B), `stage` and optionally `microbatch`; None: names such as `PP:2F0`. Slipstream's own names
    are read, too. If the trace has the GPU's times of some ops, only these are read. Raises
    ProfilerTraceError if the file cannot be read, has no such op, or `pattern` is invalid or finds
    an unknown kind or no stage.
    """
    name_pattern = _compile_pattern(pattern or PYTORCH)
    events = _read_events(path)
    # The CPU's times of launching kernels say little if the GPU's are there.
    on_gpu = any(event.cat == GPU and _op_range(event, name_pattern) for event in events)
    candidates = [
        _op_range(event, name_pattern)
        for event in events
        if event.ph == "X" and event.dur > 0 and (not on_gpu or event.cat == GPU)
    ]
    ranges = [candidate for candidate in candidates if candidate is not None]
    if not ranges:
        raise ProfilerTraceError(
            f"{path}: no op of a micro-batch among its {len(events)} events; names such as PP:2F0 "
            "are known, others need --pattern"
        )
    return ranges


def stage_times(
    ranges: Iterable[OpRange], source: str
) -> tuple[dict[str, list[float]], int | None, bool]:
    """Compute the times of each stage from the runs of ops in a trace.

    The result is (times, number of micro-batches, whether backwards are whole). Times are median
    seconds per stage, by key of `[time]`, rounded to one step. The first run of each kind of op at
    a stage is a warm-up, and left out if there are others. The number of micro-batches is None if
    ops' names lack it. If the trace has no W, half of each whole backward counts as I and half as
    W. `source` names the trace in errors. Raises ProfilerTraceError if a stage lacks F, or W or a
    whole backward; without I, its time is 0.
    """
    seconds: dict[tuple[OpKind, int], list[float]] = defaultdict(list)
    microbatches: dict[int, set[str]] = defaultdict(set)
    for op_range in ranges:
        seconds[op_range.kind, op_range.stage].append(op_range.seconds)
        if op_range.microbatch is not None:
            microbatches[op_range.stage].add(op_range.microbatch)
    stages = 1 + max(stage for _, stage in seconds)
    median = {key: statistics.median(values[1:] or values) for key, values in seconds.items()}
    # Without any W, the backward was not split.
    whole = not any(kind is OpKind.W for kind, _ in median)
    for stage in range(stages):
        for kind in (OpKind.F, OpKind.B if whole else OpKind.W):
            if (kind, stage) not in median:
                raise ProfilerTraceError(
                    f"{source}: no {kind} of stage {stage}, but ops of stage {stages - 1}; give "
                    "the traces of all ranks"
                )
    forward = [median[OpKind.F, stage] for stage in range(stages)]
    if whole:
        backward_input = [median[OpKind.B, stage] / 2 for stage in range(stages)]
        backward_weight = list(backward_input)
    else:
        backward_input = [median.get((OpKind.I, stage), 0.0) for stage in range(stages)]
        backward_weight = [median[OpKind.W, stage] for stage in range(stages)]
    counts = {len(names) for names in microbatches.values()}
    # All times are rounded to one step, so that ticks stay coarse.
    values = round_times([*forward, *backward_input, *backward_weight])
    times = {
        "forward": values[:stages],
        "backward_input": values[stages : 2 * stages],
        "backward_weight": values[2 * stages :],
    }
    return times, max(counts) if counts else None, whole


def job_tables(
    name: str,
    times: Mapping[str, Sequence[float]],
    *,
    pipelines: int,
    microbatches: int,
    transfer: float,
) -> dict[str, Any]:
    """Return the tables of a job file with one stage per column.

    `times` has the seconds of all stages by key of `[time]`, such as `forward`; `transfer` is in
    seconds.
    """
    return {
        "name": name,
        "pipelines": pipelines,
        "stages": len(times["forward"]),
        "microbatches": microbatches,
        "time": {**{key: list(values) for key, values in times.items()}, "transfer": transfer},
    }


def _read_events(path: Path) -> list[_Event]:
    """Read the events of a trace file.

    Raises ProfilerTraceError if it cannot be read, is too large, or is no Chrome trace.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ProfilerTraceError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if len(data) > MAX_BYTES:
        raise ProfilerTraceError(f"{path}: more than {MAX_BYTES} bytes")
    try:
        if data.lstrip()[:1] == b"[":
            return _LIST.decode(data)
        return _OBJECT.decode(data).traceEvents
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProfilerTraceError(f"{path}: not a Chrome trace: {error}") from None


def _op_range(event: _Event, wanted: re.Pattern[str]) -> OpRange | None:
    """Return the op of an event; None if its name is that of no op.

    Names of ops are as `wanted` says or as in Slipstream's own traces. Raises ProfilerTraceError if
    `wanted` finds an unknown kind or no stage.
    """
    if not isinstance(event.name, str):
        return None
    seconds = event.dur / 1e6
    match = wanted.fullmatch(event.name)
    if match:
        groups = match.groupdict()
        kind, stage = groups["kind"], groups["stage"]
        if kind not in KINDS or not (stage or "").isdecimal():
            raise ProfilerTraceError(
                f"pattern {wanted.pattern!r}: {event.name[:60]!r} is of kind {kind!r} and stage "
                f"{stage!r}; expected one of {', '.join(KINDS)}, and a number"
            )
        return OpRange(OpKind(kind), int(stage), groups.get("microbatch"), seconds)
    # Slipstream's own traces, whatever the pattern.
    own_match = OURS.fullmatch(event.name)
    stage = (event.args or {}).get("stage")
    if own_match and isinstance(stage, int) and 0 <= stage < 2**17:
        return OpRange(OpKind(own_match[1]), stage, own_match[2].partition(".")[2], seconds)
    return None


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of `read_ranges`. Raises ProfilerTraceError if it is invalid."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ProfilerTraceError(
            f"pattern {pattern!r}: not a regular expression: {error}"
        ) from None
    if not {"kind", "stage"} <= set(compiled.groupindex):
        raise ProfilerTraceError(
            f"pattern {pattern!r}: expected groups (?P<kind>[FIBW]) and (?P<stage>\\d+)"
        )
    return compiled
