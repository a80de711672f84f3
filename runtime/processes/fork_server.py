"""Control a fork server, which imports torch once and then forks others in milliseconds.

Requests and reports are lines of JSON over a socket, which is the server's standard input. When the
socket closes, because the process that started the server has ended in any way, the server kills
all processes that it has forked, and ends. If the server was asked to hold them, it first waits a
while for another process to take it over (`adopt_fork_server`).

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
"""Variables that keep numpy's BLAS from starting threads, which make forking unsafe."""
SERVER_GONE = "the process that starts the workers has died"
ADOPT_SECONDS = 5.0
"""Time within which a fork server must answer the launcher that takes it over."""
KILL_SECONDS = 10.0
"""Time to wait for killed processes to be gone; those that hardware holds take longer."""


class ForkServerError(RuntimeError):
    """Error, in one line, for a fork server that has ended with all its processes."""


def build_environment(**more: str) -> dict[str, str]:
    """Return this process's environment with `more`, without the run's secret, for a child.

    PYTHONPATH begins with the folder of this very package, unless `more` has it.
    """
    # The child must import this very copy of the program, wherever it is.
    root = str(Path(str(sys.modules["slipstream"].__file__)).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {
        **{key: value for key, value in os.environ.items() if key != SECRET_VARIABLE},
        "PYTHONPATH": path,
        **more,
    }


class ForkServer:
    """Connection to a new fork server; leaving its context ends the server and its processes."""

    _process: "subprocess.Popen[bytes] | None" = None
    """Process of the server, if this process has started it."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C reaches the launcher only, which then ends the others. -P:
        # nothing is imported from the working directory (`runtime.object_reference` adds it if the
        # job names code of its own). Signals that schedulers send to all processes stay blocked
        # there; a worker unblocks SIGTERM later.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULER_SIGNALS)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipstream.runtime.worker.fork_server_process"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=build_environment(**ONE_THREAD_ENVIRONMENT),
                start_new_session=True,
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._attach_connection(ours, f"slipstream-{secrets.token_hex(16)}")

    def _attach_connection(self, connection: socket.socket, name: str) -> None:
        """Use `connection` to talk to the server, which another launcher finds by `name`."""
        self._connection, self._name = connection, name
        self._lines = LineReader(connection.fileno())
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._alive: set[str] = set()
        self.note = ""
        """Last text set by `hold_for_adoption`, here or by the launcher before this one."""
        self.pids: dict[str, int] = {}
        """Process id by name, of each live process whose start has been reported."""

    def hold_for_adoption(self, seconds: float, note: str) -> str | None:
        """Ask the server to keep its processes for `seconds` after this process's death.

        The launcher that takes them over gets the text `note`. Returns the server's name, by which
        `adopt_fork_server` finds it, and which never changes; None on systems other than Linux.
        Raises ForkServerError.
        """
        if not sys.platform.startswith("linux"):
            return None
        self._send_request(HoldProcesses(self._name, seconds, note))
        self.note = note
        return self._name

    def register_cleanup(self, target: str, path: Path | str) -> None:
        """Have the server remove `path` by `target` if this process is killed.

        `target` is a `module:function` that is called with the path. Raises ForkServerError.
        """
        self._send_request(CleanUp(target, str(path)))

    def start_process(self, spec: ProcessSpec) -> None:
        """Ask the server to start a process, without waiting for it. Raises ForkServerError."""
        self._alive.add(spec.name)
        self._send_request(spec)

    def kill_process(self, name: str) -> None:
        """Kill the process `name`, if it is alive. Raises ForkServerError."""
        self._send_request(KillProcess(name))

    def is_alive(self, name: str) -> bool:
        """Return whether a process has been started and its end has not been reported."""
        return name in self._alive

    def kill_all(self) -> None:
        """Kill all processes, and wait until they have ended.

        If some are left after `KILL_SECONDS`, a server that this process has started is killed,
        too.
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
        """Return the names of the processes whose end has not been reported, sorted."""
        return sorted(self._alive)

    def fileno(self) -> int:
        """Return the descriptor for a selector, which is readable when `poll` has news."""
        return self._connection.fileno()

    def poll(self, seconds: float) -> list[ProcessEnded]:
        """Wait up to `seconds`; return the processes that have ended. Raises ForkServerError."""
        ended_processes: list[ProcessEnded] = []
        if self._selector.select(seconds):
            ended_processes = self._apply_reports(self._lines.read_lines())
            if self._lines.closed:
                raise ForkServerError(SERVER_GONE)
        return ended_processes

    def _apply_reports(self, lines: Iterable[bytes]) -> list[ProcessEnded]:
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
        """End the fork server and all processes that it has forked.

        Waits up to `KILL_SECONDS`; a server that this process has started is then killed. If it is
        still not gone after as long again, a line on standard error says so.
        """
        # The server kills its processes before it ends; if it does not end, it is killed itself.
        deadline = time.monotonic() + KILL_SECONDS
        with contextlib.suppress(ForkServerError):
            self._send_request(EndServer())
            while time.monotonic() < deadline:
                self.poll(1.0)  # raises once the server is gone
        self._selector.close()
        self._connection.close()
        if self._process is not None:
            self._process.kill()
            try:
                self._process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                # Nobody can do more, and how the run ended matters more to users.
                print(
                    f"process {self._process.pid}, which started the workers, was killed but has "
                    f"not ended within {KILL_SECONDS:.0f} s; check for a device that holds it",
                    file=sys.stderr,
                    flush=True,
                )

    def detach(self) -> None:
        """Disconnect, and leave the server and its processes to another launcher."""
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
                data = data[self._connection.send(data) :]
        except OSError:
            raise ForkServerError(SERVER_GONE) from None


class AdoptedForkServer(ForkServer):
    """Connection to a fork server whose launcher has died or left it.

    Its creation raises ForkServerError if the server does not answer within `ADOPT_SECONDS`.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._attach_connection(connection, name)
        # The server accepts a launcher only when the one before is gone: it may take a moment.
        deadline = time.monotonic() + ADOPT_SECONDS
        first_lines: list[bytes] = []
        while not first_lines:
            if self._lines.closed or not self._selector.select(
                max(0.0, deadline - time.monotonic())
            ):
                raise ForkServerError(SERVER_GONE)
            first_lines = self._lines.read_lines()
        news = decode_report(first_lines[0])
        assert isinstance(news, ServerAdopted)
        self.note = news.note
        self._alive.update(news.alive)
        # this process has not known any of them alive, so ends need not be reported
        self._apply_reports(first_lines[1:])


def adopt_fork_server(name: str) -> AdoptedForkServer | None:
    """Take over the fork server `name`. Return None if it is gone, or cannot be adopted here."""
    if not sys.platform.startswith("linux"):
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(ADOPT_SECONDS)
        connection.connect(f"\0{name}")
        # Both ends accept only processes of the same user.
        if get_peer_user(connection) == os.getuid():
            connection.settimeout(None)
            return AdoptedForkServer(connection, name)
    except (OSError, ForkServerError):
        pass
    connection.close()
    return None
