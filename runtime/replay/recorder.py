"""When each op of an iteration really ran, on the clock that all workers share."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import msgspec
import torch

from slipstream.schedules.measured_trace import MeasuredOp
from slipstream.schedules.schedule import COMPUTE_KINDS, Op, OpKind

Stamp = float | torch.cuda.Event


class OpTime(msgspec.Struct, frozen=True, array_like=True):
    """How long the ops of a kind on a slice took in an iteration."""

    kind: OpKind
    slice: int
    number: int
    """Of ops."""
    seconds: float
    """The median of what each took, divided by how many times as long its sample is to take (`costs`)."""
    misfit: float | None = None
    """The root of the mean square of (seconds of that / their median - 1): how far costs are from what is measured.
    None where no costs are known."""


class Recorder:
    """Takes the times of ops: by the host's clock on a CPU, by events in the stream on a GPU, which runs behind it.

    An iteration must not be reported before its step is done, so the host waits once an iteration, for the end of the
    last O. Only where ops are traced does it wait once more, to read both clocks at one moment. What ops take is
    measured always, as peers are compared by it.

    `offset_seconds` is what this machine's perf_counter lacks to the shared clock.
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
        """How many times as long as usual an op of an iteration takes, by what its sample costs; above 0."""

    def begin(self, iteration: int, *, traced: bool) -> None:
        """An iteration begins, or begins anew; nothing is known of it. `traced`: whether `ops` will be asked for."""
        self._iteration, self._traced = iteration, traced
        self._start = self._end = None
        self._ops = []
        if traced and self._on_gpu:
            # Anew each iteration: distances between events lose digits.
            event = _event()
            event.synchronize()
            self._base = event, perf_counter()

    def begin_again(self) -> None:
        """The iteration is run once more."""
        self.begin(self._iteration, traced=self._traced)

    @contextmanager
    def timing(self, op: Op) -> Iterator[None]:
        """Record what is done in here as the running of `op`."""
        start = self._stamp()
        self._start = self._start or start
        yield
        self._end = self._stamp()
        self._ops.append((op, start, self._end))

    def window_seconds(self) -> float:
        """From the start of the first op to the end of the last O; waits until a GPU is there."""
        assert self._start is not None and self._end is not None, "an iteration has an op, and ends with an O"
        if not isinstance(self._end, float):
            self._end.synchronize()
        return _between(self._start, self._end)

    def ops(self) -> tuple[MeasuredOp, ...]:
        """The ops of a traced iteration, in shared seconds; call `window_seconds` before."""
        return tuple(MeasuredOp(op.worker, op.kind, op.slice, op.pipeline, op.microbatch, self._seconds(start),
                                self._seconds(end)) for op, start, end in self._ops if self._traced)

    def times(self) -> tuple[OpTime, ...]:
        """What each kind of computing takes on each slice; call `window_seconds` before."""
        found: dict[tuple[OpKind, int], list[tuple[Op, float]]] = defaultdict(list)
        for op, start, end in self._ops:
            if op.kind in COMPUTE_KINDS:
                assert op.slice is not None
                found[op.kind, op.slice].append((op, _between(start, end)))
        return tuple(self._time(kind, slice_, *zip(*ops, strict=True)) for (kind, slice_), ops in found.items())

    def _time(self, kind: OpKind, slice_: int, ops: Sequence[Op], seconds: Sequence[float]) -> OpTime:
        if self.costs is None:
            return OpTime(kind, slice_, len(ops), statistics.median(seconds))
        usual = [one / self.costs(op, self._iteration) for op, one in zip(ops, seconds, strict=True)]
        return OpTime(kind, slice_, len(ops), statistics.median(usual), _misfit(usual))

    def _stamp(self) -> Stamp:
        return _event() if self._on_gpu else perf_counter()

    def _seconds(self, stamp: Stamp) -> float:
        if isinstance(stamp, float):
            return stamp + self.offset_seconds
        event, seconds = self._base
        assert event is not None
        return seconds + float(event.elapsed_time(stamp)) / 1e3 + self.offset_seconds


def _misfit(seconds: Sequence[float]) -> float:
    middle = statistics.median(seconds)
    return math.sqrt(statistics.fmean((one / middle - 1) ** 2 for one in seconds)) if middle > 0 else 0.0


def _between(start: Stamp, end: Stamp) -> float:
    """Seconds; on a GPU once it is there."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return float(start.elapsed_time(end)) / 1e3


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
