"""Long work beside the event loop: in a process of its own where the system can fork one safely, else in a thread.

For a large job, a thread would take turns with the event loop, which then answers late: for 1,000 workers, a plan takes
half a second. A forked process has all that it needs, as the job and tables, without a copy being sent.
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
from slipstream.runtime.processes.parent_death import signal_at_death_of_parent
from slipstream.runtime.processes.process_title import name_process
from slipstream.runtime.processes.stop_signals import WARNINGS
from slipstream.schedules.codec import decode, encode
from slipstream.schedules.schedule import Schedule

T = TypeVar("T")
Done = Callable[[T | BaseException], None]

FEW = 64
"""Workers."""
AWAITED_SECONDS, OTHER_SECONDS = 30.0, 900.0
"""How long an answer may take that workers wait for, and one that nobody waits for."""
NICENESS = 10
"""Of work that nobody waits for: the workers of this machine go first."""


class Background(Protocol):
    """Does long work, and has its result, or what it raises, handled on the event loop that this is called on."""

    def __call__(self, work: Callable[[], T], done: Done[T], *, awaited: bool = True) -> None:
        """`awaited`: whether workers wait for it."""


class DiedError(RuntimeError):
    """The process that did the work has ended without an answer."""


def in_thread(work: Callable[[], T], done: Done[T], *, awaited: bool = True) -> None:  # noqa: ARG001
    """Work that changes nothing that others see."""
    loop = asyncio.get_running_loop()

    def run() -> None:
        answer = tried(work)
        with suppress(RuntimeError):  # the run is over, and the loop closed
            loop.call_soon_threadsafe(done, answer)

    # A daemon, unlike the threads of asyncio.to_thread: a run that ends does not wait for it.
    threading.Thread(target=run, daemon=True, name="planning").start()


def in_process(work: Callable[[], T], done: Done[T], *, awaited: bool = True) -> None:
    """The same in a process that is forked here, and ends with the thread that calls this."""
    try:
        ours, theirs = os.pipe()
        process = os.fork()
    except OSError:  # too little of something is left for that
        in_thread(work, done)
        return
    if not process:
        _become_apart(theirs, work, awaited=awaited)
    os.close(theirs)
    in_thread(lambda: _answer_of(process, ours, work, AWAITED_SECONDS if awaited else OTHER_SECONDS), done)


def background_for(workers: int) -> Background:
    """Where a job of so many workers is planned. Few are planned for within milliseconds: to fork this process, and to
    touch its memory anew there, takes longer, and is left to plans that nobody waits for. On other systems than Linux,
    libraries may not be used in a forked process.
    """
    if sys.platform != "linux":
        return in_thread
    return in_process if workers > FEW else _in_thread_if_awaited


def _in_thread_if_awaited(work: Callable[[], T], done: Done[T], *, awaited: bool = True) -> None:
    (in_thread if awaited else in_process)(work, done, awaited=awaited)


def tried(work: Callable[[], T]) -> T | BaseException:
    """What it gives, or raises."""
    try:
        return work()
    except BaseException as error:
        return error


def _answer_of(process: int, pipe: int, work: Callable[[], T], seconds: float) -> T:
    """What a process has written. Raises what that says, and DiedError.

    A lock that another thread held at the fork is never released in the process, which then waits for it without end.
    So what has not come in time is worked out here.
    """
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
        raise DiedError("the process that was to plan has ended with "
                        + (f"exit status {status >> 8}" if status >> 8 else f"signal {status}"))
    answer = pickle.loads(data)  # noqa: S301, as this process's own child has written it
    if isinstance(answer, BaseException):
        raise answer
    return cast(T, answer)


def _become_apart(pipe: int, work: Callable[[], object], *, awaited: bool) -> None:
    """In the forked process: do the work, write the answer, end. Nothing that the parent has open stays open here."""
    status = 1
    try:
        signal_at_death_of_parent(signal.SIGKILL)
        name_process("planner")
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)  # Ctrl-C is for the parent
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in WARNINGS:
            signal.signal(number, signal.SIG_IGN)
        os.dup2(pipe, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # a connection that the parent ends would stay open else
        if not awaited:
            os.nice(NICENESS)
        gc.disable()
        data = _packed(tried(work))
        with open(3, "wb") as file:
            file.write(data)
        status = 0
    finally:
        os._exit(status)


def _packed(answer: object) -> bytes:
    try:
        packed = io.BytesIO()
        pickler = pickle.Pickler(packed, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = copyreg.dispatch_table | {Schedule: lambda one: (decode, (encode(one),))}
        pickler.dump(answer)
        data = packed.getvalue()
        if isinstance(answer, BaseException):
            pickle.loads(data)  # noqa: S301, as not all exceptions come back
        return data
    except Exception as error:
        told = answer if isinstance(answer, BaseException) else error
        return pickle.dumps(RuntimeError(f"{type(told).__name__}: {first_line(told)}"))
