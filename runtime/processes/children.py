"""Runs tasks side by side, each in a process of its own, and collects their answers."""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from slipstream.runtime.processes.fork_server import ForkServer, ForkServerError
from slipstream.runtime.processes.fork_server_messages import ProcessSpec, load_target

POLL_SECONDS = 0.02
GRACE_SECONDS = 0.5
"""How long others may take to end once one has failed: the error of another may be the cause."""


class ChildError(RuntimeError):
    """A process has failed. The message is the last line of its log, or its exit status."""


class _Task(msgspec.Struct, frozen=True):
    target: str
    content: str
    answer: str
    """The file for it."""


_TASK = msgspec.json.Decoder(_Task)


class Children:
    """One process a task, started when this is made, and ended when it is closed. Raises ChildError.

    Parameters
    ----------
    target
        `module:function`: takes the task as JSON, gives the answer as bytes.
    fork_server
        One that others use before and after; None: one of its own, which takes seconds to import torch.
    """

    def __init__(self, target: str, tasks: Sequence[msgspec.Struct], fork_server: ForkServer | None = None) -> None:
        self._names = [str(number) for number in range(len(tasks))]
        self._status: dict[str, int] = {}
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-")))
            self.fork_server = fork_server or stack.enter_context(ForkServer())
            stack.callback(self.fork_server.kill_all)
            with suppress(ForkServerError):  # which the first task will tell
                self.fork_server.clean_up("shutil:rmtree", self._folder)
            for name, task in zip(self._names, tasks, strict=True):
                content = msgspec.json.encode(task).decode()
                wrapped = msgspec.json.encode(_Task(target, content, str(self._answer(name)))).decode()
                try:
                    self.fork_server.start(ProcessSpec(name, f"{__name__}:run", wrapped, str(self._log(name))))
                except ForkServerError as error:
                    raise ChildError(str(error)) from None
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes that are left."""
        self._stack.close()

    def answers(self, timeout: float) -> list[bytes]:
        """The answer of each task. Raises ChildError and TimeoutError."""
        try:
            deadline = time.monotonic() + timeout
            while not any(self._status.values()) and any(map(self.fork_server.lives, self._names)):
                if time.monotonic() > deadline:
                    raise TimeoutError
                self._poll(POLL_SECONDS)
            if any(self._status.values()):
                deadline = time.monotonic() + GRACE_SECONDS
                while time.monotonic() < deadline:
                    self._poll(POLL_SECONDS)
        except ForkServerError as error:
            raise ChildError(str(error)) from None
        for name in self._names:
            if self._status.get(name):
                lines: list[str] = []
                with suppress(FileNotFoundError):  # of a process that ended before it had one
                    lines = self._log(name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise ChildError(lines[-1] if lines else f"a process ended with status {self._status[name]}")
        return [self._answer(name).read_bytes() for name in self._names]

    def _poll(self, seconds: float) -> None:
        for ended in self.fork_server.poll(seconds):
            self._status[ended.name] = ended.status

    def _answer(self, name: str) -> Path:
        return self._folder / f"answer-{name}"

    def _log(self, name: str) -> Path:
        return self._folder / f"log-{name}"


def run(data: bytes) -> int:
    """In a process: run the task, and write the answer to its file."""
    task = _TASK.decode(data)
    target: Callable[[bytes], Any] = load_target(task.target)
    Path(task.answer).write_bytes(target(task.content.encode()))
    return 0
