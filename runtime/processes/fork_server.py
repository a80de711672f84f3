"""Control a fork server, which imports torch once and then forks others in milliseconds.

Requests and reports are lines of JSON over a socket, which is the server's standard input. When the
socket closes, because the process that started the server has ended in any way, the server kills
all processes that it has forked, and ends. If the server was asked to hold them, it first waits a
while for another process to take it over (`adopt_fork_server`), through a socket whose name was
agreed on before.

Why not the standard library's (`multiprocessing.get_context("forkserver")`, with preloading): it
imports the user's main program again, in the server and in each process, so that a program without
an `if __name__ == "__main__"` guard fails; the processes that it has forked survive when the
launcher is killed; and its requests are pickles. Measured with 12 processes on 2 busy cores: all
were forked in 0.5 s here and in 0.8 to 2.7 s there, and all of them together took 254 and 287 MiB
of memory.
"""

import contextlib
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec

from slipstream.runtime.processes.fork_server_messages import (
    CleanUp,
    EndServer,
    HoldProcesses,
    KillAll,
    KillProcess,
    LineReader,
    ProcessEnded,
    ProcessSpec,
    ProcessStarted,
    Request,
    ServerAdopted,
    decode_report,
    get_peer_user,
)
from slipstream.runtime.processes.stop_signals import SCHEDULER_SIGNALS
from slipstream.runtime.protocol.authentication import SECRET_VARIABLE

ONE_THREAD_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment without threads of numpy's BLAS, with which a process is not safe to fork."""
SERVER_GONE = "the process that starts the workers has died"
ADOPT_SECONDS = 5.0
"""Time within which a fork server that waits to be adopted must answer."""
KILL_SECONDS = 10.0
"""Time within which a killed process must be gone, unless hardware holds it."""


class ForkServerError(RuntimeError):
    """Error, in one line, for a fork server that has ended with all its processes."""


def build_environment(**more: str) -> dict[str, str]:
    """Return the environment, with `more`, for a process that imports this program's modules.

    PYTHONPATH is set so that the imports work. The run's secret is left out: workers get it over a
    socket, and programs that workers start need not know it.
    """
    root = str(Path(str(sys.modules["slipstream"].__file__)).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**{key: value for key, value in os.environ.items() if key != SECRET_VARIABLE}, "PYTHONPATH": path, **more}


class ForkServer:
    """Launcher's side of a fork server, which may serve several runs. It is a context manager, so
    that no forked process outlives the block."""

    _process: "subprocess.Popen[bytes] | None" = None
    """Process of the server, if this process has started it."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C reaches the launcher only, which then ends the others. -P: nothing is imported
        # from the working directory (`runtime.object_reference` adds it if the job names code of its own).
        # Signals that schedulers send to all processes stay blocked there; a worker unblocks SIGTERM later.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULER_SIGNALS)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipstream.runtime.worker.fork_server_process"], stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL, env=build_environment(**ONE_THREAD_ENVIRONMENT), start_new_session=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._attach_connection(ours, f"slipstream-{secrets.token_hex(16)}")

    def _attach_connection(self, connection: socket.socket, name: str) -> None:
        """Use `connection` to talk to the server, which can be adopted by `name`."""
        self._connection, self._name = connection, name
        self._lines = LineReader(connection.fileno())
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._alive: set[str] = set()
        self.note = ""
        """Text for the process that adopts the server. In that process, the text that it was
        passed."""
        self.pids: dict[str, int] = {}
        """Process id by name, for each process whose start has been reported."""

    def hold_for_adoption(self, seconds: float, note: str) -> str | None:
        """Ask the server to keep its processes for `seconds` after this process's death.

        A process that adopts them is passed the text `note`. Returns the name by which
        `adopt_fork_server` finds the server, the same at each call, also after an adoption; None on
        systems other than Linux. Raises ForkServerError.
        """
        if not sys.platform.startswith("linux"):
            return None
        self._send_request(HoldProcesses(self._name, seconds, note))
        self.note = note
        return self._name

    def register_cleanup(self, target: str, path: Path | str) -> None:
        """Register a path that `target` is to remove if this process is killed.

        `target` is a `module:function`, whose errors are ignored. Raises ForkServerError if the
        server has ended.
        """
        self._send_request(CleanUp(target, str(path)))

    def start_process(self, spec: ProcessSpec) -> None:
        """Ask the server to start a process; its start is reported later. Raises
        ForkServerError."""
        self._alive.add(spec.name)
        self._send_request(spec)

    def kill_process(self, name: str) -> None:
        """Kill a process, even a stopped one, unless it has ended. Raises ForkServerError."""
        self._send_request(KillProcess(name))

    def is_alive(self, name: str) -> bool:
        """Return whether a process has been started and its end has not been reported."""
        return name in self._alive

    def kill_all(self) -> None:
        """Kill all processes that are alive, and wait until they are gone.

        If that takes longer than `KILL_SECONDS` and the server is a child of this process, the
        server is killed, too, and its processes are left to the system.
        """
        deadline = time.monotonic() + KILL_SECONDS
        try:
            self._send_request(KillAll())
            while self._alive:
                if time.monotonic() > deadline:
                    if self._process is not None:
                        self._process.kill()
                    raise ForkServerError(SERVER_GONE)
                self.poll(1.0)
        except ForkServerError:  # the processes have ended with the server
            self._alive.clear()
            self.pids.clear()

    def list_alive(self) -> list[str]:
        """Return the names of the processes that are alive."""
        return sorted(self._alive)

    def fileno(self) -> int:
        """Return the descriptor for a selector, which is readable when `poll` has something."""
        return self._connection.fileno()

    def poll(self, seconds: float) -> list[ProcessEnded]:
        """Return the processes that have ended since the last call, after waiting for one. The wait
        lasts `seconds` at most. Raises ForkServerError if the server has ended."""
        ended_processes: list[ProcessEnded] = []
        if self._selector.select(seconds):
            ended_processes = self._apply_reports(self._lines.read_lines())
            if self._lines.closed:
                raise ForkServerError(SERVER_GONE)
        return ended_processes

    def _apply_reports(self, lines: Iterable[bytes]) -> list[ProcessEnded]:
        """Update the known processes from reports, and return those that have ended."""
        ended = []
        for line in lines:
            news = decode_report(line)
            if isinstance(news, ProcessStarted):
                self.pids[news.name] = news.pid
            elif isinstance(news, ProcessEnded):
                self._alive.discard(news.name)
                self.pids.pop(news.name, None)
                ended.append(news)
        return ended

    def close(self) -> None:
        """End the fork server and all processes that it has forked."""
        deadline = time.monotonic() + KILL_SECONDS
        with contextlib.suppress(ForkServerError):
            self._send_request(EndServer())
            while time.monotonic() < deadline:
                self.poll(1.0)  # raises once the server is gone
        self._selector.close()
        self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(KILL_SECONDS)

    def detach(self) -> None:
        """Leave the server and its processes to another launcher, as if this process had died."""
        self._selector.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send_request(self, request: Request) -> None:
        data = msgspec.json.encode(request) + b"\n"
        try:
            while data:
                data = data[self._connection.send(data):]
        except OSError:
            raise ForkServerError(SERVER_GONE) from None


class AdoptedForkServer(ForkServer):
    """Fork server whose starter has died, created by `adopt_fork_server`."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._attach_connection(connection, name)
        deadline = time.monotonic() + ADOPT_SECONDS
        first_lines: list[bytes] = []
        while not first_lines:
            if self._lines.closed or not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise ForkServerError(SERVER_GONE)
            first_lines = self._lines.read_lines()
        news = decode_report(first_lines[0])
        assert isinstance(news, ServerAdopted)
        self.note = news.note
        self._alive.update(news.alive)
        # this process has not known any of them alive, so ends need not be reported
        self._apply_reports(first_lines[1:])


def adopt_fork_server(name: str) -> AdoptedForkServer | None:
    """Take over a fork server and its processes, by its name. None if it is gone.

    `ForkServer.hold_for_adoption` returned the name. Both ends accept only processes of the same
    user.
    """
    if not sys.platform.startswith("linux"):
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(ADOPT_SECONDS)
        connection.connect(f"\0{name}")
        if get_peer_user(connection) == os.getuid():
            connection.settimeout(None)
            return AdoptedForkServer(connection, name)
    except (OSError, ForkServerError):
        pass
    connection.close()
    return None
