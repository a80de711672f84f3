"""Fail on purpose at a given place, and slow a worker down."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

import torch

from slipstream.runtime.protocol.failure_injection import Action, Injection, Place, Slowdown, find_slowdown_factor
from slipstream.runtime.ranks.worker_group import WorkerGroup
from slipstream.runtime.replay.recorder import Recorder
from slipstream.schedules.schedule import COMPUTE_KINDS, Op


class InjectedError(RuntimeError):
    """Error that a worker raises for an injection whose action is an exception."""


class Injector:
    """Failures to inject into one worker that have not happened yet.

    Parameters
    ----------
    injections
        Failures of this worker, each with its index among all failures of the run.
    announce
        Function that reports a failure, by its index, just before it. It must return only when the
        report is certain to arrive.
    """

    def __init__(self, injections: Iterable[tuple[int, Injection]], announce: Callable[[int], None]) -> None:
        self._announce = announce
        self._mine: dict[tuple[int, Place], tuple[int, Action]] = {}
        self.replace_injections(injections)
        self.cut: Callable[[], None] = lambda: None
        """Function that breaks the worker's connections; to be set by their owner."""
        self.flip: Callable[[str, Random], object] = lambda *_: None
        """Function that flips a random bit of the worker's state of the named kind. To be set by
        its owner."""

    def replace_injections(self, injections: Iterable[tuple[int, Injection]]) -> None:
        """Replace all pending failures, because a new node 0 may have others to inject."""
        self._mine = {(entry.iteration, entry.place): (index, entry.action) for index, entry in injections}

    def fail_if_due(self, iteration: int, place: Place) -> None:
        """Fail as an injection asks, if one is due at this place of an iteration.

        The place is an op's number in the program, or a named point (`Place`). Raises InjectedError
        and torch.OutOfMemoryError; other failures kill, stop or end this process, break its
        connections, or flip a bit.
        """
        if not self._mine:
            return
        due = self._mine.pop((iteration, place), None)
        if due is None:
            return
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
"""Size of the matrices that are multiplied to spend time, in microseconds each."""


def create_recorder(slowdowns: Sequence[Slowdown], device: torch.device, group: WorkerGroup | None) -> Recorder:
    """Return the recorder of a worker with these slowdowns. Of a `group` of processes, only the
    first one is slow; None: the worker is one process."""
    first = group is None or group.rank() == 0
    return SlowedRecorder(slowdowns, device, sleeps=group is None) if slowdowns and first else Recorder(device)


class SlowedRecorder(Recorder):
    """Recorder that makes compute ops take longer, and records their times. With `sleeps`, the time
    that an op sleeps is multiplied, too, and not only its compute."""

    def __init__(self, slowdowns: Sequence[Slowdown], device: torch.device, *, sleeps: bool = True) -> None:
        super().__init__(device)
        self._slowdowns = slowdowns
        self._device = device
        self._sleeps = sleeps

    @contextmanager
    def record_op(self, op: Op) -> Iterator[None]:
        """Record the time within the context as that of `op`, prolonged by the present factor."""
        factor = find_slowdown_factor(self._slowdowns, self._iteration) if op.kind in COMPUTE_KINDS else 1.0
        with super().record_op(op), prolong_block(factor, self._device, sleeps=self._sleeps):
            yield


@contextmanager
def prolong_block(factor: float, device: torch.device, *, sleeps: bool = True) -> Iterator[None]:
    """Make what runs within the context take `factor` times as long, by more compute. The GPU or
    this thread computes. With `sleeps`, the time that this thread slept is multiplied, too."""
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
