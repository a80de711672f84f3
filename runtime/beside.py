"""Work beside what a thread computes, one after the other: in a thread of its own, and on a GPU on a stream of its own.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import torch

from slipstream.runtime.device import own_stream

Work = Callable[[], None]


class Beside:
    """Such work of one owner, who waits for all of it.

    Parameters
    ----------
    name
        Of the thread, which is there only while there is work, and of the stream, which all of a name share.
    enqueues
        Whether work on a GPU only gives it what to do. Then it needs no thread, and `wait` does not hold up the host.
    """

    def __init__(self, device: torch.device, name: str, *, enqueues: bool = False) -> None:
        self._device = device
        self._name = name
        self._stream = own_stream(device, name) if device.type == "cuda" else None
        self._enqueues = enqueues and self._stream is not None
        self._waiting: deque[tuple[Work, torch.cuda.Event | None]] = deque()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        """Either a thread sees what waits, or another one is started for it."""

    @property
    def thread(self) -> int | None:
        """The ident of the thread that is at work."""
        thread = self._thread
        return None if thread is None else thread.ident

    def begin(self, work: Work) -> None:
        """After all that was begun before, and after what the device has been given to compute until now. Raises what
        earlier work has raised."""
        if self._error is not None:
            self.wait()
        ready = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
        if self._enqueues:
            self._do(work, ready)
            return
        with self._lock:
            self._waiting.append((work, ready))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
                self._thread.start()

    def wait(self) -> None:
        """Until all is done, or, where it only enqueues, until then on the device. Raises what it raised."""
        thread = self._thread
        if thread is not None:
            thread.join()
        if self._enqueues and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this frame

    def drop(self) -> None:
        """Do not begin what has not been begun; returns when nothing is done any more, however that has ended."""
        with self._lock:
            self._waiting.clear()
        with contextlib.suppress(Exception):
            self.wait()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                work, ready = self._waiting.popleft()
            try:
                self._do(work, ready)
                if self._stream is not None:
                    self._stream.synchronize()
            except BaseException as error:
                with self._lock:
                    self._error = error
                    self._waiting.clear()
            del work

    def _do(self, work: Work, ready: torch.cuda.Event | None) -> None:
        if self._stream is None or ready is None:
            work()
            return
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            work()
