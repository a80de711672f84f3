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
from slipstream.runtime.processes.process_attributes import name_process, request_parent_death_signal
from slipstream.runtime.processes.stop_signals import WARNING_SIGNALS
from slipstream.schedules.codec import decode, encode
from slipstream.schedules.schedule import Schedule

T = TypeVar("T")
DoneCallback = Callable[[T | BaseException], None]

MAX_SMALL_JOB_WORKERS = 64
"""Largest job, in workers, for which awaited plans are made in a thread."""
AWAITED_TIMEOUT_SECONDS, OTHER_TIMEOUT_SECONDS = 30.0, 900.0
"""Time limits of a process for an awaited plan, and for another; then a thread makes it."""
NICENESS = 10
"""Niceness of processes for which no worker waits: this machine's workers come first."""


class BackgroundRunner(Protocol):
    """Interface of functions that run long work outside the event loop."""

    def __call__(self, work: Callable[[], T], done: DoneCallback[T], *, awaited: bool = True) -> None:
        """Run `work`, then call `done` on the event loop with its result or exception. If not
        `awaited` by a worker, the work may take longer, at low priority."""


class PlannerDiedError(RuntimeError):
    """Error raised when a forked process has ended without an answer."""


def run_in_thread(work: Callable[[], T], done: DoneCallback[T], *, awaited: bool = True) -> None:  # noqa: ARG001
    """Run `work` in a daemon thread, then call `done` on the event loop.

    It gets the result or exception. The work must not change state that other threads see.
    `awaited` has no effect here.
    """
    loop = asyncio.get_running_loop()

    def run() -> None:
        answer = capture_result(work)
        with suppress(RuntimeError):  # the run is over, and the loop closed
            loop.call_soon_threadsafe(done, answer)

    # A daemon, unlike the threads of asyncio.to_thread: a run that ends does not wait for it.
    threading.Thread(target=run, daemon=True, name="planning").start()


def run_in_process(work: Callable[[], T], done: DoneCallback[T], *, awaited: bool = True) -> None:
    """Run `work` in a forked process, then call `done` with its outcome on the event loop.

    If not `awaited` by a worker, it has low priority and a longer time limit. It is killed if the
    calling thread ends. If no process can be forked, the work is done in a thread.
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
    os.close(theirs)
    run_in_thread(lambda: _read_answer(process, ours, work, AWAITED_TIMEOUT_SECONDS if awaited
                                       else OTHER_TIMEOUT_SECONDS), done)


def choose_background(workers: int) -> BackgroundRunner:
    """Return the function that runs planning for a job of this many workers.

    Schedules for few workers are planned within milliseconds. To fork this process and to copy its
    memory on write would take longer, so only plans that no worker waits for are made in a process.
    On systems other than Linux, libraries may not be usable in a forked process.
    """
    if sys.platform != "linux":
        return run_in_thread
    return run_in_process if workers > MAX_SMALL_JOB_WORKERS else _run_in_thread_if_awaited


def _run_in_thread_if_awaited(work: Callable[[], T], done: DoneCallback[T], *, awaited: bool = True) -> None:
    (run_in_thread if awaited else run_in_process)(work, done, awaited=awaited)


def capture_result(work: Callable[[], T]) -> T | BaseException:
    """Return the result of `work`, or the exception that it raises."""
    try:
        return work()
    except BaseException as error:
        return error


def _read_answer(process: int, pipe: int, work: Callable[[], T], seconds: float) -> T:
    """Return the answer of a forked process, or raise the exception in it."""
    # A lock that another thread held at the fork is never released in the process, which then waits
    # forever. If no answer arrives within `seconds`, the process is killed and the `work` is done
    # in this thread. Raises PlannerDiedError if the process ended without an answer.
    with open(pipe, "rb") as file:
        readable = select.poll()  # unlike select.select, also of descriptors above 1023
        readable.register(file, select.POLLIN)
        if not readable.poll(1000 * seconds):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return work()
        data = file.read()
    _, status = os.waitpid(process, 0)
    if not data or status:
        raise PlannerDiedError("the planning process ended with "
                               + (f"exit status {status >> 8}" if status >> 8 else f"signal {status}"))
    answer = pickle.loads(data)  # noqa: S301, as this process's own child has written it
    if isinstance(answer, BaseException):
        raise answer
    return cast(T, answer)


def _run_child(pipe: int, work: Callable[[], object], *, awaited: bool) -> None:
    """Do the work in the forked process, write the pickled outcome to `pipe`, and exit."""
    status = 1
    try:
        request_parent_death_signal(signal.SIGKILL)
        name_process("planner")
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)  # keep Ctrl-C to the parent
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in WARNING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        os.dup2(pipe, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # else a connection that the parent closes stays open
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
    """Return an answer pickled; an exception that cannot be becomes a RuntimeError."""
    try:
        packed = io.BytesIO()
        pickler = pickle.Pickler(packed, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = copyreg.dispatch_table | {Schedule: lambda schedule: (decode, (encode(schedule),))}
        pickler.dump(answer)
        data = packed.getvalue()
        if isinstance(answer, BaseException):
            pickle.loads(data)  # noqa: S301, as not all exceptions come back
        return data
    except Exception as error:
        cause = answer if isinstance(answer, BaseException) else error
        return pickle.dumps(RuntimeError(f"{type(cause).__name__}: {first_line(cause)}"))
