"""A recorder of a worker that is slow on purpose (`runtime.protocol.failure_injection.Slowdown`).

Each compute op is made longer where it is timed: after it, the worker computes for as long as the op has computed,
times what is more than 1 of the factor. Ops that sleep for most of their time, as in benchmarks, sleep longer, too.

Of a worker that is a group of processes, the first is slow, and the others wait for it within their ops. Were all of
them slow, and took what they wait for each other for work of theirs, each op would multiply by the factor by how much
one is behind another: by a factor of 20, a millisecond becomes minutes within four ops.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from slipstream.runtime.model.layers.worker_group import WorkerGroup
from slipstream.runtime.protocol.failure_injection import Slowdown, factor_at
from slipstream.runtime.replay.recorder import Recorder
from slipstream.schedules.schedule import COMPUTE_KINDS, Op

SIZE = 64
"""Of the matrices that are multiplied to spend time: a product takes microseconds."""


def recorder_for(slowdowns: Sequence[Slowdown], device: torch.device, group: WorkerGroup | None) -> Recorder:
    """The recorder of a worker with these slowdowns, or of one of its processes, where it is a `group` of them."""
    first = group is None or group.rank() == 0
    return SlowedRecorder(slowdowns, device, sleeps=group is None) if slowdowns and first else Recorder(device)


class SlowedRecorder(Recorder):
    """Makes ops take longer, and takes their times. `sleeps`: what they sleep is work of theirs, too."""

    def __init__(self, slowdowns: Sequence[Slowdown], device: torch.device, *, sleeps: bool = True) -> None:
        super().__init__(device)
        self._slowdowns = slowdowns
        self._device = device
        self._sleeps = sleeps

    @contextmanager
    def timing(self, op: Op) -> Iterator[None]:
        """Record what is done in here, and what makes it longer."""
        factor = factor_at(self._slowdowns, self._iteration) if op.kind in COMPUTE_KINDS else 1.0
        with super().timing(op), lasting(factor, self._device, sleeps=self._sleeps):
            yield


@contextmanager
def lasting(factor: float, device: torch.device, *, sleeps: bool = True) -> Iterator[None]:
    """What is done in here takes `factor` times as long: a GPU computes longer, a thread computes longer, and where it
    `sleeps`, it sleeps longer."""
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
    _compute((factor - 1) * computed, device)
    if sleeps and took > 2 * computed:  # else what it did not compute was no sleep: others had the core
        time.sleep((factor - 1) * (took - computed))


def _compute(seconds: float, device: torch.device) -> None:
    """Multiply matrices for so long: seconds of this thread, or of a GPU."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    end = clock() + seconds
    one = torch.ones(SIZE, SIZE, device=device)
    while clock() < end:
        torch.mm(one, one)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
