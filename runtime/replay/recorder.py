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

    The shared clock is this machine's perf_counter plus `offset_seconds`. `window_seconds` must be
    called before `traced_ops` and `op_times`, as it waits for a GPU.
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
        """Function of op and iteration; returns the relative cost of the op's sample, above 0."""

    def start_iteration(self, iteration: int, *, traced: bool) -> None:
        """Start to record an iteration, and discard the times of the previous one.

        If `traced`, start and end of each op are kept for `traced_ops`, and on a GPU, this call
        waits for kernels launched before.
        """
        self._iteration, self._traced = iteration, traced
        self._start = self._end = None
        self._ops = []
        if traced and self._on_gpu:
            # Read both clocks at the same moment; in each iteration, because long distances
            # between events lose precision.
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
        """Return the seconds from the first op's start to the last O's end.

        On a GPU, waits for that end.
        """
        assert self._start is not None and self._end is not None, (
            "an iteration has an op, and ends with an O"
        )
        # The host waits once an iteration, as a report must not come before its step is done.
        if not isinstance(self._end, float):
            self._end.synchronize()
        return _elapsed_seconds(self._start, self._end)

    def traced_ops(self) -> tuple[MeasuredOp, ...]:
        """Return each op's start and end in seconds of the shared clock; empty unless traced."""
        if not self._traced:
            return ()
        return tuple(
            MeasuredOp(
                op.worker,
                op.kind,
                op.slice,
                op.pipeline,
                op.microbatch,
                self._shared_seconds(start),
                self._shared_seconds(end),
            )
            for op, start, end in self._ops
        )

    def op_times(self) -> tuple[OpTime, ...]:
        """Return the median seconds of each kind of compute op on each slice.

        If `costs` is set, an op's seconds are first divided by the relative cost of its sample, and
        their relative deviation is returned, too.
        """
        by_kind: dict[tuple[OpKind, int], list[tuple[Op, float]]] = defaultdict(list)
        for op, start, end in self._ops:
            if op.kind in COMPUTE_KINDS:
                assert op.slice is not None
                by_kind[op.kind, op.slice].append((op, _elapsed_seconds(start, end)))
        return tuple(
            self._op_time(kind, slice_, *zip(*ops, strict=True))
            for (kind, slice_), ops in by_kind.items()
        )

    def _op_time(
        self, kind: OpKind, slice_: int, ops: Sequence[Op], seconds: Sequence[float]
    ) -> OpTime:
        if self.costs is None:
            return OpTime(kind, slice_, len(ops), statistics.median(seconds))
        # The durations as if each op had a usual sample.
        usual = [
            duration / self.costs(op, self._iteration)
            for op, duration in zip(ops, seconds, strict=True)
        ]
        return OpTime(kind, slice_, len(ops), statistics.median(usual), _relative_deviation(usual))

    def _take_stamp(self) -> Stamp:
        # A GPU runs an op later than the host issues it, so the host's clock would say nothing.
        return _record_event() if self._on_gpu else perf_counter()

    def _shared_seconds(self, stamp: Stamp) -> float:
        if isinstance(stamp, float):
            return stamp + self.offset_seconds
        # The event and the host's clock were read at the same moment.
        event, seconds = self._base
        assert event is not None
        return seconds + float(event.elapsed_time(stamp)) / 1e3 + self.offset_seconds


def _relative_deviation(seconds: Sequence[float]) -> float:
    # Relative to the median, which counts as the usual duration.
    median = statistics.median(seconds)
    if not median > 0:
        return 0.0
    return math.sqrt(statistics.fmean((duration / median - 1) ** 2 for duration in seconds))


def _elapsed_seconds(start: Stamp, end: Stamp) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return float(start.elapsed_time(end)) / 1e3


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
