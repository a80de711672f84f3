"""Run work in the background: in a thread and, on a GPU, on a stream."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import cache

import torch

from slipstream.runtime.errors import first_line
from slipstream.runtime.replay.python_exit import start_thread

Work = Callable[[], None]


@cache
def get_stream_for(device: torch.device, purpose: str) -> torch.cuda.Stream:  # noqa: ARG001
    """Return the CUDA stream that this process uses on a GPU for one purpose."""
    # Torch hands out 32 streams in turn. If a component took a new one in each generation, it would
    # eventually get a stream in which another component waits.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class BackgroundQueue:
    """Queue of functions that run one after another, while the owner's thread goes on.

    Parameters
    ----------
    name
        Name of the thread, which exists only while there is work, and of the CUDA stream. Queues of
        one name share the stream.
    enqueues
        True if work for a GPU only enqueues kernels. Then the queue needs no thread, and `wait`
        does not block the host.
    """

    def __init__(self, device: torch.device, name: str, *, enqueues: bool = False) -> None:
        self._device = device
        self._name = name
        self._stream = get_stream_for(device, name) if device.type == "cuda" else None
        self._enqueues = enqueues and self._stream is not None
        self._pending: deque[
            tuple[Work, torch.cuda.Event | None, Callable[[BaseException], None]]
        ] = deque()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # Between the moment when the thread finds the queue empty and its end.
        self._lock = threading.Lock()

    @property
    def thread_ident(self) -> int | None:
        """Identifier of the thread that runs the work (`threading.get_ident`); None while idle."""
        thread = self._thread
        return None if thread is None else thread.ident

    def submit(
        self, work: Work, on_failure: Callable[[BaseException], None] = lambda _: None
    ) -> None:
        """Queue work to run after earlier work, and after kernels that were launched before.

        Raises the error of earlier work, without queueing this one; or, if work only enqueues
        kernels, the error of this one. `on_failure` is called if queued work fails or is discarded.
        """
        if self._error is not None:
            self.wait()
        # The work may read what the current stream still computes.
        ready = (
            None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
        )
        if self._enqueues:
            self._run_work(work, ready)
            return
        with self._lock:
            self._pending.append((work, ready, on_failure))
            # A thread ends when the queue is empty, so that an idle queue costs none.
            if self._thread is None:
                self._thread = start_thread(self._name, self._run)

    def wait(self) -> None:
        """Wait until all work is done, and raise the error of any that failed.

        What was queued behind failed work is discarded. If work only enqueues kernels, the current
        stream waits instead of the host.
        """
        with self._lock:  # another thread may be starting it
            thread = self._thread
        if thread is not None:
            thread.join()
        if self._enqueues and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        # Each error is raised once, then the queue is usable again.
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this frame

    def discard_pending(self) -> None:
        """Discard waiting work, and wait for the running work, whose error is not raised."""
        self._drop_pending(RuntimeError("it was discarded before it began"))
        with contextlib.suppress(Exception):
            self.wait()

    def _drop_pending(self, reason: BaseException) -> None:
        with self._lock:
            dropped, self._pending = self._pending, deque()
        for _, _, on_failure in dropped:
            on_failure(reason)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._thread = None
                    return
                work, ready, on_failure = self._pending.popleft()
            try:
                self._run_work(work, ready)
                # Work is done only when the device has executed it: `wait` joins this thread.
                if self._stream is not None:
                    self._stream.synchronize()
            except BaseException as error:
                # Later work may depend on what has failed.
                self._error = error
                on_failure(error)
                self._drop_pending(RuntimeError(f"earlier work failed: {first_line(error)}"))
            del work, on_failure

    def _run_work(self, work: Work, ready: torch.cuda.Event | None) -> None:
        if self._stream is None or ready is None:
            work()
            return
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            work()
