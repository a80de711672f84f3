"""Launchers of runs as processes of their own, which can be killed.

They are forked, so that torch is not imported for each.
"""

import atexit
import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.fork_server_messages import (
    ProcessEnded,
    ProcessSpec,
    ProcessStarted,
    decode_report,
    load_target,
)
from slipstream.runtime.protocol.authentication import SECRET_VARIABLE

NUMBERS = itertools.count()
START_SECONDS = 240.0
SECRET = "0123456789abcdef"


class Launcher:
    """A process that calls `module:function` with words.

    As `subprocess.Popen`, as far as tests need that.
    """

    def __init__(
        self, target: str, *words: object, log: Path | str, imports: Sequence[str] = ()
    ) -> None:
        self._servant, name = servant(), str(next(NUMBERS))
        self._name, self._target = name, target
        self.pid = self._servant.start(name, target, words, log, imports)

    def poll(self) -> int | None:
        """The exit status, or minus the signal; None while it lives."""
        return self._servant.status(self._name)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._target, timeout)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        # It has ended, and its end is not reported yet.
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class LauncherServer(ForkServer):
    """One that also knows the process ids of those that have ended."""

    def __init__(self) -> None:
        self.started: dict[str, int] = {}
        super().__init__()

    def _apply_reports(self, lines: Iterable[bytes]) -> list[ProcessEnded]:
        reports = list(lines)
        self.started.update(
            (news.name, news.pid)
            for line in reports
            if isinstance(news := decode_report(line), ProcessStarted)
        )
        return super()._apply_reports(reports)


class Servant:
    """The fork server of launchers, and the ends that it has reported."""

    def __init__(self) -> None:
        self._server, self._status = LauncherServer(), dict[str, int]()

    def start(
        self,
        name: str,
        target: str,
        words: Sequence[object],
        log: Path | str,
        imports: Sequence[str],
    ) -> int:
        task = msgspec.json.encode([target, *map(str, words)]).decode()
        module, _, _ = target.partition(":")
        self._server.start_process(
            ProcessSpec(
                name,
                f"{__name__}:launch",
                task,
                str(log),
                append=True,
                # Once for all.
                imports=("tests.runtime.warm", module, *imports),
            )
        )
        deadline = time.monotonic() + START_SECONDS
        while name not in self._server.started:
            assert time.monotonic() < deadline
            self._poll(1.0)
        return self._server.started[name]

    def status(self, name: str) -> int | None:
        if name not in self._status:
            self._poll(0.02)
        return self._status.get(name)

    def _poll(self, seconds: float) -> None:
        self._status.update(
            (process.name, process.status) for process in self._server.poll(seconds)
        )

    def close(self) -> None:
        self._server.close()


@functools.cache
def servant() -> Servant:
    new_servant = Servant()
    atexit.register(new_servant.close)
    return new_servant


def launch(task: bytes) -> int:
    """In the process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # blocked in the fork server
    target, *words = msgspec.json.decode(task, type=list[str])
    return load_target(target)(*words) or 0


def command_in(folder: str, *words: str) -> int:
    """`command`, in this folder."""
    os.chdir(folder)
    return command(*words)


def command(*words: str) -> int:
    """`slipstream` with these words, and with the secret of tests; the exit status."""
    from slipstream.cli.start import main
    from slipstream.runtime import launch, node_agent
    from tests.runtime.forked import fork_server_of_launcher

    launch.ForkServer = fork_server_of_launcher  # type: ignore[assignment, misc]
    node_agent.ForkServer = fork_server_of_launcher  # type: ignore[assignment, misc]
    os.environ[SECRET_VARIABLE] = SECRET
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
