"""Run processes that a step starts together, and receive their results.

Results come over a key-value store. A step runs in a process that does not touch a device, so that
it can end and replace processes that hang.
"""

import faulthandler
import itertools
import json
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.devices.process_tree import dump_stacks
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.fork_server_messages import ProcessSpec, load_target
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.store import connect_store, host_store
from slipstream.runtime.replay.torch_groups import TCPStore

LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
LOOK_SECONDS = 0.005
_NUMBERS = itertools.count()


class CrewError(RuntimeError):
    """Exception for a process that has failed, or does not end. The message is one line."""


class Member:
    """Process of a crew."""

    def __init__(self, place: int, size: int, store: TCPStore, task: dict[str, Any]) -> None:
        self.place, self.size, self.store, self.task = place, size, store, task
        self._told = 0
        self._met = 0

    def tell(self, **news: Any) -> None:
        """Report something to the step."""
        self.store.set(f"news {self.place} {self._told}", json.dumps(news))
        self._told += 1

    def meet(self) -> None:
        """Wait until all members are here; from the main thread only."""
        self._met += 1
        self.store.add(f"met {self._met}", 1)
        while self.store.add(f"met {self._met}", 0) < self.size:
            time.sleep(LOOK_SECONDS)


class News(NamedTuple):
    """Report of a member."""

    place: int
    said: dict[str, Any]


class Crew:
    """Context manager of a crew, at whose end no process is left.

    Parameters
    ----------
    target
        `module:function`, called with a `Member`.
    tasks
        One for each process: any JSON value.
    log
        File to which the output of the processes is appended.
    """

    def __init__(
        self, fork_server: ForkServer, target: str, tasks: Sequence[dict[str, Any]], log: Path
    ) -> None:
        self._fork_server, self._log = fork_server, log
        self.store, self._opened = host_store()
        self._names = [f"{target} {next(_NUMBERS)}" for _ in tasks]
        self._read = [0] * len(tasks)
        self._status: dict[str, int] = {}
        for place, (name, task) in enumerate(zip(self._names, tasks, strict=True)):
            content = {
                "place": place,
                "size": len(tasks),
                "host": self._opened.host,
                "port": self._opened.port,
                "target": target,
                "task": task,
            }
            module = target.partition(":")[0]
            fork_server.start_process(
                ProcessSpec(
                    name,
                    f"{__name__}:run_member",
                    json.dumps(content),
                    str(log),
                    append=True,
                    imports=(module,),
                )
            )

    def news(self, seconds: float) -> Iterator[News]:
        """Yield the reports of members, until all have ended.

        Raises CrewError if one fails, or if there was no report for `seconds`; the stacks of all
        are in the log then.
        """
        deadline = time.monotonic() + seconds
        while True:
            self._look()
            ended, bad = (
                len(self._status) == len(self._names),
                {*self._status.values()} - {0, -signal.SIGKILL},
            )
            # After the look: whoever has ended has told all.
            for place, number in enumerate(self._read):
                while self.store.check([key := f"news {place} {number}"]):
                    self._read[place] = number = number + 1
                    deadline = time.monotonic() + seconds
                    said = json.loads(self.store.get(key))
                    if "failed" in said:
                        raise CrewError(said["failed"])
                    yield News(place, said)
            if bad:
                raise CrewError(f"a process ended with status {min(bad)}")
            if ended:
                return
            if time.monotonic() > deadline:
                self.dump_stacks()
                raise CrewError(f"nothing has happened for {seconds:.0f} s")
            time.sleep(LOOK_SECONDS)

    def pids(self) -> list[int]:
        """Return the live processes, by place."""
        self._look()
        return [
            self._fork_server.pids[name] for name in self._names if name in self._fork_server.pids
        ]

    def dump_stacks(self) -> None:
        """Append the stacks of all threads to the log."""
        dump_stacks(self.pids(), self._log)

    def _look(self) -> None:
        self._status.update(
            (process.name, process.status)
            for process in self._fork_server.poll(0)
            if process.name in self._names
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._fork_server.kill_all()


def run_member(data: bytes) -> int:
    """Call the target in the process of a member."""
    content = json.loads(data)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    # As a machine of its own, so that NCCL takes several processes of one card.
    os.environ.update(
        {
            **LOOPBACK,
            "NCCL_HOSTID": f"process-{os.getpid()}",
            **content["task"].get("environment", {}),
        }
    )
    member = Member(
        content["place"],
        content["size"],
        connect_store(Rendezvous(content["host"], content["port"])),
        content["task"],
    )
    try:
        load_target(content["target"])(member)
    except Exception as error:
        traceback.print_exc()
        text = str(error).strip().splitlines()
        member.tell(failed=f"{type(error).__name__}: {text[0] if text else ''}")
        return 1
    return 0
