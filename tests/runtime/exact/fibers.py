"""Fibers: threads of which one runs at a time, until it waits. So a run is a function of its seed.

`patched` has the runtime wait here where it would wait for threads, sleep, or make threads of its
own.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest

from slipstream.runtime.moving import layer_receiver, layer_sender
from slipstream.runtime.replay import group_cache, group_store, nccl, session, sum_tree, transfers
from slipstream.runtime.state import late_steps
from slipstream.runtime.worker import generation, iteration_reports, order_threads


class Gone(BaseException):
    """The process of this fiber has been killed."""


class Fiber:
    """A thread of a process. It runs while `resume` waits, up to the next `pause`."""

    current: "Fiber | None" = None

    def __init__(self, process, work) -> None:
        self.process, self.over, self.error = process, False, None
        self.ready = lambda: True
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._work = work
        threading.Thread(target=self._run, daemon=True).start()
        process.fibers.append(self)

    def resume(self) -> None:
        """Run on until it waits again, or is over. Raises what it has raised."""
        before, Fiber.current = Fiber.current, self
        self._go.release()
        self._back.acquire()
        Fiber.current = before
        if self.over:
            self.process.fibers.remove(self)
        if self.error is not None:
            raise self.error

    def pause(self, ready) -> None:
        if self.process.killed:
            raise Gone
        self.ready = ready
        self._back.release()
        self._go.acquire()
        if self.process.killed:
            raise Gone

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.process.killed:
                self._work()
        except Gone:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        self._back.release()


def wait_until(ready) -> None:
    """Let others run until something is so; at least once."""
    fiber = Fiber.current
    if fiber is None:  # a thread that a test before this one has left to end by itself
        while not ready():
            time.sleep(0.001)
        return
    fiber.pause(ready)
    while not ready():
        fiber.pause(ready)


def let_others_run(*_) -> None:
    wait_until(lambda: True)


class BackgroundQueue:
    """As `runtime.replay.background_queue.BackgroundQueue`: in a fiber of its own."""

    def __init__(self, *_, **__) -> None:
        self._works, self._fiber, self._error, self.thread = deque(), None, None, None

    def submit(self, work, on_failure=lambda _: None) -> None:
        if self._error is not None:
            self.wait()
        self._works.append((work, on_failure))
        if self._fiber is None:
            self._fiber = Fiber(Fiber.current.process, self._run_work)

    def wait(self) -> None:
        if self._fiber is not None:
            wait_until(lambda: self._fiber is None)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def discard_pending(self) -> None:
        self._drop_pending(RuntimeError("it was discarded before it began"))
        with contextlib.suppress(Exception):
            self.wait()

    def _drop_pending(self, reason) -> None:
        while self._works:
            self._works.popleft()[1](reason)

    def _run_work(self) -> None:
        try:
            while self._works:
                work, on_failure = self._works.popleft()
                try:
                    work()
                except Exception as error:
                    self._error = error
                    on_failure(error)
                    self._drop_pending(RuntimeError("earlier work failed"))
        finally:
            self._fiber = None


class Event:
    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, _=None) -> bool:
        if not self._set:
            wait_until(self.is_set)
        return True


class Queue:
    def __init__(self) -> None:
        self._found = deque()

    def put(self, item) -> None:
        self._found.append(item)

    def get(self, timeout=None):
        if not self._found:
            wait_until(lambda: bool(self._found))
        return self._found.popleft()


class Lock:
    """One that may be held while its owner waits."""

    def __init__(self) -> None:
        self._held = False

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> None:
        if self._held:
            wait_until(lambda: not self._held)
        self._held = True

    def __exit__(self, *_) -> None:
        self._held = False


class Condition:
    """Nobody waits while holding it but by `wait`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_) -> None:
        pass

    def wait(self, *_) -> None:
        let_others_run()

    def notify_all(self) -> None:
        pass


class Acting:
    """The process for which the driver acts, where a thread is begun outside all fibers."""

    process = None


class Thread:
    """As `threading.Thread`."""

    def __init__(self, target, args=(), **_) -> None:
        self._work = lambda: target(*args)

    def start(self) -> None:
        Fiber(Fiber.current.process if Fiber.current is not None else Acting.process, self._work)


def start_thread(_name, function, *arguments) -> None:
    """As `runtime.replay.python_exit.start_thread`."""
    Thread(function, arguments).start()


class Clock:
    """Stands in for the module `time`: only who sleeps spends any."""

    now = 0.0
    perf_counter = staticmethod(time.perf_counter)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        let_others_run()


@contextlib.contextmanager
def patched():
    """The runtime waits by fibers."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for module in (late_steps, sum_tree, session):
            patch.setattr(module, "BackgroundQueue", BackgroundQueue)
        for module in (group_store, session, layer_sender, nccl):
            patch.setattr(module, "time", clock)
        # Each sleep of 2 ms is a round of the world.
        patch.setattr(layer_sender, "ROOM_SECONDS", 2.0)
        patch.setattr(transfers, "threading", SimpleNamespace(Event=Event))
        patch.setattr(
            iteration_reports, "queue", SimpleNamespace(SimpleQueue=Queue, Empty=queue.Empty)
        )
        patch.setattr(nccl, "threading", SimpleNamespace(Event=Event))
        patch.setattr(nccl, "start_thread", start_thread)
        patch.setattr(
            layer_receiver,
            "threading",
            SimpleNamespace(Thread=Thread, Condition=Condition, Lock=contextlib.nullcontext),
        )
        patch.setattr(group_cache, "_close_in_background", lambda _: None)
        patch.setattr(generation, "trim_host_memory", lambda: None)
        patch.setattr(order_threads, "draft_layer_with_retry", lambda *_: None)
        patch.setattr(order_threads, "publish_layer", lambda *_: None)
        yield patch
