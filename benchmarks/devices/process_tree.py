"""Dump the stacks of a step's processes if they hang, and end them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos_checks import below, lives

DUMP_SECONDS = 5.0
"""Time limit, in seconds, for py-spy to inspect a process."""
WRITTEN_SECONDS = 0.5
"""Time limit, in seconds, for a process to write its own stacks."""


def find_py_spy() -> str | None:
    """Return the path of py-spy: on the PATH, or from `pip install --target`."""
    beside = [Path(sys.executable).parent, *(Path(folder) / "bin" for folder in sys.path if folder)]
    return shutil.which("py-spy") or shutil.which("py-spy", path=os.pathsep.join(map(str, beside)))


def dump_stacks(pids: Sequence[int], log: Path) -> None:
    """Append the stacks of these processes' threads to a file, by py-spy.

    They have C frames if possible. Without py-spy each process writes them to its own standard
    error, if it has registered SIGUSR2 for that.
    """
    program = find_py_spy()
    with log.open("a") as file:
        for pid in filter(lives, pids):
            print(f"--- process {pid}: {_command(pid)}", file=file, flush=True)
            if program is None and _handles(pid, signal.SIGUSR2):
                os.kill(pid, signal.SIGUSR2)
            for how in ["--native", "--nonblocking"] if program is not None else ():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    done = subprocess.run(
                        [str(program), "dump", how, "--pid", str(pid)],
                        stdout=file,
                        stderr=file,
                        timeout=DUMP_SECONDS,
                    )
                    if done.returncode == 0:
                        break
    if program is None:
        time.sleep(WRITTEN_SECONDS)


def end_tree(pid: int) -> None:
    """Kill a process with all its descendants, including those in sessions of their own."""
    for process in (*reversed(below(pid)), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")[:120]
        )
    return "gone"


def _handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which would otherwise end it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
