"""Fork server: a process that imports torch once, and then forks others on request, each in milliseconds.

Requests and reports are lines of JSON on its standard input and output. When its input closes, because the process that
started it has ended in any way, it kills all processes that it has forked, and ends. Where it was told to hold them, it
first waits a while for another process to take it over (`adopt`), through a socket whose name was agreed on before.

Why not the standard library's (`multiprocessing.get_context("forkserver")`, with preloading): it imports the user's
main program again, in the server and in each process, so that one without an `if __name__ == "__main__"` guard fails;
what it has forked lives on when the launcher is killed; and its requests are pickles. Measured with 12 processes on
2 busy cores: all forked in 0.5 s here and in 0.8 to 2.7 s there, 254 and 287 MiB of memory for all of them together.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from runtime.protocol.authentication import VARIABLE

PR_SET_PDEATHSIG = 1
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's BLAS would start threads at import, and a process with threads is not safe to fork."""
GONE = "the process that starts the workers has died"
ADOPT_SECONDS = 5.0
"""A fork server that is held answers at once."""
KILL_SECONDS = 10.0
"""A process that is killed is gone in milliseconds, unless the system itself waits, for a disk or a GPU."""
IDLE_SECONDS = 600.0
"""How long the server waits for something to do before it looks again."""


class ForkServerError(RuntimeError):
    """The fork server has gone, and all that it has forked with it. The message is one line."""


class ProcessSpec(msgspec.Struct, frozen=True, tag=True):
    """A process to be started."""

    name: str
    """No other that lives has it."""
    target: str
    """`module:function`, called with the task's bytes; what it returns is the exit status."""
    task: str
    log: str
    """Where the process's standard output and error go."""
    append: bool = False
    """Whether what the log holds already stays."""
    imports: tuple[str, ...] = ()
    """Modules of this program that take long to import: the server does so once for all."""


class _Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill a process, if it lives."""

    name: str


class _KillAll(msgspec.Struct, frozen=True, tag=True):
    """Kill the processes that were forked until now."""


class _Hold(msgspec.Struct, frozen=True, tag=True):
    """Should the launcher die, wait for another one that connects to a socket, and give it a note."""

    name: str
    seconds: float
    note: str


class _End(msgspec.Struct, frozen=True, tag=True):
    """Kill all, and end."""


class _Adopted(msgspec.Struct, frozen=True, tag=True):
    """The first news to a launcher that has taken over; those that live follow, each as started."""

    note: str
    alive: tuple[str, ...]


class _Started(msgspec.Struct, frozen=True, tag=True):
    """A process has begun."""

    name: str
    pid: int


class ProcessEnded(msgspec.Struct, frozen=True, tag=True):
    """A process is gone."""

    name: str
    status: int
    """As in subprocess, the exit code or minus the signal."""


_Request = ProcessSpec | _Kill | _KillAll | _Hold | _End
_News = _Started | ProcessEnded | _Adopted
_REQUEST: msgspec.json.Decoder[_Request] = msgspec.json.Decoder(_Request)
_NEWS: msgspec.json.Decoder[_News] = msgspec.json.Decoder(_News)


def environment(**more: str) -> dict[str, str]:
    """This process's, in which another finds the modules of this program, wherever it was started.

    Without the run's secret: workers get it over a pipe, and what they start themselves need not know it.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**{key: value for key, value in os.environ.items() if key != VARIABLE}, "PYTHONPATH": path, **more}


class ForkServer:
    """The launcher's side. Used as a context manager, so that no process outlives it; may serve several runs."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C reaches the launcher only, which then ends the others. -P: nothing is imported
        # from the working directory (`runtime.model.object_reference` adds it where the job names code of its own).
        # SIGTERM, which schedulers send to all processes, stays blocked there, and in a worker until that handles it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "runtime.processes.fork_server"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, bufsize=0, env=environment(**ONE_THREAD), start_new_session=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._attach(self._process.stdin.fileno(), self._process.stdout.fileno())

    def _attach(self, requests: int, news: int) -> None:
        """Talk to the server over these descriptors."""
        self._requests, self._news = requests, news
        self._lines = _Lines(news)
        self._selector = selectors.DefaultSelector()
        self._selector.register(news, selectors.EVENT_READ)
        self._alive: set[str] = set()
        self.pids: dict[str, int] = {}
        """By name, of the processes whose start has been reported."""

    def hold(self, seconds: float, note: str) -> str | None:
        """Should this process die, have those that are forked live on for so long, until another process adopts them.

        The name by which `adopt` finds them, and then gives the note; None where the system cannot do that (only Linux
        can). Raises ForkServerError.
        """
        if not sys.platform.startswith("linux"):
            return None
        name = f"slipstream-{secrets.token_hex(16)}"
        self._ask(_Hold(name, seconds, note))
        return name

    def start(self, spec: ProcessSpec) -> None:
        """Start a process. Raises ForkServerError."""
        self._alive.add(spec.name)
        self._ask(spec)

    def kill(self, name: str) -> None:
        """Kill a process, even one that is stopped; nothing happens where it has ended. Raises ForkServerError."""
        self._ask(_Kill(name))

    def lives(self, name: str) -> bool:
        """Whether a process has been started, and its end has not been reported."""
        return name in self._alive

    def kill_all(self) -> None:
        """Kill the processes that are alive, and wait until they are gone.

        Where that takes longer than `KILL_SECONDS`, the server is killed, too, and leaves them to the system.
        """
        deadline = time.monotonic() + KILL_SECONDS
        try:
            self._ask(_KillAll())
            while self._alive:
                if time.monotonic() > deadline:
                    self._process.kill()
                    raise ForkServerError(GONE)
                self.poll(1.0)
        except ForkServerError:  # then they have gone with it
            self._alive.clear()
            self.pids.clear()

    def names(self) -> list[str]:
        """Of the processes that live."""
        return sorted(self._alive)

    def fileno(self) -> int:
        """For a selector: readable when `poll` has something to tell."""
        return self._news

    def poll(self, seconds: float) -> list[ProcessEnded]:
        """The processes that have ended, waiting at most that long for some news. Raises ForkServerError."""
        ended = []
        if self._selector.select(seconds):
            for line in self._lines.read():
                news = _NEWS.decode(line)
                if isinstance(news, _Started):
                    self.pids[news.name] = news.pid
                elif isinstance(news, ProcessEnded):
                    self._alive.remove(news.name)
                    del self.pids[news.name]
                    ended.append(news)
            if self._lines.closed:
                raise ForkServerError(GONE)
        return ended

    def close(self) -> None:
        """End the fork server and all that it has forked."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(ForkServerError):
            self._ask(_End())
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

    def _ask(self, request: _Request) -> None:
        data = msgspec.json.encode(request) + b"\n"
        try:
            while data:
                data = data[os.write(self._requests, data):]
        except OSError:
            raise ForkServerError(GONE) from None


class AdoptedForkServer(ForkServer):
    """One that another process has started, which has died; made by `adopt`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._attach(connection.fileno(), connection.fileno())
        deadline = time.monotonic() + ADOPT_SECONDS
        first: list[bytes] = []
        while not first:
            if self._lines.closed or not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise ForkServerError(GONE)
            first = self._lines.read()
        news = _NEWS.decode(first[0])
        assert isinstance(news, _Adopted)
        self.note = news.note
        self._alive.update(news.alive)
        for line in first[1:]:
            started = _NEWS.decode(line)
            if isinstance(started, _Started):
                self.pids[started.name] = started.pid

    def kill_all(self) -> None:
        """As that of the others; a server that hangs is left to the system."""
        deadline = time.monotonic() + KILL_SECONDS
        with contextlib.suppress(ForkServerError):
            self._ask(_KillAll())
            while self._alive and time.monotonic() < deadline:
                self.poll(1.0)
        self._alive.clear()
        self.pids.clear()

    def close(self) -> None:
        """End the fork server and all that it has forked."""
        deadline = time.monotonic() + KILL_SECONDS
        with contextlib.suppress(ForkServerError):
            self._ask(_End())
            while time.monotonic() < deadline:
                self.poll(1.0)  # until it is gone
        self._selector.close()
        self._connection.close()


def adopt(name: str) -> AdoptedForkServer | None:
    """Take over what a fork server holds, by the name that `ForkServer.hold` gave; None where it is gone.

    Only processes of the same user are heard, at both ends.
    """
    if not sys.platform.startswith("linux"):
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(ADOPT_SECONDS)
        connection.connect(f"\0{name}")
        if _user_of(connection) == os.getuid():
            connection.settimeout(None)
            return AdoptedForkServer(connection)
    except (OSError, ForkServerError):
        pass
    connection.close()
    return None


def _user_of(connection: socket.socket) -> int:
    """Who is at the other end of a Unix socket (Linux)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


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
    """The fork server's side. It has one thread, so that forking is safe."""

    def __init__(self) -> None:
        self._asked = _Lines(0)
        self._control, self._news = 0, 1
        """The descriptors of the launcher."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._alive: dict[int, int] = {}
        """Pid by the pipe that closes with the process."""
        self._hold: _Hold | None = None
        self._listener: socket.socket | None = None
        self._launcher: socket.socket | None = None
        """The connection to one that has adopted this server."""

    def serve(self) -> None:
        try:
            self._serve_one()
            while self._adopted():
                self._serve_one()
        finally:
            self._kill_all()
            for pid in self._alive.values():
                os.waitpid(pid, 0)

    def _serve_one(self) -> None:
        """Serve one launcher, as long as it lives."""
        while not self._asked.closed:
            for key, _ in self._selector.select(IDLE_SECONDS):
                if key.fd == self._control:
                    self._answer()
                else:
                    self._report_end(key.fd, key.data)

    def _adopted(self) -> bool:
        """The launcher is gone: wait for another one, as long as anybody lives."""
        hold, listener = self._hold, self._listener
        if hold is None or listener is None:
            return False
        self._selector.unregister(self._control)
        deadline = time.monotonic() + hold.seconds
        self._selector.register(listener, selectors.EVENT_READ)
        try:
            while self._alive and time.monotonic() < deadline:
                for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                    if key.fileobj is not listener:
                        self._report_end(key.fd, key.data)
                    elif self._accept(listener, hold):
                        return True
            return False
        finally:
            self._selector.unregister(listener)

    def _accept(self, listener: socket.socket, hold: _Hold) -> bool:
        connection, _ = listener.accept()
        if _user_of(connection) != os.getuid():
            connection.close()
            return False
        if self._launcher is not None:
            self._launcher.close()
        self._launcher = connection
        self._control = self._news = connection.fileno()
        self._asked = _Lines(self._control)
        self._selector.register(self._control, selectors.EVENT_READ)
        names = [(str(self._selector.get_key(pipe).data), pid) for pipe, pid in self._alive.items()]
        self._tell(_Adopted(hold.note, tuple(name for name, _ in names)), *(_Started(*one) for one in names))
        return True

    def _held(self, hold: _Hold) -> None:
        if self._listener is not None:
            self._listener.close()
        self._hold, self._listener = hold, socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{hold.name}")
        self._listener.listen()

    def _tell(self, *news: _News) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: the end of the input is next
            os.write(self._news, b"".join(msgspec.json.encode(one) + b"\n" for one in news))

    def _answer(self) -> None:
        for line in self._asked.read():
            request = _REQUEST.decode(line)
            if isinstance(request, ProcessSpec):
                self._fork(request)
            elif isinstance(request, _Kill):
                self._kill(request.name)
            elif isinstance(request, _Hold):
                self._held(request)
            elif isinstance(request, _End):
                self._hold, self._asked.closed = None, True
            else:
                self._kill_all()

    def _kill_all(self) -> None:
        # None has been waited for, so that each pid is still that of our process.
        for pid in self._alive.values():
            os.kill(pid, signal.SIGKILL)

    def _kill(self, name: str) -> None:
        for pipe, pid in self._alive.items():
            if self._selector.get_key(pipe).data == name:
                os.kill(pid, signal.SIGKILL)

    def _fork(self, spec: ProcessSpec) -> None:
        for module in spec.imports:
            with contextlib.suppress(ImportError):  # which the process will say
                importlib.import_module(module)
        ours, theirs = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(spec, parent)
        # With the only other end in the process, the pipe closes when that dies, however it dies.
        os.close(theirs)
        self._alive[ours] = pid
        self._selector.register(ours, selectors.EVENT_READ, spec.name)
        self._tell(_Started(spec.name, pid))

    def _become(self, spec: ProcessSpec, parent: int) -> None:
        """Be the process, to its end."""
        status = 1
        try:
            _die_with(parent)
            for descriptor in self._alive:
                os.close(descriptor)
            for inherited in (self._listener, self._launcher):
                if inherited is not None:
                    inherited.close()
            _redirect(Path(spec.log), spec.append)
            status = load_target(spec.target)(spec.task.encode())
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # past whatever the server would do at its own exit

    def _report_end(self, pipe: int, name: str) -> None:
        self._selector.unregister(pipe)
        os.close(pipe)
        _, status = os.waitpid(self._alive.pop(pipe), 0)
        self._tell(ProcessEnded(name, os.waitstatus_to_exitcode(status)))


def load_target(target: str) -> Callable[[bytes], int]:
    """What `module:function` names."""
    module, _, function = target.partition(":")
    found: Callable[[bytes], int] = getattr(importlib.import_module(module), function)
    return found


def _redirect(log: Path, append: bool) -> None:
    """Read nothing, and write to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for path, descriptor in ((Path(os.devnull), 0), (log, 1)):
        fresh = 0 if append else os.O_TRUNC
        opened = os.open(path, os.O_RDWR | os.O_CREAT | fresh | os.O_APPEND, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)


def _die_with(parent: int) -> None:
    """Be killed when the fork server is, where the system can do that (Linux)."""
    signal_at_death_of_parent(signal.SIGKILL)
    if sys.platform.startswith("linux") and os.getppid() != parent:
        os._exit(1)


def signal_at_death_of_parent(number: signal.Signals) -> None:
    """Have the system send this process a signal when its parent dies, where it can do that (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def main() -> None:
    """Serve until the launcher closes the pipe."""
    from runtime.worker import main as worker

    worker.warm_up()
    gc.freeze()  # else the collector would write to, and so copy, all that the processes share
    _Server().serve()


if __name__ == "__main__":
    main()
