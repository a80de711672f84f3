"""Run tasks in parallel, each in a process of its own, and collect their results."""

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
"""Longest wait for reports of the fork server at a time."""
GRACE_SECONDS = 0.5
"""Wait after the first failure for others, one of which may be its cause."""


class ChildError(RuntimeError):
    """Error for a failed process: the last line of its log, or another reason."""


class _Task(msgspec.Struct, frozen=True):
    """Task of one process as JSON, `content`, and the function `target` that takes it."""

    target: str
    content: str
    answer: str
    """Path of the file that the result is written to."""


_TASK = msgspec.json.Decoder(_Task)


class ChildProcesses:
    """Processes that run one task each, started here and killed by `close`.

    Raises ChildError if a process cannot be started.

    Parameters
    ----------
    target
        `module:function` that takes the task as JSON and returns the result as bytes.
    fork_server
        Fork server that starts the processes, and outlives them. None: start a new one, which takes
        seconds to import torch.
    """

    def __init__(
        self, target: str, tasks: Sequence[msgspec.Struct], fork_server: ForkServer | None = None
    ) -> None:
        self._names = [str(number) for number in range(len(tasks))]
        self._status: dict[str, int] = {}
        with ExitStack() as stack:
            self._folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-"))
            )
            self.fork_server = fork_server or stack.enter_context(ForkServer())
            # A fork server of the caller is not closed here, so its processes must be killed.
            stack.callback(self.fork_server.kill_all)
            # If this process is killed, the server removes the folder in its stead.
            with suppress(ForkServerError):  # starting the first task raises the same error
                self.fork_server.register_cleanup("shutil:rmtree", self._folder)
            for name, task in zip(self._names, tasks, strict=True):
                content = msgspec.json.encode(task).decode()
                encoded_task = msgspec.json.encode(
                    _Task(target, content, str(self._result_path(name)))
                ).decode()
                try:
                    self.fork_server.start_process(
                        ProcessSpec(
                            name, f"{__name__}:run_task", encoded_task, str(self._log_path(name))
                        )
                    )
                except ForkServerError as error:
                    raise ChildError(str(error)) from None
            # All have started: from now on `close` cleans up.
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all live processes of the fork server, even those not started here.

        Logs and results are deleted, and a fork server that was started here is ended.
        """
        self._stack.close()

    def collect_results(self, timeout: float) -> list[bytes]:
        """Wait for all tasks, and return their results in order.

        Raises ChildError if a process fails, and TimeoutError after `timeout` seconds.
        """
        try:
            # Until all have ended, or one has failed.
            deadline = time.monotonic() + timeout
            while not any(self._status.values()) and any(
                map(self.fork_server.is_alive, self._names)
            ):
                if time.monotonic() > deadline:
                    raise TimeoutError
                self._record_ended(POLL_SECONDS)
            # The first to fail may only follow from another failure: wait for more.
            if any(self._status.values()):
                deadline = time.monotonic() + GRACE_SECONDS
                while time.monotonic() < deadline:
                    self._record_ended(POLL_SECONDS)
        except ForkServerError as error:
            raise ChildError(str(error)) from None
        # Report the first task that failed, by the last line of its log.
        for name in self._names:
            if self._status.get(name):
                lines: list[str] = []
                with suppress(FileNotFoundError):  # the process ended before it opened its log
                    lines = (
                        self._log_path(name)
                        .read_text(encoding="utf-8", errors="replace")
                        .strip()
                        .splitlines()
                    )
                raise ChildError(
                    lines[-1] if lines else f"a process ended with status {self._status[name]}"
                )
        return [self._result_path(name).read_bytes() for name in self._names]

    def _record_ended(self, seconds: float) -> None:
        for ended in self.fork_server.poll(seconds):
            self._status[ended.name] = ended.status

    def _result_path(self, name: str) -> Path:
        return self._folder / f"answer-{name}"

    def _log_path(self, name: str) -> Path:
        return self._folder / f"log-{name}"


def run_task(data: bytes) -> int:
    """Call the function of an encoded task; write the result to the task's file.

    Returns exit status 0.
    """
    task = _TASK.decode(data)
    target: Callable[[bytes], Any] = load_target(task.target)
    Path(task.answer).write_bytes(target(task.content.encode()))
    return 0
