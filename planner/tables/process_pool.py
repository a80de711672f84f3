"""Worker processes for long, independent tasks: none is left behind when one dies or the caller gives up.

The standard pools either hang when a process is killed (multiprocessing.Pool) or cannot stop running tasks
(concurrent.futures), and a table build is interrupted in the middle of tasks as a rule.
"""

import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class PoolError(Exception):
    """A worker process died or failed. The message says at which task."""


def run_all(function: Callable[[Task], Result], tasks: Iterable[Task], jobs: int) -> \
        Generator[tuple[Task, Result], None, None]:
    """Results as they come, from up to `jobs` processes; `function` is copied to each once and may keep state there.

    Tasks are started in order. However the iteration ends, all processes end with it; those of a killed caller end
    when they have finished their task. Raises PoolError. Ctrl-C is for the caller alone: the processes ignore it.
    """
    todo = list(tasks)[::-1]
    context = multiprocessing.get_context("spawn")
    lanes: list[_Lane[Task]] = []
    try:
        with _interrupts_ignored():  # the processes inherit it, from their first instant on
            lanes += [_Lane(context, function) for _ in range(min(jobs, len(todo)))]
        for lane in lanes:
            lane.give(todo.pop())
        while busy := {lane.pipe: lane for lane in lanes if lane.busy}:
            for pipe in wait(list(busy)):
                lane = busy[pipe]  # type: ignore[index]
                task, result = lane.take()
                if todo:
                    lane.give(todo.pop())
                yield task, result
    finally:
        for lane in lanes:
            lane.close()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ctrl-C does nothing for the few milliseconds within; only a main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Lane(Generic[Task]):
    """One worker process and what it is doing."""

    def __init__(self, context: multiprocessing.context.SpawnContext, function: Callable[[Any], Any]) -> None:
        self.pipe, other = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(other, function), daemon=True)
        self._process.start()
        other.close()  # the process has the only other end, so that its death ends the pipe
        self._task: list[Task] = []

    @property
    def busy(self) -> bool:
        return bool(self._task)

    def give(self, task: Task) -> None:
        self._task = [task]
        with suppress(OSError):  # it has died, as `take` will find
            self.pipe.send(task)

    def take(self) -> tuple[Task, Any]:
        task = self._task.pop()
        try:
            result, trace = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(1)
            raise PoolError(f"{task}: its process died (exit status {self._process.exitcode}); perhaps it was killed "
                            "for want of memory") from None
        if trace is not None:
            raise PoolError(f"{task}: {trace}")
        return task, result

    def close(self) -> None:
        self.pipe.close()
        self._process.terminate()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """The worker process: one task after the other until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        answer: tuple[Any, str | None]
        try:
            answer = (function(task), None)
        except Exception:
            answer = (None, traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:
            return
