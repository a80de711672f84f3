"""Track which nodes are connected, and exchange messages and reports with their agents."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress

from slipstream.runtime.coordinator.connections.message_validation import MessageBounds
from slipstream.runtime.coordinator.connections.server import Connection
from slipstream.runtime.coordinator.connections.worker_connections import WorkerConnections
from slipstream.runtime.coordinator.run_spec import RunSpec
from slipstream.runtime.processes.process_manager import ProcessManager
from slipstream.runtime.protocol.channel import encode_frame
from slipstream.runtime.protocol.to_coordinator import GatheredReports, IterationReport, JoinNode
from slipstream.runtime.protocol.to_node_agent import (
    NodeSetup,
    NodeTaken,
    ReportsAcknowledged,
    RunEnded,
    StillRunning,
    ToNodeAgent,
)
from slipstream.runtime.protocol.to_worker import Acknowledged
from slipstream.schedules.schedule import Worker

ANNOUNCE_SECONDS = 2.0
"""Time for agents to disconnect after they have been sent the end of the run."""
POLL_SECONDS = 0.005
"""Interval of the checks whether all agents have disconnected."""


class NodeAgents:
    """Connections to the agents of the other nodes. A report is acknowledged the way it came: over
    the worker's own connection, or by its node's agent."""

    def __init__(self, run: RunSpec, processes: ProcessManager, workers: WorkerConnections,
                 bounds: MessageBounds) -> None:
        self._run = run
        self._processes = processes
        self._workers = workers
        self._bounds = bounds
        self._connections: dict[int, Connection] = {}
        self._node_of: dict[Worker, int] = {}
        """Node whose agent forwarded the last report of each worker. Workers that reported directly
        are not in it."""
        self._answers: dict[int, list[tuple[tuple[Worker, ...], Acknowledged]]] = {}
        """Acknowledgements for each node's agent until `send_answers`, with their workers."""

    @property
    def connected_nodes(self) -> Collection[int]:
        """Numbers of the nodes that are connected."""
        return self._connections.keys()

    def find_represented_workers(self, connection: Connection) -> Collection[Worker]:
        """Return the workers of the node whose current connection this is; otherwise none."""
        node = connection.peer
        if not isinstance(node, int) or self._connections.get(node) is not connection:
            return ()
        return self._processes.get_node_workers(node)

    def admit_node(self, connection: Connection, join: JoinNode, *, restarted: bool) -> bool:
        """Answer a node agent that has connected; return whether it now starts all its workers.

        They join like workers that return. An agent that followed the coordinator whose run this
        one continues keeps its live workers; any other that has followed a coordinator is sent
        away. The agent of a node that is still connected, or whose loss has not been noticed yet,
        is told to ask again. `restarted` says that the run has given an order before, so that
        workers join a run in progress.
        """
        node = join.node
        setup, shares, is_known = self._run.setup, self._run.facts.shares, 0 < node < self._run.setup.common.nodes
        if join.epoch and (join.epoch >= setup.epoch or self._run.behind is None):
            why = "its connection had ended" if join.epoch == setup.epoch else "it followed another node 0"
            connection.send(encode_frame(RunEnded(f"node 0 continues without node {node}: {why}")))
            connection.close()
            return False
        before = self._connections.get(node)
        if before is not None and not self._workers.has_given_up_all(self._processes.get_node_workers(node)):
            connection.send(encode_frame(NodeTaken()))
            connection.close()
            return False
        if is_known:
            self._connections[node] = connection
            if before is not None:
                before.close()
            if join.epoch:
                self._processes.record_node_adopted(node, join.alive)
            else:
                self._processes.record_node_started(node)
        connection.send(encode_frame(NodeSetup(
            setup.common, tuple(map(len, shares)), tuple(shares[node]) if is_known else (), self._run.request.config,
            setup.first_iteration, restarted=restarted, epoch=setup.epoch)))
        return is_known and not join.epoch

    def handle_disconnect(self, connection: Connection) -> bool:
        """Remove a connection that has ended. Return whether it was the current one of its node."""
        node = connection.peer
        if not isinstance(node, int) or self._connections.get(node) is not connection:
            return False
        del self._connections[node]
        return True

    def send(self, node: int, message: ToNodeAgent) -> None:
        """Send a message to the agent of a node, if it is connected."""
        if node in self._connections:
            self._connections[node].send(encode_frame(message))

    def receive_reports(self, node: int, here: Collection[Worker], gathered: GatheredReports,
                        following: int) -> tuple[IterationReport, ...]:
        """Add a batch of reports from a node's agent; return those of complete workers.

        Reports of workers that are not `here`, on the node, are ignored. A worker that reports an
        impossible value is disconnected. `following` is the iteration to be committed next. The
        agent is answered by `send_answers`, even if no worker's report is complete.
        """
        self._answers[node], completed = [], list[IterationReport]()
        for one in gathered.reports:
            report = one.report
            connection = self._workers.find_connection(report.worker, one.rank) if report.worker in here else None
            if connection is None:
                continue
            violation = self._bounds.find_violation(report, following)
            if violation is not None:
                connection.cut_off(violation)
                continue
            combined = self._workers.combine_message(connection, report)
            completed += [combined] if isinstance(combined, IterationReport) else []
        self._node_of.update(dict.fromkeys((one.worker for one in completed), node))
        return tuple(completed)

    def mark_direct_report(self, worker: Worker) -> None:
        """Record that a worker reported over its own connection, by which it is acknowledged."""
        self._node_of.pop(worker, None)

    def acknowledge_reports(self, workers: Sequence[Worker], message: Acknowledged) -> None:
        """Send `message` to workers at once, or with the next `send_answers`. The latter concerns
        workers whose last report came by their node's agent."""
        by_node: dict[int, list[Worker]] = {}
        for worker in workers:
            node = self._node_of.get(worker)
            if node is None:
                self._workers.send(worker, message)
            else:
                by_node.setdefault(node, []).append(worker)
        for node, node_workers in by_node.items():
            self._answers.setdefault(node, []).append((tuple(node_workers), message))

    def send_answers(self) -> None:
        """Send the acknowledgements that `acknowledge_reports` has collected to the agents."""
        answers, self._answers = self._answers, {}
        for node, acknowledged in answers.items():
            self.send(node, ReportsAcknowledged(tuple(acknowledged)))

    def send_still_running(self) -> None:
        """Tell all agents that the run continues."""
        for node in self._connections:
            self.send(node, StillRunning())

    async def announce_end(self, error: str | None, *, anew: bool) -> None:
        """Tell all agents that the run has ended, and close their connections.

        They have `ANNOUNCE_SECONDS` to disconnect. `error` is None if the run is complete. With
        `anew`, it starts again from its beginning, and the agents must join it again.
        """
        for node in self._connections:
            self.send(node, RunEnded(error, anew))
        with suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                while not all(connection.is_closed for connection in self._connections.values()):
                    await asyncio.sleep(POLL_SECONDS)
        for connection in self._connections.values():
            connection.close()
