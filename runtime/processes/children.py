"""Child processes of this program: each runs a module on a task, answers on stdout, and complains on stderr."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Self

import msgspec

POLL_SECONDS = 0.02
GRACE_SECONDS = 0.5
"""From the first bad end on: the first to end badly may not be the one to blame, but has an error to tell."""
Child = tuple["subprocess.Popen[bytes]", IO[bytes]]
"""A process, and the file that it complains to."""


class ChildError(RuntimeError):
    """A child that ended badly: the last line it complained, or its exit status."""


def environment(**more: str) -> dict[str, str]:
    """This process's, in which a child finds the modules of this program, wherever it was started."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


class Children:
    """One process a task, started when this is made, and ended when it is closed.

    Parameters
    ----------
    module
        Run as `python -m MODULE TASK`, the task as JSON.
    apart
        In process groups of their own: Ctrl-C is for the one who waits for them.
    """

    def __init__(self, module: str, tasks: Sequence[msgspec.Struct], *, apart: bool = False) -> None:
        self.processes: list[Child] = []
        with ExitStack() as stack:
            for task in tasks:
                errors = stack.enter_context(tempfile.TemporaryFile())
                process = subprocess.Popen(
                    [sys.executable, "-m", module, msgspec.json.encode(task).decode()], stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=errors, env=environment(), process_group=0 if apart else None)
                stack.callback(_end, process)
                self.processes.append((process, errors))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill those that are still there."""
        self._stack.close()

    def answers(self, timeout: float) -> list[bytes]:
        """What each has said, an answer being smaller than a pipe's buffer. Raises ChildError and TimeoutError."""
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process, _ in self.processes):
            if any(process.poll() for process, _ in self.processes):
                time.sleep(GRACE_SECONDS)
                break
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(POLL_SECONDS)
        for process, errors in self.processes:
            if process.poll():
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                raise ChildError(lines[-1] if lines else f"a process ended with status {process.returncode}")
        return [process.stdout.read() for process, _ in self.processes if process.stdout is not None]


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()
