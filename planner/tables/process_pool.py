"""Run long, independent tasks in processes of this machine, or of an executor.

The processes of this machine all end when one dies or the caller stops. `concurrent.futures` runs
them, but cannot stop running tasks, and a table build is usually interrupted during tasks. So a
thread of each process waits for a pipe to close, and then ends the process.

Executors are MPI processes, or the workers of a Dask cluster. Both need optional packages, imported
at first use. They pickle what they send: anyone who can reach a Dask scheduler can run code on all
of its machines.
"""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar
from uuid import uuid4

Task = TypeVar("Task")
Result = TypeVar("Result")


class PoolError(Exception):
    """Error for a task that failed or whose process died. The message names the task."""


def run_all(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    jobs: int,
    refusals: tuple[type[Exception], ...] = (),
    fork: bool = False,
    executor: Executor | None = None,
) -> Generator[tuple[Task, Result], None, None]:
    """Run a function on tasks in processes or an executor; iterate over the results.

    Pairs (task, result) are yielded as tasks finish; tasks are started in order, from the first
    request of a result on. The function may keep state in each process. All processes end when the
    iteration ends or the caller is killed; tasks of an executor that have not begun are cancelled.
    The processes ignore Ctrl-C, which is for the caller. Raises PoolError if a process dies, and
    for exceptions of tasks other than `refusals`.

    Parameters
    ----------
    jobs
        Largest number of processes.
    refusals
        Types of exceptions that are raised as the function raised them.
    fork
        True if processes begin with all that the caller has, so that the function need not be
        picklable.
    executor
        Executor that runs the tasks instead of processes.
    """
    pending = list(tasks)
    if executor is not None:
        # Processes of an executor outlive this call: another key means another function.
        key = uuid4().hex
        submitted = {
            executor.submit(_run_elsewhere, key, function, task, refusals): task for task in pending
        }
        try:
            yield from _iterate_results(submitted)
        finally:
            for future in submitted:
                future.cancel()
        return
    if not pending:
        return
    context = get_context("fork" if fork else "spawn")
    # Our end of the pipe closes with us, however we end, which ends the processes.
    theirs, ours = context.Pipe(duplex=False)
    with _safe_path():  # of the process that looks after the pool's semaphores, too
        pool = ProcessPoolExecutor(
            min(jobs, len(pending)),
            context,
            _start_process,
            (theirs, ours if fork else None, function),
        )
    try:
        # The processes inherit both, from their first instant on.
        with _interrupts_ignored(), _safe_path():
            running = {pool.submit(_run, task, refusals): task for task in pending}
        yield from _iterate_results(running)
    finally:
        ours.close()
        pool.shutdown(cancel_futures=True)
        theirs.close()


def _iterate_results(running: Mapping[Future[Any], Task]) -> Iterator[tuple[Task, Any]]:
    """Yield (task, result) as the futures in `running` finish."""
    for future in as_completed(running):
        try:
            result, failure = future.result()
        except BrokenProcessPool:
            # All futures fail at once; the first unfinished task is the likely cause.
            first = next(
                task for other, task in running.items() if not other.done() or other.exception()
            )
            raise PoolError(
                f"{first}: its process died, or that of another task at the same time; "
                "the machine may have run out of memory"
            ) from None
        except Exception as error:  # an executor's own, which says why nothing has run the task
            raise PoolError(f"{running[future]}: {type(error).__name__}: {error}") from None
        if isinstance(failure, Exception):
            raise failure
        if failure is not None:
            raise PoolError(f"{running[future]}: {failure}")
        yield running[future], result


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Return a context in which Ctrl-C is ignored; it should last only milliseconds."""
    # Only the main thread may set signal handlers, and only it receives Ctrl-C.
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
    """Return a context whose processes do not search the working directory for modules."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


_POOL_FUNCTIONS: list[Callable[[Any], Any]] = []
"""Function that this process of a pool runs, the only element; it may keep state."""


def _start_process(
    pipe: Connection, callers: Connection | None, function: Callable[[Any], Any]
) -> None:
    """Initialize a pool's process to end when `pipe` closes; close the forked end `callers`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if callers is not None:
        callers.close()  # a forked process has that end too, and would keep it open
    _POOL_FUNCTIONS.append(function)
    threading.Thread(target=_exit_on_close, args=(pipe,), daemon=True).start()


def _exit_on_close(pipe: Connection) -> None:
    """Wait until the caller's end of a pipe is closed, then end this process."""
    pipe.poll(None)
    os._exit(1)


_EXECUTOR_FUNCTIONS: dict[str, Callable[[Any], Any]] = {}
"""Function that a process of an executor runs, by its caller's key."""


def _run_elsewhere(
    key: str, function: Callable[[Any], Any], task: Any, refusals: tuple[type[Exception], ...]
) -> tuple[Any, Exception | str | None]:
    if key not in _EXECUTOR_FUNCTIONS:
        # Only the last function is kept, with its state, for its next task.
        _EXECUTOR_FUNCTIONS.clear()
        _EXECUTOR_FUNCTIONS[key] = function
    return _call_and_catch(_EXECUTOR_FUNCTIONS[key], task, refusals)


def _run(task: Any, refusals: tuple[type[Exception], ...]) -> tuple[Any, Exception | str | None]:
    return _call_and_catch(_POOL_FUNCTIONS[0], task, refusals)


def _call_and_catch(
    function: Callable[[Any], Any], task: Any, refusals: tuple[type[Exception], ...]
) -> tuple[Any, Exception | str | None]:
    """Return a call's (result, None), or (None, exception in `refusals` or traceback's text)."""
    try:
        return function(task), None
    except refusals as error:
        # Errors of these types are the caller's to handle; all others become text.
        return None, error
    except Exception:
        return None, traceback.format_exc()


CONNECT_SECONDS = 30
"""Longest wait for a Dask scheduler's answer."""


class ExecutorError(ValueError):
    """Error for an executor that cannot be provided. The message is one line."""


@contextmanager
def open_executor(name: str | None) -> Iterator[Executor | None]:
    """Return a context with the executor "mpi" or "dask://HOST:PORT".

    For the name None, the context has None: the processes of this machine. A Dask scheduler may
    take `CONNECT_SECONDS` to answer. Raises ExecutorError if the executor is unknown or not
    available.
    """
    if name is None:
        yield None
    elif name == "mpi":
        with _open_mpi() as executor:
            yield executor
    elif name.startswith("dask://"):
        with _open_dask("tcp" + name.removeprefix("dask")) as executor:
            yield executor
    else:
        raise ExecutorError(f"{name!r} is not an executor; expected mpi or dask://HOST:PORT")


@contextmanager
def _open_mpi() -> Iterator[Executor]:
    try:
        from mpi4py.futures import MPIPoolExecutor
    except ModuleNotFoundError as error:
        raise ExecutorError(
            f"mpi needs the package {error.name}: pip install -e '.[mpi]'"
        ) from None
    except (ImportError, RuntimeError) as error:  # the package is there, and no MPI is
        raise ExecutorError(f"mpi needs an MPI library, such as Open MPI: {error}") from None
    with MPIPoolExecutor() as executor:
        yield executor


@contextmanager
def _open_dask(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise ExecutorError(
            f"dask needs the package {error.name}: pip install -e '.[dask]'"
        ) from None
    try:
        client = Client(address, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise ExecutorError(f"no Dask scheduler answers at {address}: {error}") from None
    with client, client.get_executor(pure=False) as executor:
        yield executor
