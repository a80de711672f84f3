"""Fail on purpose at a given place, and slow a worker down."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

import torch

from slipstream.runtime.protocol.failure_injection import (
    Action,
    Injection,
    Place,
    Slowdown,
    find_slowdown_factor,
)
from slipstream.runtime.ranks.worker_group import WorkerGroup
from slipstream.runtime.replay.recorder import Recorder
from slipstream.schedules.schedule import COMPUTE_KINDS, Op


class InjectedError(RuntimeError):
    """Error that an injection raises, as a bug in the worker would."""


class Injector:
    """Failures that are to happen to one worker on purpose, each once.

    Parameters
    ----------
    injections
        Failures of this worker, each with its index among all failures of the run.
    announce
        Function that reports a failure, by its index, just before it happens, and returns when the
        report is certain to arrive.
    """

    def __init__(
        self, injections: Iterable[tuple[int, Injection]], announce: Callable[[int], None]
    ) -> None:
        self._announce = announce
        self._mine: dict[tuple[int, Place], tuple[int, Action]] = {}
        self.replace_injections(injections)
        self.cut: Callable[[], None] = lambda: None
        """Function that breaks the worker's connections; each generation sets its own."""
        self.flip: Callable[[str, Random], object] = lambda *_: None
        """Function that flips a bit of one kind of state; each generation sets its own."""

    def replace_injections(self, injections: Iterable[tuple[int, Injection]]) -> None:
        """Replace all pending failures, because a new node 0 may have others to inject.

        As at creation, each comes with its index among all failures of the run.
        """
        self._mine = {
            (entry.iteration, entry.place): (index, entry.action) for index, entry in injections
        }

    def fail_if_due(self, iteration: int, place: Place) -> None:
        """Fail as an injection asks, if one is due at `place` in an iteration.

        `place` is an op's number in the program, or a named point. Raises InjectedError or
        torch.OutOfMemoryError; other failures kill, stop or end this process, break its
        connections, or flip a bit.
        """
        if not self._mine:  # the usual case, at every op
            return
        due = self._mine.pop((iteration, place), None)
        if due is None:
            return
        # Announced before, as nothing may come after it.
        index, action = due
        self._announce(index)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "exit":
            os._exit(3)
        elif action == "cut":
            self.cut()
        elif action.startswith("flip "):
            self.flip(action.removeprefix("flip "), Random(index))
        elif action == "memory":
            raise torch.OutOfMemoryError("injected")
        else:
            raise InjectedError(f"injected in iteration {iteration} at {place}")


MATRIX_SIZE = 64
"""Size of the matrices that are multiplied to spend time; a product takes microseconds."""


def create_recorder(
    slowdowns: Sequence[Slowdown], device: torch.device, group: WorkerGroup | None
) -> Recorder:
    """Return this rank's recorder, which on a worker's first rank slows compute ops down.

    `slowdowns` are those of the worker; its other ranks wait for the first.
    """
    # In a worker of several ranks, only the first rank is slowed; the others wait for it.
    first = group is None or group.rank() == 0
    return (
        SlowedRecorder(slowdowns, device, sleeps=group is None)
        if slowdowns and first
        else Recorder(device)
    )


class SlowedRecorder(Recorder):
    """Recorder that also makes each compute op take longer, by the factor of its iteration.

    With `sleeps`, the time that the thread sleeps in an op is prolonged as well.
    """

    def __init__(
        self, slowdowns: Sequence[Slowdown], device: torch.device, *, sleeps: bool = True
    ) -> None:
        super().__init__(device)
        self._slowdowns = slowdowns
        self._device = device
        self._sleeps = sleeps

    @contextmanager
    def record_op(self, op: Op) -> Iterator[None]:
        """Record the time within the context as that of `op`, and prolong it."""
        factor = (
            find_slowdown_factor(self._slowdowns, self._iteration)
            if op.kind in COMPUTE_KINDS
            else 1.0
        )
        with super().record_op(op), prolong_block(factor, self._device, sleeps=self._sleeps):
            yield


@contextmanager
def prolong_block(factor: float, device: torch.device, *, sleeps: bool = True) -> Iterator[None]:
    """Make the code within the context take `factor` times as long, by computing more.

    With `sleeps`, the time that this thread sleeps is prolonged as well, by sleeping, if it is
    longer than the time that it computes.
    """
    if factor == 1.0:
        yield
        return
    # Time the code alone, without what was queued on the device before.
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.current_stream(device).synchronize()
    start, start_computed = time.perf_counter(), time.thread_time()
    yield
    # Kernels run after the call that starts them has returned, so a GPU's compute is all the time.
    if on_gpu:
        torch.cuda.current_stream(device).synchronize()
        seconds = computed = time.perf_counter() - start
    else:
        computed = time.thread_time() - start_computed
        seconds = time.perf_counter() - start
    _compute_for((factor - 1) * computed, device)
    # Otherwise the remaining time was not sleep: other threads had the core.
    if sleeps and seconds > 2 * computed:
        time.sleep((factor - 1) * (seconds - computed))


def _compute_for(seconds: float, device: torch.device) -> None:
    # Compute, not sleep: a slow worker also takes the cores or the device from others.
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    end = clock() + seconds
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device)
    while clock() < end:
        torch.mm(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
