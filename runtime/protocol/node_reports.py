"""Reports of the workers of a node: its agent puts together those that come while node 0 answers the ones before.

A node has one message on its way to node 0 at a time, however many workers it has: a report waits for others only as
long as node 0 is busy anyway (as what is typed, by Nagle's algorithm, RFC 896). They come as datagrams over Unix
sockets in a folder that only this user can enter. Where the agent does not answer, reports go to node 0 itself.
"""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from slipstream.runtime.protocol.to_coordinator import Gathered, Ran, ReportOf
from slipstream.runtime.protocol.to_node_agent import GoOn
from slipstream.runtime.protocol.to_worker import Acknowledged
from slipstream.schedules.schedule import Worker

AGENT_SECONDS = 10.0
"""An agent that has not passed on an answer for so long is not waited for any more."""
_MOST_BYTES = 2**20
_PREFIX = "slipstream-"
_REPORT, _ANSWER = msgspec.json.Decoder(ReportOf), msgspec.json.Decoder(Acknowledged)


class Gatherer:
    """The agent's end."""

    def __init__(self) -> None:
        _remove_abandoned()
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self.folder = self._folder.name
        """Removed at the end, unless the agent is killed."""
        self.address = str(Path(self.folder, "agent"))
        self._socket = _bound(self.address)
        self._workers: dict[Worker, dict[int, str]] = {}
        """By rank, where the last report of each process came from."""
        self._reports: list[ReportOf] = []
        self._asked = False
        """Whether node 0 has not answered yet."""

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def begin(self) -> None:
        """There is a coordinator, which was asked nothing yet."""
        self._asked = False

    def gathered(self) -> list[Gathered]:
        """What is to be sent to node 0 now; nothing while it has not answered."""
        with suppress(BlockingIOError):
            while True:
                data, address = self._socket.recvfrom(_MOST_BYTES)
                report = _REPORT.decode(data)
                self._workers.setdefault(report.report.worker, {})[report.rank] = address
                self._reports.append(report)
        if self._asked or not self._reports:
            return []
        reports, self._reports, self._asked = tuple(self._reports), [], True
        return [Gathered(reports)]

    def answered(self, answer: GoOn) -> None:
        """Pass on an answer of node 0."""
        self._asked = False
        for workers, message in answer.acknowledged:
            data = msgspec.json.encode(message)
            for address in (one for worker in workers for one in self._workers.get(worker, {}).values()):
                with suppress(OSError):  # it has ended, or reads nothing: its report goes to node 0 itself then
                    self._socket.sendto(data, address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._folder.cleanup()


class Reporter:
    """The end of a worker's process. `directly` sends to node 0; `agent` is where that of the node gathers, if it does.

    Reports are sent by one thread, and acknowledgements read by another.
    """

    def __init__(self, rank: int, directly: Callable[[Ran], None], agent: str | None) -> None:
        self._rank = rank
        self._directly = directly
        self._socket: socket.socket | None = None
        if agent is not None:
            self._socket = _bound(f"{agent}-{os.getpid()}")
            self._socket.connect(agent)
        self.gathered = self._socket is not None
        """Whether the agent has the last report."""
        self.sent = 0.0
        """When a report was given to the agent last, by time.monotonic."""

    def send(self, report: Ran) -> None:
        """Send a report."""
        if self.gathered:
            assert self._socket is not None
            with suppress(OSError):  # the agent is gone or stuck, or the report is long, as of many ops
                self._socket.send(msgspec.json.encode(ReportOf(self._rank, report)))
                self.sent = time.monotonic()
                return
        self.send_directly(report)

    def send_directly(self, report: Ran) -> None:
        """Send a report to node 0 itself, and those that follow."""
        self.gathered = False
        self._directly(report)

    def sockets(self) -> list[socket.socket]:
        """What brings acknowledgements, for a selector."""
        return [] if self._socket is None else [self._socket]

    def read(self) -> list[Acknowledged]:
        """Those that have come."""
        found = []
        with suppress(OSError):  # until none is left, or the agent is gone
            while self._socket is not None:
                found.append(_ANSWER.decode(self._socket.recv(_MOST_BYTES)))
        return found


def _remove_abandoned() -> None:
    """Remove the folders of this user's agents that were killed: their sockets take nothing."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/agent"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as tried:
            if path.parent.stat().st_uid == os.getuid():
                try:
                    tried.connect(str(path))
                except ConnectionRefusedError:
                    shutil.rmtree(path.parent)


def _bound(address: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    made.bind(address)
    return made
