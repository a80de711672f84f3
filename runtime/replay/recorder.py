"""When each op of an iteration really ran, on the clock that all workers share."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

from schedules.measured_trace import MeasuredOp
from schedules.schedule import Op

Stamp = float | torch.cuda.Event


class Recorder:
    """Takes the times of ops: by the host's clock on a CPU, by events in the stream on a GPU, which runs behind it.

    `offset_seconds` is what this machine's perf_counter lacks to the shared clock.
    """

    def __init__(self, device: torch.device, offset_seconds: float) -> None:
        self._on_gpu = device.type == "cuda"
        self._offset_seconds = offset_seconds
        self._ops: list[tuple[Op, Stamp, Stamp]] = []
        self._base = self._read_base()

    @contextmanager
    def timing(self, op: Op) -> Iterator[None]:
        """Record what is done in here as the running of `op`."""
        start = self._stamp()
        yield
        self._ops.append((op, start, self._stamp()))

    def take(self) -> list[MeasuredOp]:
        """The ops recorded since the last call, in shared seconds; on a GPU, waits until they have run."""
        if self._on_gpu:
            torch.cuda.synchronize()
        ops = [MeasuredOp(op.worker, op.kind, op.stage, op.pipeline, op.microbatch, self._seconds(start),
                          self._seconds(end)) for op, start, end in self._ops]
        self._ops = []
        self._base = self._read_base()
        return ops

    def _stamp(self) -> Stamp:
        return _event() if self._on_gpu else perf_counter()

    def _seconds(self, stamp: Stamp) -> float:
        if isinstance(stamp, float):
            return stamp + self._offset_seconds
        event, seconds = self._base
        assert event is not None
        return seconds + float(event.elapsed_time(stamp)) / 1e3 + self._offset_seconds

    def _read_base(self) -> tuple[torch.cuda.Event | None, float]:
        """An event and the host's time of it. Read anew each iteration: distances between events lose digits."""
        if not self._on_gpu:
            return None, 0.0
        event = _event()
        event.synchronize()
        return event, perf_counter()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
