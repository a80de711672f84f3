"""Can two processes of this machine train together? They meet as workers do, and exchange a tensor and a sum."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import IO

import msgspec
import torch

from runtime.cluster.membership import Lighthouse, Member
from runtime.cluster.rendezvous import LOOPBACK, Rendezvous, connect_store, host_store, interface_towards
from runtime.replay.comm import Epoch
from schedules.schedule import Worker

WORKERS = (Worker(0, 0), Worker(1, 0))
NUMBERS = 2**18
"""Of float32 in the tensor that goes to and fro: 1 MiB."""
ROUNDS = 8


class GreetingError(RuntimeError):
    """The two did not come together, or got other numbers than were sent. The message is one line."""


class Greeting(msgspec.Struct, frozen=True):
    """How it went: seconds to meet and to make the groups, and of a transfer of 1 MiB."""

    meeting_seconds: float
    transfer_seconds: float


class _Task(msgspec.Struct, frozen=True):
    worker: Worker
    lighthouse: str
    rendezvous: Rendezvous


class Greeters:
    """Two processes, started when this is made and ended when it is closed."""

    def __init__(self) -> None:
        with ExitStack() as stack:
            lighthouse = Lighthouse(LOOPBACK, len(WORKERS))
            stack.callback(lighthouse.close)
            self._store, opened = host_store()
            self._processes: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
            for worker in WORKERS:
                errors = stack.enter_context(tempfile.TemporaryFile())
                process = _start(_Task(worker, lighthouse.url, opened), errors)
                stack.callback(_end, process)
                self._processes.append((process, errors))
            self._stack = stack.pop_all()

    def __enter__(self) -> "Greeters":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait(self, timeout: float) -> Greeting:
        """What the second of them measured. Raises GreetingError."""
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process, _ in self._processes):
            if any(process.poll() for process, _ in self._processes):
                break
            if time.monotonic() > deadline:
                raise GreetingError(f"two processes did not meet and talk within {timeout:.0f} s")
            time.sleep(0.02)
        for process, errors in self._processes:
            if process.poll():
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                raise GreetingError(lines[-1] if lines else f"a process ended with status {process.returncode}")
        output = self._processes[1][0].stdout
        assert output is not None
        return msgspec.json.decode(output.read(), type=Greeting)


def _start(task: _Task, errors: IO[bytes]) -> "subprocess.Popen[bytes]":
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen([sys.executable, "-m", "runtime.greeting", msgspec.json.encode(task).decode()],
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, process_group=0,
                            env={**os.environ, "PYTHONPATH": path})  # Ctrl-C is for the one who waits for them


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()


def _greet(task: _Task) -> Greeting:
    """One side: the first worker sends, the second sends back one more."""
    began = time.perf_counter()
    with Member(task.lighthouse, task.worker) as member:
        quorum = member.join(timedelta(seconds=30))
        store = connect_store(task.rendezvous)
        epoch = Epoch(quorum, task.worker, {0: WORKERS}, transport="gloo", device=torch.device("cpu"), store=store)
        met = time.perf_counter()
        (peer,) = (worker for worker in WORKERS if worker != task.worker)
        ball = torch.arange(NUMBERS, dtype=torch.float32)
        for _ in range(ROUNDS):
            if task.worker == WORKERS[0]:
                epoch.send(ball, peer, 1).wait()
                ball = epoch.receive((NUMBERS,), torch.float32, peer, 1).take()
            else:
                ball = epoch.receive((NUMBERS,), torch.float32, peer, 1).take() + 1
                epoch.send(ball, peer, 1).wait()
        seconds = (time.perf_counter() - met) / (2 * ROUNDS)
        epoch.sum_over_stage(0, [ball])
        if not torch.equal(ball, 2 * (torch.arange(NUMBERS, dtype=torch.float32) + ROUNDS)):
            raise GreetingError("gloo gave other numbers than were sent")
        epoch.settle()
        epoch.drop()
    return Greeting(met - began, seconds)


def main() -> None:
    """Greet as told by the first argument, and answer in JSON."""
    task = msgspec.json.decode(sys.argv[1], type=_Task)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(task.rendezvous) or "")
    sys.stdout.write(msgspec.json.encode(_greet(task)).decode())
    sys.stdout.flush()


if __name__ == "__main__":
    main()
