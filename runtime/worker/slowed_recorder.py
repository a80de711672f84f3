"""Record ops of a worker that is slow on purpose (`runtime.protocol.failure_injection.Slowdown`).

Each compute op is prolonged where it is timed: after an op with compute time t, the worker computes for another (factor
- 1) * t. Ops that sleep for most of their time, as in benchmarks, sleep longer, too.

If a worker is a group of processes, only the first is slow, and the others wait for it within their ops. If all of them
were slow and counted their waits for each other as work, each op would multiply the delay between them by the factor:
with a factor of 20, a millisecond becomes minutes within four ops.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from slipstream.runtime.protocol.failure_injection import Slowdown, find_slowdown_factor
from slipstream.runtime.ranks.worker_group import WorkerGroup
from slipstream.runtime.replay.recorder import Recorder
from slipstream.schedules.schedule import COMPUTE_KINDS, Op

MATRIX_SIZE = 64
"""Size of the matrices that are multiplied to spend time. A product takes microseconds."""


def create_recorder(slowdowns: Sequence[Slowdown], device: torch.device, group: WorkerGroup | None) -> Recorder:
    """Return the recorder of a worker with these slowdowns. Of a `group` of processes, only the first one is slow;
    None: the worker is one process."""
    first = group is None or group.rank() == 0
    return SlowedRecorder(slowdowns, device, sleeps=group is None) if slowdowns and first else Recorder(device)


class SlowedRecorder(Recorder):
    """Recorder that makes compute ops take longer, and records their times. With `sleeps`, the time that an op sleeps
    is multiplied, too, and not only its compute."""

    def __init__(self, slowdowns: Sequence[Slowdown], device: torch.device, *, sleeps: bool = True) -> None:
        super().__init__(device)
        self._slowdowns = slowdowns
        self._device = device
        self._sleeps = sleeps

    @contextmanager
    def record_op(self, op: Op) -> Iterator[None]:
        """Record the time spent within the context as the duration of `op`. The context of a compute op is prolonged by
        the present slowdown's factor."""
        factor = find_slowdown_factor(self._slowdowns, self._iteration) if op.kind in COMPUTE_KINDS else 1.0
        with super().record_op(op), prolong_block(factor, self._device, sleeps=self._sleeps):
            yield


@contextmanager
def prolong_block(factor: float, device: torch.device, *, sleeps: bool = True) -> Iterator[None]:
    """Make what runs within the context take `factor` times as long, by more compute on the GPU or in this thread. With
    `sleeps`, the time that this thread slept is multiplied, too."""
    if factor == 1.0:
        yield
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.current_stream(device).synchronize()
    began, computed = time.perf_counter(), time.thread_time()
    yield
    if on_gpu:
        torch.cuda.current_stream(device).synchronize()
        took = computed = time.perf_counter() - began
    else:
        computed = time.thread_time() - computed
        took = time.perf_counter() - began
    _compute_for((factor - 1) * computed, device)
    if sleeps and took > 2 * computed:  # otherwise the remaining time was not sleep: other threads had the core
        time.sleep((factor - 1) * (took - computed))


def _compute_for(seconds: float, device: torch.device) -> None:
    """Multiply matrices for a number of seconds, of this thread or of a GPU."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    end = clock() + seconds
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device)
    while clock() < end:
        torch.mm(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
