"""Processes of a step: the stacks of their threads where they hang, and their end."""

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
"""For py-spy to look at a process."""
WRITTEN_SECONDS = 0.5
"""In which a process writes its own stacks."""


def find_py_spy() -> str | None:
    """py-spy's program: on the PATH, or where a package was installed by `pip install --target`."""
    beside = [Path(sys.executable).parent, *(Path(folder) / "bin" for folder in sys.path if folder)]
    return shutil.which("py-spy") or shutil.which("py-spy", path=os.pathsep.join(map(str, beside)))


def dump_stacks(pids: Sequence[int], log: Path) -> None:
    """Append the stacks of all threads of these processes to a file: by py-spy, with C frames where it can tell them.

    Without py-spy each process writes them to its own standard error, if it has registered SIGUSR2 for that.
    """
    program = find_py_spy()
    with log.open("a") as file:
        for pid in filter(lives, pids):
            print(f"--- process {pid}: {_command(pid)}", file=file, flush=True)
            if program is None and _handles(pid, signal.SIGUSR2):
                os.kill(pid, signal.SIGUSR2)
            for how in (["--native", "--nonblocking"] if program is not None else ()):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    done = subprocess.run([str(program), "dump", how, "--pid", str(pid)], stdout=file,
                                          stderr=file, timeout=DUMP_SECONDS)
                    if done.returncode == 0:
                        break
    if program is None:
        time.sleep(WRITTEN_SECONDS)


def end_tree(pid: int) -> None:
    """Kill a process with all below it, those in sessions of their own, too."""
    for one in (*reversed(below(pid)), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    return "gone"


def _handles(pid: int, number: int) -> bool:
    """Check whether a process has a handler for a signal: else the signal would end it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
