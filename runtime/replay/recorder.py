"""Record when each op of an iteration ran, on the clock that all workers share."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch

from slipstream.schedules.measured_trace import MeasuredOp, OpTime
from slipstream.schedules.schedule import COMPUTE_KINDS, Op, OpKind

Stamp = float | torch.cuda.Event


class Recorder:
    """Recorder of the times of ops, by the host's clock or a GPU's events.

    An iteration must not be reported before its step is done, so the host waits once an iteration,
    for the end of the last O. If ops are traced, the host waits once more, to read both clocks at
    the same moment. Durations of ops are always measured, because peers are compared by them.
    `offset_seconds` is added to this machine's perf_counter to get the shared clock.
    """

    def __init__(self, device: torch.device, offset_seconds: float = 0.0) -> None:
        self._on_gpu = device.type == "cuda"
        self.offset_seconds = offset_seconds
        self._iteration, self._traced = 0, False
        self._start: Stamp | None = None
        self._end: Stamp | None = None
        self._ops: list[tuple[Op, Stamp, Stamp]] = []
        self._base: tuple[torch.cuda.Event | None, float] = None, 0.0
        self.costs: Callable[[Op, int], float] | None = None
        """Function that returns an op's expected duration in an iteration, relative to the usual
        one. It is above 0, and follows from the cost of the op's sample."""

    def start_iteration(self, iteration: int, *, traced: bool) -> None:
        """Start an iteration, perhaps again, and discard all earlier times. If `traced`, record
        what `traced_ops` needs."""
        self._iteration, self._traced = iteration, traced
        self._start = self._end = None
        self._ops = []
        if traced and self._on_gpu:
            # New in each iteration, because long distances between events lose precision.
            event = _record_event()
            event.synchronize()
            self._base = event, perf_counter()

    def restart_iteration(self) -> None:
        """Start the present iteration once more, and discard its times."""
        self.start_iteration(self._iteration, traced=self._traced)

    @contextmanager
    def record_op(self, op: Op) -> Iterator[None]:
        """Record the time spent within the context as the duration of `op`."""
        start = self._take_stamp()
        self._start = self._start or start
        yield
        self._end = self._take_stamp()
        self._ops.append((op, start, self._end))

    def window_seconds(self) -> float:
        """Return the seconds from the first op's start to the last O's end. On a GPU, waits for
        that."""
        assert self._start is not None and self._end is not None, "an iteration has an op, and ends with an O"
        if not isinstance(self._end, float):
            self._end.synchronize()
        return _elapsed_seconds(self._start, self._end)

    def traced_ops(self) -> tuple[MeasuredOp, ...]:
        """Return start and end of each op, in seconds of the shared clock. Empty if not traced.
        Call `window_seconds` before."""
        return tuple(MeasuredOp(op.worker, op.kind, op.slice, op.pipeline, op.microbatch, self._shared_seconds(start),
                                self._shared_seconds(end)) for op, start, end in self._ops if self._traced)

    def op_times(self) -> tuple[OpTime, ...]:
        """Return the median seconds of each kind of op (F, B, I, W) and slice.

        Call `window_seconds` before. If `costs` (the function for the relative durations of ops by
        their samples) is set, durations are first divided by its results.
        """
        by_kind: dict[tuple[OpKind, int], list[tuple[Op, float]]] = defaultdict(list)
        for op, start, end in self._ops:
            if op.kind in COMPUTE_KINDS:
                assert op.slice is not None
                by_kind[op.kind, op.slice].append((op, _elapsed_seconds(start, end)))
        return tuple(self._op_time(kind, slice_, *zip(*ops, strict=True)) for (kind, slice_), ops in by_kind.items())

    def _op_time(self, kind: OpKind, slice_: int, ops: Sequence[Op], seconds: Sequence[float]) -> OpTime:
        if self.costs is None:
            return OpTime(kind, slice_, len(ops), statistics.median(seconds))
        usual = [duration / self.costs(op, self._iteration) for op, duration in zip(ops, seconds, strict=True)]
        return OpTime(kind, slice_, len(ops), statistics.median(usual), _relative_deviation(usual))

    def _take_stamp(self) -> Stamp:
        return _record_event() if self._on_gpu else perf_counter()

    def _shared_seconds(self, stamp: Stamp) -> float:
        if isinstance(stamp, float):
            return stamp + self.offset_seconds
        event, seconds = self._base
        assert event is not None
        return seconds + float(event.elapsed_time(stamp)) / 1e3 + self.offset_seconds


def _relative_deviation(seconds: Sequence[float]) -> float:
    middle = statistics.median(seconds)
    return math.sqrt(statistics.fmean((duration / middle - 1) ** 2 for duration in seconds)) if middle > 0 else 0.0


def _elapsed_seconds(start: Stamp, end: Stamp) -> float:
    """Return the seconds between two readings of the clock, or events that have passed."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return float(start.elapsed_time(end)) / 1e3


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
