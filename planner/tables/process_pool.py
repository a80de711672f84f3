"""A pool of processes for long, independent tasks. All end when one dies or the caller stops.

The standard pools either hang when a process is killed (multiprocessing.Pool) or cannot stop running tasks
(concurrent.futures). A table build is usually interrupted in the middle of tasks.
"""

import multiprocessing
import os
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
    """A process died or failed. The message names the task."""


def run_all(function: Callable[[Task], Result], tasks: Iterable[Task], jobs: int,
            refusals: tuple[type[Exception], ...] = ()) -> Generator[tuple[Task, Result], None, None]:
    """Pairs (task, result) as they finish, from up to `jobs` processes. Tasks are started in order.

    `function` is copied to each process once, and may keep state there. All processes end when the iteration ends;
    those of a killed caller end when they have finished their task. The processes ignore Ctrl-C, which is for the
    caller. Raises the exceptions in `refusals` as the function raised them, and PoolError for all others.
    """
    pending = list(tasks)[::-1]
    context = multiprocessing.get_context("spawn")
    processes: list[_PoolProcess[Task]] = []
    try:
        with _interrupts_ignored(), _safe_path():  # the processes inherit both, from their first instant on
            processes += [_PoolProcess(context, function, refusals) for _ in range(min(jobs, len(pending)))]
        for process in processes:
            process.start(pending.pop())
        while busy := {process.pipe: process for process in processes if process.busy}:
            for pipe in wait(list(busy)):
                process = busy[pipe]  # type: ignore[index]
                task, result = process.result()
                if pending:
                    process.start(pending.pop())
                yield task, result
    finally:
        for process in processes:
            process.close()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C for the few milliseconds within. Only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Processes that are started within look for no module in the working directory before they know our path."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


class _PoolProcess(Generic[Task]):
    """One process, and the task that it works on."""

    def __init__(self, context: multiprocessing.context.SpawnContext, function: Callable[[Any], Any],
                 refusals: tuple[type[Exception], ...]) -> None:
        self.pipe, other = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(other, function, refusals), daemon=True)
        self._process.start()
        other.close()  # the process has the only other end, so that its death ends the pipe
        self._task: list[Task] = []

    @property
    def busy(self) -> bool:
        return bool(self._task)

    def start(self, task: Task) -> None:
        self._task = [task]
        with suppress(OSError):  # it has died, as `result` will find
            self.pipe.send(task)

    def result(self) -> tuple[Task, Any]:
        task = self._task.pop()
        try:
            result, failure = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(1)
            raise PoolError(f"{task}: its process died (exit status {self._process.exitcode}); perhaps it was killed "
                            "for want of memory") from None
        if isinstance(failure, Exception):
            raise failure
        if failure is not None:
            raise PoolError(f"{task}: {failure}")
        return task, result

    def close(self) -> None:
        self.pipe.close()
        self._process.terminate()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)


def _serve(pipe: Connection, function: Callable[[Any], Any], refusals: tuple[type[Exception], ...]) -> None:
    """The main function of a process: one task after the other until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        answer: tuple[Any, Exception | str | None]
        try:
            answer = (function(task), None)
        except refusals as error:
            answer = (None, error)
        except Exception:
            answer = (None, traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:
            return
