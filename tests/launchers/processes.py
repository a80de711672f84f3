"""Finding and ending processes that others have started, and waiting for what they do."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.runtime.processes.torchrun import environment_of

SECONDS = 240.0
"""What anything may take on a busy machine."""


def with_variable(name: str, value: str) -> list[int]:
    """Processes of this machine that have it in their environment."""
    return [pid for pid in _all() if environment_of(pid).get(name) == value]


def launcher(among: Iterable[int], variable: str, number: int) -> int:
    """The first process of `slipstream train` that has a number.

    That of node 0 has another one below it.
    """
    found = []
    for pid in among:
        has_title = any(word.startswith(b"slipstream node ") for word in _words(pid)[:1])
        if has_title and environment_of(pid).get(variable) == str(number):
            found.append(pid)
    (first,) = [pid for pid in found if parent(pid) not in found]
    return first


def parent(pid: int) -> int:
    """0 where the process has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def kill_all(pids: Iterable[int]) -> None:
    """At once: none sees another one end."""
    pids = list(pids)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def wait_until(done: Callable[[], object], said: Callable[[], str]) -> None:
    """Until `done` is true; fails with what was said."""
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _words(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []
