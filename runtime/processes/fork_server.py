"""Fork server: a process that imports torch once, and then forks others on request, each in milliseconds.

Requests and reports are lines of JSON over a socket, which is its standard input. When that closes, because the process
that started it has ended in any way, it kills all processes that it has forked, and ends. Where it was told to hold
them, it first waits a while for another process to take it over (`adopt`), through a socket whose name was agreed on
before.

Why not the standard library's (`multiprocessing.get_context("forkserver")`, with preloading): it imports the user's
main program again, in the server and in each process, so that one without an `if __name__ == "__main__"` guard fails;
what it has forked lives on when the launcher is killed; and its requests are pickles. Measured with 12 processes on
2 busy cores: all forked in 0.5 s here and in 0.8 to 2.7 s there, 254 and 287 MiB of memory for all of them together.
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
    Adopted,
    CleanUp,
    End,
    Hold,
    Kill,
    KillAll,
    Lines,
    ProcessEnded,
    ProcessSpec,
    Request,
    Started,
    decode_news,
    user_of,
)
from slipstream.runtime.processes.stop_signals import FROM_SCHEDULERS
from slipstream.runtime.protocol.authentication import VARIABLE

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's BLAS would start threads at import, and a process with threads is not safe to fork."""
GONE = "the process that starts the workers has died"
ADOPT_SECONDS = 5.0
"""A fork server that is held answers at once."""
KILL_SECONDS = 10.0
"""A process that is killed is gone in milliseconds, unless the system itself waits, for a disk or a GPU."""


class ForkServerError(RuntimeError):
    """The fork server has gone, and all that it has forked with it. The message is one line."""


def environment(**more: str) -> dict[str, str]:
    """This process's, in which another finds the modules of this program, wherever it was started.

    Without the run's secret: workers get it over a socket, and what they start themselves need not know it.
    """
    root = str(Path(str(sys.modules["slipstream"].__file__)).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**{key: value for key, value in os.environ.items() if key != VARIABLE}, "PYTHONPATH": path, **more}


class ForkServer:
    """The launcher's side. Used as a context manager, so that no process outlives it; may serve several runs."""

    _process: "subprocess.Popen[bytes] | None" = None
    """The server's, where this process has started it."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C reaches the launcher only, which then ends the others. -P: nothing is imported
        # from the working directory (`runtime.model.object_reference` adds it where the job names code of its own).
        # What schedulers send to all processes stays blocked there, and SIGTERM in a worker until that handles it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_SCHEDULERS)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipstream.runtime.processes.fork_server_process"], stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL, env=environment(**ONE_THREAD), start_new_session=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._attach(ours, f"slipstream-{secrets.token_hex(16)}")

    def _attach(self, connection: socket.socket, name: str) -> None:
        """Talk to the server over this connection. `name` is the one by which it is found again."""
        self._connection, self._name = connection, name
        self._lines = Lines(connection.fileno())
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._alive: set[str] = set()
        self.note = ""
        """What was given when its processes were held."""
        self.pids: dict[str, int] = {}
        """By name, of the processes whose start has been reported."""

    def hold(self, seconds: float, note: str) -> str | None:
        """Should this process die, have those that are forked live on for so long, until another process adopts them.

        The name by which `adopt` finds them, and then gives the note: the same each time, also where others have held
        them before. None where the system cannot do that (only Linux can). Raises ForkServerError.
        """
        if not sys.platform.startswith("linux"):
            return None
        self._ask(Hold(self._name, seconds, note))
        self.note = note
        return self._name

    def clean_up(self, target: str, path: Path | str) -> None:
        """Have `target`, a `module:function`, remove a file or a folder should this process be killed.

        Nobody hears of errors. Raises ForkServerError.
        """
        self._ask(CleanUp(target, str(path)))

    def start(self, spec: ProcessSpec) -> None:
        """Start a process. Raises ForkServerError."""
        self._alive.add(spec.name)
        self._ask(spec)

    def kill(self, name: str) -> None:
        """Kill a process, even one that is stopped; nothing happens where it has ended. Raises ForkServerError."""
        self._ask(Kill(name))

    def lives(self, name: str) -> bool:
        """Whether a process has been started, and its end has not been reported."""
        return name in self._alive

    def kill_all(self) -> None:
        """Kill the processes that are alive, and wait until they are gone.

        Where that takes longer than `KILL_SECONDS`, the server is killed, too, if it is a child of this process, and
        leaves them to the system.
        """
        deadline = time.monotonic() + KILL_SECONDS
        try:
            self._ask(KillAll())
            while self._alive:
                if time.monotonic() > deadline:
                    if self._process is not None:
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
        return self._connection.fileno()

    def poll(self, seconds: float) -> list[ProcessEnded]:
        """The processes that have ended, waiting at most that long for some news. Raises ForkServerError."""
        ended: list[ProcessEnded] = []
        if self._selector.select(seconds):
            ended = self._learn(self._lines.read())
            if self._lines.closed:
                raise ForkServerError(GONE)
        return ended

    def _learn(self, lines: Iterable[bytes]) -> list[ProcessEnded]:
        """Who lives after these news; the processes that have ended by them."""
        ended = []
        for line in lines:
            news = decode_news(line)
            if isinstance(news, Started):
                self.pids[news.name] = news.pid
            elif isinstance(news, ProcessEnded):
                self._alive.discard(news.name)
                self.pids.pop(news.name, None)
                ended.append(news)
        return ended

    def close(self) -> None:
        """End the fork server and all that it has forked."""
        deadline = time.monotonic() + KILL_SECONDS
        with contextlib.suppress(ForkServerError):
            self._ask(End())
            while time.monotonic() < deadline:
                self.poll(1.0)  # until it is gone
        self._selector.close()
        self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(KILL_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Request) -> None:
        data = msgspec.json.encode(request) + b"\n"
        try:
            while data:
                data = data[self._connection.send(data):]
        except OSError:
            raise ForkServerError(GONE) from None


class AdoptedForkServer(ForkServer):
    """One that another process has started, which has died; made by `adopt`."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._attach(connection, name)
        deadline = time.monotonic() + ADOPT_SECONDS
        first: list[bytes] = []
        while not first:
            if self._lines.closed or not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise ForkServerError(GONE)
            first = self._lines.read()
        news = decode_news(first[0])
        assert isinstance(news, Adopted)
        self.note = news.note
        self._alive.update(news.alive)
        self._learn(first[1:])  # one that has just ended was never known to live here


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
        if user_of(connection) == os.getuid():
            connection.settimeout(None)
            return AdoptedForkServer(connection, name)
    except (OSError, ForkServerError):
        pass
    connection.close()
    return None
