"""Send together the reports of a node's workers that arrive while node 0 is busy.

A node has one message on its way to node 0 at a time, however many workers it has. A report waits
for others only while node 0 is busy anyway (like keystrokes under Nagle's algorithm, RFC 896).
Reports come as datagrams over Unix sockets in a folder that only this user can enter. If the agent
does not answer, reports go to node 0 directly.
"""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import msgspec

from slipstream.runtime.protocol.to_coordinator import GatheredReports, IterationReport, RankReport
from slipstream.runtime.protocol.to_node_agent import ReportsAcknowledged
from slipstream.runtime.protocol.to_worker import Acknowledged
from slipstream.schedules.schedule import Worker

AGENT_ANSWER_SECONDS = 10.0
"""Time to wait for the agent's answer, before reports go to node 0 directly."""
_MOST_BYTES = 2**20
_PREFIX = "slipstream-"
_REPORT = msgspec.json.Decoder(RankReport)
_ANSWER = msgspec.json.Decoder(Acknowledged)


class ReportGatherer:
    """Receiver of the iteration reports of a node's workers, in the node's agent.

    Creating it removes the folders that this user's killed agents have left.
    """

    def __init__(self) -> None:
        _remove_abandoned_folders()
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self.folder = self._folder.name
        """Path of the sockets' folder, removed at the end unless the agent is killed."""
        self.address = str(Path(self.folder, "agent"))
        self._socket = _bind_socket(self.address)
        self._workers: dict[Worker, dict[int, str]] = {}
        """Path of the socket of each process's last report, by worker and rank."""
        self._reports: list[RankReport] = []
        self._asked = False
        """True while node 0 has not answered the reports that were last sent to it."""

    def fileno(self) -> int:
        """Return the descriptor of the socket that receives reports, for a selector."""
        return self._socket.fileno()

    def forget_unanswered(self) -> None:
        """Stop waiting for a lost coordinator to answer; the next reports go out at once."""
        self._asked = False

    def collect_reports(self) -> list[GatheredReports]:
        """Receive the reports that have arrived; return the message to send now, or none.

        There is none without reports, and while the coordinator has not answered the last message.
        """
        # Read until nothing is left; each report tells to which path its answer goes.
        with suppress(BlockingIOError):
            while True:
                data, address = self._socket.recvfrom(_MOST_BYTES)
                report = _REPORT.decode(data)
                self._workers.setdefault(report.report.worker, {})[report.rank] = address
                self._reports.append(report)
        if self._asked or not self._reports:
            return []
        reports, self._reports, self._asked = tuple(self._reports), [], True
        return [GatheredReports(reports)]

    def forward_answer(self, answer: ReportsAcknowledged) -> None:
        """Pass node 0's answer on to the workers; the next reports may then be sent."""
        self._asked = False
        # One acknowledgement goes to all processes of several workers.
        for workers, message in answer.acknowledged:
            data = msgspec.json.encode(message)
            for address in (
                path for worker in workers for path in self._workers.get(worker, {}).values()
            ):
                # The process has ended or reads nothing; it then reports to node 0 directly.
                with suppress(OSError):
                    self._socket.sendto(data, address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._folder.cleanup()


class ReportSender:
    """Sender of one process's iteration reports, to its node's agent or directly to node 0.

    `directly` sends a report to node 0. `agent` is the path of the agent's socket; None if the
    agent gathers no reports. If nothing listens there, all reports go to node 0. One thread sends,
    and another reads acknowledgements.
    """

    def __init__(
        self, rank: int, directly: Callable[[IterationReport], None], agent: str | None
    ) -> None:
        self._rank = rank
        self._directly = directly
        self._socket: socket.socket | None = None
        if agent is not None:
            # The agent may have died since it started this process.
            with suppress(OSError), ExitStack() as stack:
                connection = stack.enter_context(_bind_socket(f"{agent}-{os.getpid()}"))
                connection.connect(agent)
                stack.pop_all()
                self._socket = connection
        self.gathered = self._socket is not None
        """True while reports go to the agent, not directly to node 0."""
        self.sent = 0.0
        """Time at which a report was last sent to the agent, by `time.monotonic`; 0: never."""

    def send(self, report: IterationReport) -> None:
        """Send a report to the agent; if impossible, it and later ones to node 0."""
        if self.gathered:
            assert self._socket is not None
            # The agent is gone or stuck, or the report is too long, as with many ops.
            with suppress(OSError):
                self._socket.send(msgspec.json.encode(RankReport(self._rank, report)))
                self.sent = time.monotonic()
                return
        self.send_directly(report)

    def send_directly(self, report: IterationReport) -> None:
        """Send a report, and then all later ones, to node 0 instead of the agent."""
        self.gathered = False
        self._directly(report)

    def list_sockets(self) -> list[socket.socket]:
        """Return the socket on which the agent acknowledges, for a selector; empty without one."""
        return [] if self._socket is None else [self._socket]

    def read_acknowledgements(self) -> list[Acknowledged]:
        """Return the acknowledgements that have arrived from the agent, without waiting."""
        acknowledgements = []
        with suppress(OSError):  # ends the loop when no datagram is left or the agent is gone
            while self._socket is not None:
                acknowledgements.append(_ANSWER.decode(self._socket.recv(_MOST_BYTES)))
        return acknowledgements


def _remove_abandoned_folders() -> None:
    """Remove the folders of this user's agents that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/agent"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            if path.parent.stat().st_uid == os.getuid():
                try:
                    # A socket of a killed agent refuses connections.
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    shutil.rmtree(path.parent)


def _bind_socket(address: str) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bound.setblocking(False)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
