"""A process that imports torch once and then forks a worker in milliseconds whenever it is asked.

It is asked and answers in lines of JSON over its standard input and output. When its input closes, because the
launcher has ended in whatever way, it kills all workers it has forked and ends.
"""

import ctypes
import gc
import os
import selectors
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from runtime.processes.children import environment
from runtime.processes.worker_start import WorkerSpec
from runtime.protocol.to_coordinator import Ended
from schedules.schedule import Worker

PR_SET_PDEATHSIG = 1
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's BLAS would start threads at import, and a process with threads is not safe to fork."""
GONE = "the process that starts the workers has died"


class NurseryError(RuntimeError):
    """The nursery's process has gone, and its workers with it. The message is one line."""


class KillAll(msgspec.Struct, frozen=True, tag=True):
    """Kill the workers that were forked until now."""


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill one worker, if it lives."""

    worker: Worker


class Born(msgspec.Struct, frozen=True, tag=True):
    """A worker's process has begun."""

    worker: Worker
    pid: int


class Nursery:
    """The launcher's side. Used as a context manager, so that no process outlives it; may serve several runs."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C reaches the launcher only, which then ends the workers.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "runtime.processes.fork_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            bufsize=0, env=environment(**ONE_THREAD), start_new_session=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._lines = _Lines(self._process.stdout.fileno())
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._alive: set[Worker] = set()
        self.pids: dict[Worker, int] = {}
        """Of the workers whose start has been reported."""

    def fork(self, spec: WorkerSpec) -> None:
        """Start a worker. Raises NurseryError."""
        self._alive.add(spec.worker)
        self._ask(spec)

    def kill(self, worker: Worker) -> None:
        """Kill a worker, even one that is stopped; nothing happens where it has ended. Raises NurseryError."""
        self._ask(Kill(worker))

    def lives(self, worker: Worker) -> bool:
        """Whether a worker has been forked here, and its end has not been reported."""
        return worker in self._alive

    def kill_all(self) -> None:
        """Kill the workers that are alive, and wait until they are gone."""
        try:
            self._ask(KillAll())
            while self._alive:
                self.poll(1.0)
        except NurseryError:  # then they have gone with it
            self._alive.clear()
            self.pids.clear()

    def fileno(self) -> int:
        """For a selector: readable when `poll` has something to tell."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def poll(self, seconds: float) -> list[Ended]:
        """The workers that have ended, waiting at most that long for some news. Raises NurseryError."""
        ended = []
        if self._selector.select(seconds):
            for line in self._lines.read():
                news = msgspec.json.decode(line, type=Born | Ended)
                if isinstance(news, Born):
                    self.pids[news.worker] = news.pid
                else:
                    self._alive.remove(news.worker)
                    del self.pids[news.worker]
                    ended.append(news)
            if self._lines.closed:
                raise NurseryError(GONE)
        return ended

    def close(self) -> None:
        """End the nursery and all its workers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        self._selector.close()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: WorkerSpec | Kill | KillAll) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        except BrokenPipeError:
            raise NurseryError(GONE) from None


class _Lines:
    """Whole lines from a pipe, as they come."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.closed = False

    def read(self) -> list[bytes]:
        """Read once; blocks unless the pipe is ready."""
        data = os.read(self._descriptor, 65536)
        self.closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


class _Server:
    """The nursery's side: one thread, so that forking is safe."""

    def __init__(self, work: Callable[[WorkerSpec], int]) -> None:
        self._work = work
        self._asked = _Lines(0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._alive: dict[int, int] = {}
        """Pid by the pipe that closes with the worker."""

    def serve(self) -> None:
        try:
            while not self._asked.closed:
                for key, _ in self._selector.select():
                    if key.fd == 0:
                        self._answer()
                    else:
                        self._bury(key.fd, key.data)
        finally:
            self._kill_all()
            for pid in self._alive.values():
                os.waitpid(pid, 0)

    def _answer(self) -> None:
        for line in self._asked.read():
            request = msgspec.json.decode(line, type=WorkerSpec | Kill | KillAll)
            if isinstance(request, WorkerSpec):
                self._fork(request)
            elif isinstance(request, Kill):
                self._kill(request.worker)
            else:
                self._kill_all()

    def _kill_all(self) -> None:
        # None has been waited for, so that each pid is still that of our worker.
        for pid in self._alive.values():
            os.kill(pid, signal.SIGKILL)

    def _kill(self, worker: Worker) -> None:
        for watch, pid in self._alive.items():
            if self._selector.get_key(watch).data == worker:
                os.kill(pid, signal.SIGKILL)

    def _fork(self, spec: WorkerSpec) -> None:
        watch, life = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(spec, parent)
        # With the only other end in the worker, the pipe closes when it dies, however it dies.
        os.close(life)
        self._alive[watch] = pid
        self._selector.register(watch, selectors.EVENT_READ, spec.worker)
        _tell(Born(spec.worker, pid))

    def _become_worker(self, spec: WorkerSpec, parent: int) -> None:
        status = 1
        try:
            _die_with(parent)
            for descriptor in self._alive:
                os.close(descriptor)
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            for path, descriptor in ((Path(os.devnull), 0), (spec.log, 1)):
                fresh = 0 if spec.restarted else os.O_TRUNC  # one that comes back writes below what it wrote before
                opened = os.open(path, os.O_RDWR | os.O_CREAT | fresh | os.O_APPEND, 0o666)
                os.dup2(opened, descriptor)
                os.close(opened)
            os.dup2(1, 2)
            status = self._work(spec)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # past whatever the nursery would do at its own exit

    def _bury(self, watch: int, worker: Worker) -> None:
        self._selector.unregister(watch)
        os.close(watch)
        _, status = os.waitpid(self._alive.pop(watch), 0)
        _tell(Ended(worker, os.waitstatus_to_exitcode(status)))


def _tell(news: Born | Ended) -> None:
    os.write(1, msgspec.json.encode(news) + b"\n")


def _die_with(parent: int) -> None:
    """Be killed when the nursery is, where the system can do that (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def main() -> None:
    """Serve until the launcher closes the pipe."""
    from runtime.worker import main as worker

    worker.warm_up()
    gc.freeze()  # else the collector would write to, and so copy, all that workers share
    _Server(worker.main).serve()


if __name__ == "__main__":
    main()
