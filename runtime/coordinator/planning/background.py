"""Run planning in a forked process where that is safe and worth it.

For a large job, a thread would take turns with the event loop and delay it: a plan for 1,000
workers takes half a second. A forked process inherits all that it needs, such as the job and its
tables, without a copy being sent.
"""

import asyncio
import copyreg
import gc
import io
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar, cast

from slipstream.runtime.errors import first_line
from slipstream.runtime.processes.process_attributes import (
    name_process,
    request_parent_death_signal,
)
from slipstream.runtime.processes.stop_signals import WARNING_SIGNALS
from slipstream.schedules.codec import decode, encode
from slipstream.schedules.schedule import Schedule

T = TypeVar("T")
DoneCallback = Callable[[T | BaseException], None]

MAX_SMALL_JOB_WORKERS = 64
"""Largest job, in workers, for which a thread makes plans that workers wait for."""
AWAITED_TIMEOUT_SECONDS = 30.0
"""Time that a process has for an awaited plan; then a thread makes the plan."""
OTHER_TIMEOUT_SECONDS = 900.0
"""Time that a process has for an unawaited plan; then a thread makes the plan."""
NICENESS = 10
"""Niceness of planning processes for which no worker waits: training comes first."""


class BackgroundRunner(Protocol):
    """Interface of functions that run long work without blocking the event loop."""

    def __call__(
        self, work: Callable[[], T], done: DoneCallback[T], *, awaited: bool = True
    ) -> None:
        """Run `work`, then call `done` on the event loop with its result or its exception.

        If no worker waits for the result, `awaited` is False, and `work` may have low priority.
        """


class PlannerDiedError(RuntimeError):
    """Error raised when a forked process has ended without an answer."""


def run_in_thread(
    work: Callable[[], T],
    done: DoneCallback[T],
    *,
    awaited: bool = True,  # noqa: ARG001
) -> None:
    """Run `work` in a thread, then call `done` on the event loop with its outcome.

    `work` must change no state that other threads use. `awaited` has no effect here. Once the loop
    is closed, `done` is not called.
    """
    loop = asyncio.get_running_loop()

    def run() -> None:
        answer = capture_result(work)
        with suppress(RuntimeError):  # the run is over, and the loop closed
            loop.call_soon_threadsafe(done, answer)

    # A daemon, unlike the threads of asyncio.to_thread: a run that ends does not wait for it.
    threading.Thread(target=run, daemon=True, name="planning").start()


def run_in_process(work: Callable[[], T], done: DoneCallback[T], *, awaited: bool = True) -> None:
    """Run `work` in a forked process, then call `done` with its outcome.

    `done` is called on the event loop. If no worker waits for the result (`awaited` is False), the
    process has low priority and a longer time limit. The process is killed if the calling thread
    ends. If no process can be forked, or it exceeds its time, a thread does the work. If it dies,
    the outcome is PlannerDiedError; an outcome that cannot be pickled becomes a RuntimeError.
    """
    try:
        ours, theirs = os.pipe()
        try:
            process = os.fork()
        except OSError:
            os.close(ours)
            os.close(theirs)
            raise
    except OSError:  # no memory, process or descriptor is left for a fork
        run_in_thread(work, done)
        return
    if not process:
        _run_child(theirs, work, awaited=awaited)
    # With the writing end closed here, reading ends when the process does.
    os.close(theirs)
    timeout_seconds = AWAITED_TIMEOUT_SECONDS if awaited else OTHER_TIMEOUT_SECONDS
    run_in_thread(lambda: _read_answer(process, ours, work, timeout_seconds), done)


def choose_background(workers: int) -> BackgroundRunner:
    """Return the function that runs planning for a job of this many workers."""
    # On other systems, libraries may not be usable in a forked process.
    if sys.platform != "linux":
        return run_in_thread
    # Schedules for few workers are planned within milliseconds. To fork this process and to copy
    # its memory on write would take longer, so only plans that no worker waits for are made in one.
    return run_in_process if workers > MAX_SMALL_JOB_WORKERS else _run_in_thread_if_awaited


def _run_in_thread_if_awaited(
    work: Callable[[], T], done: DoneCallback[T], *, awaited: bool = True
) -> None:
    (run_in_thread if awaited else run_in_process)(work, done, awaited=awaited)


def capture_result(work: Callable[[], T]) -> T | BaseException:
    """Return the result of `work`, or the exception that it raises."""
    try:
        return work()
    except BaseException as error:
        return error


def _read_answer(process: int, pipe: int, work: Callable[[], T], seconds: float) -> T:
    # A lock that another thread held at the fork is never released in the process, which then waits
    # forever: if no answer arrives within `seconds`, the work is done in this thread.
    with open(pipe, "rb") as file:
        readable = select.poll()  # unlike select.select, also of descriptors above 1023
        readable.register(file, select.POLLIN)
        if not readable.poll(1000 * seconds):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return work()
        data = file.read()
    # The process may have been killed, as for lack of memory.
    _, status = os.waitpid(process, 0)
    if not data or status:
        raise PlannerDiedError(
            "the planning process ended with "
            + (f"exit status {status >> 8}" if status >> 8 else f"signal {status}")
        )
    answer = pickle.loads(data)  # noqa: S301, as this process's own child has written it
    if isinstance(answer, BaseException):
        raise answer
    return cast(T, answer)


def _run_child(pipe: int, work: Callable[[], object], *, awaited: bool) -> None:
    """Do the work in the forked process, write the pickled outcome to `pipe`, and exit."""
    status = 1
    try:
        # End with the parent, but leave signals and connections to it.
        request_parent_death_signal(signal.SIGKILL)
        name_process("planner")
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)  # keep Ctrl-C to the parent
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in WARNING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # Close all else, or a connection that the parent closes would stay open.
        os.dup2(pipe, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        if not awaited:
            os.nice(NICENESS)
        gc.disable()
        data = _pickle_answer(capture_result(work))
        with open(3, "wb") as file:
            file.write(data)
        status = 0
    finally:
        os._exit(status)


def _pickle_answer(answer: object) -> bytes:
    """Return an answer pickled; one that cannot be pickled becomes a RuntimeError."""
    try:
        # Schedules travel in the form of their files.
        packed = io.BytesIO()
        pickler = pickle.Pickler(packed, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = copyreg.dispatch_table | {
            Schedule: lambda schedule: (decode, (encode(schedule),))
        }
        pickler.dump(answer)
        data = packed.getvalue()
        if isinstance(answer, BaseException):
            pickle.loads(data)  # noqa: S301, as not all exceptions come back
        return data
    except Exception as error:
        cause = answer if isinstance(answer, BaseException) else error
        return pickle.dumps(RuntimeError(f"{type(cause).__name__}: {first_line(cause)}"))
