"""Track which workers are connected, silent, given up or ended.

Unfinished messages of a worker's ranks are dropped with its connections. A worker whose process
ends may have reported the reason just before, so its last messages are handled first.
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
from slipstream.runtime.coordinator.run_spec import RunSpec
from slipstream.runtime.processes.process_manager import ProcessManager
from slipstream.runtime.protocol.channel import Frame, encode_frame
from slipstream.runtime.protocol.to_coordinator import JoinWorker, ToCoordinator, WorkerEnded
from slipstream.runtime.protocol.to_worker import EndOrder, Leave
from slipstream.schedules.schedule import Worker

DRAIN_SECONDS = 1.0
"""Time that the last messages of an ended process may take to arrive."""

CHECKS_PER_TIMEOUT = 10
"""Number of checks for silent workers in each heartbeat timeout."""
SILENT_SHARE = 0.5
"""Share of the timeout after which silent workers are lost with another of their machine."""

EnqueueCallback = Callable[[Callable[[], None]], None]
"""Function that adds a function to the event loop's queue, as an event."""
LostCallback = Callable[[Worker, str, float], None]
"""Function called with a lost worker, the reason, and when it last sent (0: unknown)."""


class WorkerConnections:
    """Connections to a run's workers, which show who is silent, lost or ended."""

    def __init__(
        self, run: RunSpec, processes: ProcessManager, put: EnqueueCallback, lost: LostCallback
    ) -> None:
        self._run = run
        self._processes = processes
        self._put = put
        self._lost = lost
        self._grid = frozenset(run.request.schedule.grid.workers())
        self._ranks = run.request.config.training.tensor_parallel
        self._domains = run.failure_domains
        self._timeout = run.setup.common.resilience.heartbeat_timeout_seconds
        self._looked = time.monotonic()
        # What is known of each worker's processes.
        self._connections: dict[Worker, dict[int, Connection]] = {}
        """Connections of each worker that is not lost, by rank; some may have ended."""
        self._reports = RankReports(
            self._ranks, lambda worker, order: self.send(worker, EndOrder(order))
        )
        self._ended: dict[Worker, WorkerEnded] = {}
        """Workers whose processes have ended, but whose last messages may still arrive."""
        self._given_up: set[Worker] = set()
        """Workers that count as lost, but whose processes may still run."""
        self._last_sent: tuple[msgspec.Struct | None, Frame] = None, Frame(b"", b"")
        """Last message and its bytes: a message to all workers is encoded only once."""

    def __contains__(self, worker: Worker) -> bool:
        return any(not connection.over for connection in self._connections.get(worker, {}).values())

    @property
    def check_interval_seconds(self) -> float:
        """Seconds between two checks for silent workers."""
        return self._timeout / CHECKS_PER_TIMEOUT

    def admit_process(self, connection: Connection, message: JoinWorker) -> bool:
        """Add the connection of a worker's process, or close it; return whether it was added.

        It is closed if the process is of another run or was given up (it is then told to leave), is
        not of the grid, or if another process is still connected in its place.
        """
        worker, epoch = message.worker, self._run.setup.epoch
        if message.epoch and (message.epoch >= epoch or self._run.behind is None):
            # It was given up, or belongs to another run, or follows a newer one.
            connection.send(encode_frame(Leave()))
            connection.close()
            return False
        # A process that is not of this grid, or of which another is still connected, is refused.
        others = {
            rank: other
            for rank, other in self._connections.get(worker, {}).items()
            if not other.over
        }
        if (
            message.rank in others
            or worker not in self._grid
            or message.rank not in range(self._ranks)
        ):
            connection.close()  # not ours: a process is restarted only after its end was handled
            return False
        self._connections[worker] = {**others, message.rank: connection}
        self._given_up.discard(worker)
        return True

    def send(self, worker: Worker, message: msgspec.Struct) -> None:
        """Send a message to all processes of a worker that are connected.

        After `Leave`, the worker may be silent, and its end counts as no loss.
        """
        if isinstance(message, Leave):  # its end is expected
            self._given_up.add(worker)
            for connection in self._connections.get(worker, {}).values():
                connection.heard = math.inf
        if message is not self._last_sent[0] and message != self._last_sent[0]:
            self._last_sent = message, encode_frame(message)
        for connection in self._connections.get(worker, {}).values():
            connection.send(self._last_sent[1])

    def record_sign_of_life(self, connection: Connection) -> bool:
        """Record that a worker sent something; return whether its connection is still in use."""
        worker = connection.peer
        if not isinstance(worker, Worker) or not self._is_current(connection):
            return False
        if connection.heard < math.inf:
            connection.heard = time.monotonic()
        return True

    def combine_message(
        self, connection: Connection, message: ToCoordinator
    ) -> ToCoordinator | None:
        """Add a rank's message; return the worker's, or None if it is incomplete or outdated."""
        # A connection that was replaced, or whose worker was given up, no longer counts.
        worker = connection.peer
        if not isinstance(worker, Worker) or not self.record_sign_of_life(connection):
            return None
        return self._reports.add_message(worker, connection.rank, message)

    @property
    def incomplete_workers(self) -> list[Worker]:
        """Workers of which some processes, but not all, are ready for an order."""
        return self._reports.incomplete_workers

    def find_connection(self, worker: Worker, rank: int) -> Connection | None:
        """Return the connection of a worker's process, or None if it is not connected."""
        connection = self._connections.get(worker, {}).get(rank)
        return None if connection is None or connection.over else connection

    def expect_heartbeats(self, worker: Worker) -> None:
        """Expect heartbeats of all processes of a worker from now on, as they are ready."""
        for connection in self._connections[worker].values():
            connection.heard = time.monotonic()

    def give_up_silent(self) -> None:
        """Kill and give up each worker of which a process missed the heartbeat timeout.

        All other workers of its machine are given up, too, if each was silent for `SILENT_SHARE` of
        the timeout, unless one of them is of node 0. Times at which this process did not run do not
        count.
        """
        # Time in which this process was not scheduled, so that it could not have read any message,
        # does not count. One interval does nevertheless; otherwise a silent worker would never be
        # given up if every check is late.
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap > 3 * self.check_interval_seconds:
            for ranks in self._connections.values():
                for connection in ranks.values():
                    connection.heard += gap - self.check_interval_seconds
        # Find who has been silent for a while, and since when its most silent process was.
        silent: dict[Worker, float] = {}
        for worker, ranks in self._connections.items():
            heard = min((connection.heard for connection in ranks.values()), default=math.inf)
            if heard < now - SILENT_SHARE * self._timeout:
                silent[worker] = heard
        # Give up those that missed the timeout, and the machines that are lost with them.
        missed = {worker for worker, heard in silent.items() if heard < now - self._timeout}
        lost = set(missed)
        for worker in missed:
            lost.update(self._find_lost_with(worker, silent))
        for worker in sorted(lost):
            # Killed first, as its other processes may then end by themselves.
            self._processes.kill_worker(worker)
            self.give_up_worker(worker, f"worker {worker} stopped answering", silent[worker])

    def give_up_worker(self, worker: Worker, reason: str, since: float = 0.0) -> None:
        """Disconnect a worker and count it as lost, though its process may still run.

        `since` is the time of `time.monotonic` at which it last sent anything; 0.0: unknown.
        """
        self._given_up.add(worker)
        self._mark_lost(worker, reason, since)

    def give_up_failed(self, worker: Worker, reason: str) -> None:
        """Count a worker as lost because it has reported an error of its own."""
        self.give_up_worker(
            worker, f"worker {worker} failed: {reason} (see {self._log_path_of(worker)})"
        )

    def has_given_up_all(self, workers: Collection[Worker]) -> bool:
        """Return whether none of `workers` is connected, and some were given up."""
        if any(worker in self for worker in workers):
            return False
        return any(worker in self._given_up for worker in workers)

    def handle_disconnect(self, connection: Connection) -> bool:
        """Mark an ended connection, its messages handled, as over; return whether it was in use.

        False if it is not a worker's, or is no longer the one kept for the worker's rank. With the
        last connection of a worker whose process has ended, that end is handled.
        """
        worker = connection.peer
        if not isinstance(worker, Worker) or not self._is_current(connection):
            return False
        connection.over = True
        if worker in self._ended and worker not in self:
            self._handle_end(self._ended.pop(worker))
        return True

    def handle_node_loss(self, node: int) -> None:
        """Give up a lost node's workers, which end with it; only disconnect unready ones."""
        for worker in self._processes.get_node_workers(node):
            if self._is_watched(worker):
                self.give_up_worker(worker, f"worker {worker} is gone with node {node}")
            else:  # it was not ready yet
                self._close_worker(worker)

    def handle_process_end(self, ended: WorkerEnded) -> None:
        """Handle a worker's end after its last messages, or after `DRAIN_SECONDS`."""
        # Its last messages may still be on the way, and tell why it ended.
        if ended.worker in self:
            self._ended[ended.worker] = ended
            asyncio.get_running_loop().call_later(
                DRAIN_SECONDS, self._put, lambda: self._handle_drained_end(ended)
            )
        else:
            self._handle_end(ended)

    def close_all(self) -> None:
        """Close all connections when all sent data has been written."""
        for worker in list(self._connections):
            self._close_worker(worker)

    def _find_lost_with(self, worker: Worker, silent: Collection[Worker]) -> list[Worker]:
        """Return all others on a lost worker's machine if all are `silent`, none here."""
        # The machine of this process is excepted, because this process would be gone as well.
        others = [
            other
            for other in self._domains.workers_failing_with(worker)
            if other != worker and self._is_watched(other)
        ]
        here = any(other in self._run.facts.shares[0] for other in (worker, *others))
        all_silent = all(other in silent for other in others)
        return others if all_silent and not here else []

    def _close_worker(self, worker: Worker) -> None:
        self._reports.drop_worker(worker)
        for connection in self._connections.pop(worker, {}).values():
            connection.close()

    def _is_watched(self, worker: Worker) -> bool:
        return any(
            connection.heard < math.inf for connection in self._connections.get(worker, {}).values()
        )

    def _is_current(self, connection: Connection) -> bool:
        worker = connection.peer
        return (
            isinstance(worker, Worker)
            and self._connections.get(worker, {}).get(connection.rank) is connection
        )

    def _handle_drained_end(self, ended: WorkerEnded) -> None:
        if self._ended.get(ended.worker) is ended:
            self._handle_end(self._ended.pop(ended.worker))

    def _handle_end(self, ended: WorkerEnded) -> None:
        if ended.worker in self._given_up:
            self._given_up.remove(ended.worker)
        else:
            self._mark_lost(ended.worker, self._describe_end(ended))
        self._processes.handle_worker_end(ended)

    def _mark_lost(self, worker: Worker, reason: str, since: float = 0.0) -> None:
        """Close a worker's connections and report it as lost; `since` as in `give_up_worker`."""
        self._close_worker(worker)
        # No connection is left whose end would lead to the handling of the process's end.
        ended = self._ended.pop(worker, None)
        if ended is not None:
            self._put(lambda: self._handle_end(ended))
        self._lost(worker, reason, since)

    def _describe_end(self, ended: WorkerEnded) -> str:
        if ended.status < 0:
            with suppress(ValueError):  # a signal that has no name
                return f"worker {ended.worker} was killed by {signal.Signals(-ended.status).name}"
        return (
            f"worker {ended.worker} ended with exit status {ended.status} "
            f"(see {self._log_path_of(ended.worker)})"
        )

    def _log_path_of(self, worker: Worker) -> Path:
        return self._run.request.out / "logs" / f"worker-{worker}.log"
