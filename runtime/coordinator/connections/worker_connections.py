"""Worker connections: which workers are connected, have been silent, are given up, or have ended; what they say.

What the processes of a worker have said goes with their connections. A worker whose process ends may have said why just
before: its last messages are handled first.
"""

import asyncio
import math
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from slipstream.runtime.coordinator.connections.rank_reports import RankReports
from slipstream.runtime.coordinator.connections.server import Connection
from slipstream.runtime.coordinator.run import Run
from slipstream.runtime.processes.process_manager import ProcessManager
from slipstream.runtime.protocol.channel import Frame, frame
from slipstream.runtime.protocol.to_coordinator import Ended, JoinWorker, ToCoordinator
from slipstream.runtime.protocol.to_worker import EndOrder, Leave
from slipstream.schedules.schedule import Worker

DRAIN_SECONDS = 1.0
"""How long the last messages of a process that has ended may take to arrive."""

LOOKS_PER_TIMEOUT = 10
SILENT_TOO = 0.5
"""Of the heartbeat timeout: whoever lives is heard several times in that."""

Put = Callable[[Callable[[], None]], None]
"""Has something done as an event of its own, later."""
Lost = Callable[[Worker, str, float], None]
"""Called with a worker that is gone, why, and since when by time.monotonic, or 0.0."""


class WorkerConnections:
    """Those of one run."""

    def __init__(self, run: Run, processes: ProcessManager, put: Put, lost: Lost) -> None:
        self._run = run
        self._processes = processes
        self._put = put
        self._lost = lost
        self._known = frozenset(run.schedule.grid.workers())
        self._ranks = run.config.training.tensor_parallel
        self._domains = run.domains
        self._timeout = run.setup.heartbeat_timeout_seconds
        self._looked = time.monotonic()
        self._connections: dict[Worker, dict[int, Connection]] = {}
        """By rank, of those that are not lost; some may be over."""
        self._reports = RankReports(self._ranks, lambda worker, order: self.send(worker, EndOrder(order)))
        self._ended: dict[Worker, Ended] = {}
        """Processes that have ended, as long as messages of theirs may still arrive."""
        self._given_up: set[Worker] = set()
        """Workers that were lost before their processes have ended."""
        self._last_sent: tuple[msgspec.Struct | None, Frame] = None, Frame(b"", b"")
        """The last message and its bytes: what is equal for all workers is encoded once."""

    def __contains__(self, worker: Worker) -> bool:
        return any(not one.over for one in self._connections.get(worker, {}).values())

    @property
    def interval_seconds(self) -> float:
        """From one look for silent ones to the next."""
        return self._timeout / LOOKS_PER_TIMEOUT

    def admit(self, connection: Connection, message: JoinWorker) -> bool:
        """Take in a worker that has connected; whether it may come in. Else it is told to leave, or to ask again."""
        worker, epoch = message.worker, self._run.setup.epoch
        if message.epoch and (message.epoch >= epoch or self._run.behind is None):
            connection.send(frame(Leave()))  # it was given up, or belongs to another run, or follows a newer one
            connection.close()
            return False
        others = {rank: one for rank, one in self._connections.get(worker, {}).items() if not one.over}
        if message.rank in others or worker not in self._known or message.rank not in range(self._ranks):
            connection.close()  # not ours: a process is started anew only once its end has been handled
            return False
        self._connections[worker] = {**others, message.rank: connection}
        self._given_up.discard(worker)
        return True

    def send(self, worker: Worker, message: msgspec.Struct) -> None:
        """Send to all processes of a worker; nothing happens where they are not there."""
        if isinstance(message, Leave):  # its end is no news
            self._given_up.add(worker)
            for connection in self._connections.get(worker, {}).values():
                connection.heard = math.inf
        if message is not self._last_sent[0] and message != self._last_sent[0]:
            self._last_sent = message, frame(message)
        for connection in self._connections.get(worker, {}).values():
            connection.send(self._last_sent[1])

    def hears(self, connection: Connection) -> bool:
        """Whether a process's present connection is the one that a message came over, which shows that it lives."""
        worker = connection.peer
        if not isinstance(worker, Worker) or not self._is_present(connection):
            return False
        if connection.heard < math.inf:
            connection.heard = time.monotonic()
        return True

    def take(self, connection: Connection, message: ToCoordinator) -> ToCoordinator | None:
        """What a worker says now that one of its processes has said this; None: nothing yet, or it is gone."""
        worker = connection.peer
        if not isinstance(worker, Worker) or not self.hears(connection):
            return None
        return self._reports.take(worker, connection.rank, message)

    @property
    def incomplete(self) -> list[Worker]:
        """Workers of which some processes are ready, and not all."""
        return self._reports.incomplete

    def of(self, worker: Worker, rank: int) -> Connection | None:
        """That of a worker's process, where it is there."""
        found = self._connections.get(worker, {}).get(rank)
        return None if found is None or found.over else found

    def ready(self, worker: Worker) -> None:
        """It sends heartbeats from now on."""
        for connection in self._connections[worker].values():
            connection.heard = time.monotonic()

    def give_up_silent(self) -> None:
        """Give up who has shown no sign of life for too long, and all of its machine with it where none there has."""
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap > 3 * self.interval_seconds:
            # This process did not run, as when it was stopped: it could not have read any message. One interval counts
            # all the same; otherwise a silent worker would never be given up where every look is late.
            for ranks in self._connections.values():
                for one in ranks.values():
                    one.heard += gap - self.interval_seconds
        since = now - SILENT_TOO * self._timeout
        silent = {worker: found for worker, ranks in self._connections.items()
                  if (found := {rank: one.heard for rank, one in ranks.items() if one.heard < since})}
        missed = {worker for worker, ranks in silent.items() if min(ranks.values()) < now - self._timeout}
        for worker in sorted(missed | {other for one in missed for other in self._gone_with(one, silent)}):
            self._processes.kill(worker)  # first: the others of its processes may end by themselves then
            self.give_up(worker, f"worker {worker} stopped answering", min(silent[worker].values()))

    def give_up(self, worker: Worker, reason: str, since: float = 0.0) -> None:
        """Count a worker as lost whose process may not have ended."""
        self._given_up.add(worker)
        self._lose(worker, reason, since)

    def fail(self, worker: Worker, reason: str) -> None:
        """A worker has given up by itself."""
        self.give_up(worker, f"worker {worker} failed: {reason} (see {self._log_of(worker)})")

    def are_given_up(self, workers: Collection[Worker]) -> bool:
        """Whether no worker of a node is there, and one was given up: its machine may be gone without a word."""
        return any(worker in self._given_up for worker in workers) and not any(worker in self for worker in workers)

    def disconnected(self, connection: Connection) -> bool:
        """A connection has ended, and all messages that came over it have been handled; whether one of a worker that
        is there."""
        worker = connection.peer
        if not isinstance(worker, Worker) or not self._is_present(connection):
            return False
        connection.over = True
        if worker in self._ended and worker not in self:
            self._handle_end(self._ended.pop(worker))
        return True

    def node_gone(self, node: int) -> None:
        """A node agent is gone: one that has lost the coordinator, or has died, ends its workers."""
        for worker in self._processes.workers_of(node):
            if self._is_watched(worker):
                self.give_up(worker, f"worker {worker} is gone with node {node}")
            else:  # it was not ready yet
                self._close(worker)

    def process_ended(self, ended: Ended) -> None:
        """Handle a worker's last messages before its end: one that ends by itself has sent the reason."""
        if ended.worker in self:
            self._ended[ended.worker] = ended
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._put, lambda: self._drained(ended))
        else:
            self._handle_end(ended)

    def close(self) -> None:
        """Close all connections, once what was sent has gone out."""
        for worker in list(self._connections):
            self._close(worker)

    def _gone_with(self, worker: Worker, silent: Collection[Worker]) -> list[Worker]:
        """All others of the machine of one that is gone, where all of them are silent, too: the machine is gone.

        Not that of this process, which would be gone, too.
        """
        others = [one for one in self._domains.together(worker) if one != worker and self._is_watched(one)]
        here = any(one in self._run.shares[0] for one in (worker, *others))
        return [] if here or not all(one in silent for one in others) else others

    def _close(self, worker: Worker) -> None:
        self._reports.forget(worker)
        for connection in self._connections.pop(worker, {}).values():
            connection.close()

    def _is_watched(self, worker: Worker) -> bool:
        return any(one.heard < math.inf for one in self._connections.get(worker, {}).values())

    def _is_present(self, connection: Connection) -> bool:
        worker = connection.peer
        return isinstance(worker, Worker) and self._connections.get(worker, {}).get(connection.rank) is connection

    def _drained(self, ended: Ended) -> None:
        if self._ended.get(ended.worker) is ended:
            self._handle_end(self._ended.pop(ended.worker))

    def _handle_end(self, ended: Ended) -> None:
        """A process has ended, and all its messages have been handled."""
        if ended.worker in self._given_up:
            self._given_up.remove(ended.worker)
        else:
            self._lose(ended.worker, self._describe(ended))
        self._processes.ended(ended)

    def _lose(self, worker: Worker, reason: str, since: float = 0.0) -> None:
        """Count a worker as lost, and close its connection."""
        self._close(worker)
        ended = self._ended.pop(worker, None)
        if ended is not None:
            self._put(lambda: self._handle_end(ended))
        self._lost(worker, reason, since)

    def _describe(self, ended: Ended) -> str:
        if ended.status < 0:
            with suppress(ValueError):  # a signal that has no name
                return f"worker {ended.worker} was killed by {signal.Signals(-ended.status).name}"
        return f"worker {ended.worker} ended with exit status {ended.status} (see {self._log_of(ended.worker)})"

    def _log_of(self, worker: Worker) -> Path:
        return self._run.out / "logs" / f"worker-{worker}.log"
