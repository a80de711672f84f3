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
    """Connections to node agents, which forward the reports of their workers in batches."""

    def __init__(
        self,
        run: RunSpec,
        processes: ProcessManager,
        workers: WorkerConnections,
        bounds: MessageBounds,
    ) -> None:
        self._run = run
        self._processes = processes
        self._workers = workers
        self._bounds = bounds
        self._connections: dict[int, Connection] = {}
        self._node_of: dict[Worker, int] = {}
        """Node whose agent forwarded each worker's last report; absent if it came directly."""
        self._answers: dict[int, list[tuple[tuple[Worker, ...], Acknowledged]]] = {}
        """Acknowledgements that `send_answers` will send to each node, with their workers."""

    @property
    def connected_nodes(self) -> Collection[int]:
        """Numbers of the nodes, other than node 0, that are connected."""
        return self._connections.keys()

    def find_represented_workers(self, connection: Connection) -> Collection[Worker]:
        """Return the workers of a connection's node; none if it is not the node's newest."""
        node = connection.peer
        if not isinstance(node, int) or self._connections.get(node) is not connection:
            return ()
        return self._processes.get_node_workers(node)

    def admit_node(self, connection: Connection, join: JoinNode, *, restarted: bool) -> bool:
        """Answer a node agent that joins; return whether it now starts all its workers.

        It does not if it is refused and disconnected, if the run has no such node, or if it brings
        along the workers that it started before. An earlier connection of an admitted node is
        closed. `restarted` tells the agent whether the run has continued without its workers.
        """
        node, setup, shares = join.node, self._run.setup, self._run.facts.shares
        exists = 0 < node < setup.common.nodes
        # It has followed another coordinator than the one whose run continues here: sent away.
        if join.epoch and (join.epoch >= setup.epoch or self._run.behind is None):
            why = "it followed another node 0"
            if join.epoch == setup.epoch:
                why = "its connection had ended"
            connection.send(encode_frame(RunEnded(f"node 0 continues without node {node}: {why}")))
            connection.close()
            return False
        # Its node is still connected, or its loss not noticed yet: it asks again later.
        before = self._connections.get(node)
        if before is not None and not self._workers.has_given_up_all(
            self._processes.get_node_workers(node)
        ):
            connection.send(encode_frame(NodeTaken()))
            connection.close()
            return False
        # An agent that has followed a coordinator before brings its workers along.
        if exists:
            self._connections[node] = connection
            if before is not None:
                before.close()
            if join.epoch:
                self._processes.record_node_adopted(node, join.alive)
            else:
                self._processes.record_node_started(node)
        # An agent whose node the run does not have is answered, too, with no workers.
        connection.send(
            encode_frame(
                NodeSetup(
                    setup.common,
                    tuple(map(len, shares)),
                    tuple(shares[node]) if exists else (),
                    self._run.request.config,
                    setup.first_iteration,
                    restarted=restarted,
                    epoch=setup.epoch,
                )
            )
        )
        return exists and not join.epoch

    def handle_disconnect(self, connection: Connection) -> bool:
        """Remove an ended connection; return whether this disconnects its node."""
        node = connection.peer
        if not isinstance(node, int) or self._connections.get(node) is not connection:
            return False
        del self._connections[node]
        return True

    def send(self, node: int, message: ToNodeAgent) -> None:
        """Send a message to the agent of a node, if it is connected."""
        if node in self._connections:
            self._connections[node].send(encode_frame(message))

    def receive_reports(
        self, node: int, workers: Collection[Worker], gathered: GatheredReports, following: int
    ) -> tuple[IterationReport, ...]:
        """Take a batch of ranks' reports from a node; return workers' reports that it completes.

        Only reports of the node's connected `workers` count. A worker that reports an impossible
        value is disconnected. `following` is the iteration to be committed next. `send_answers`
        answers the agent even if no worker's report is complete.
        """
        self._answers[node], completed = [], list[IterationReport]()
        for rank_report in gathered.reports:
            report = rank_report.report
            # An agent may report for its own workers only, as long as they are connected.
            if report.worker not in workers:
                continue
            connection = self._workers.find_connection(report.worker, rank_report.rank)
            if connection is None:
                continue
            violation = self._bounds.find_violation(report, following)
            if violation is not None:
                connection.cut_off(violation)
                continue
            # A worker of several ranks has reported when all of them have.
            combined = self._workers.combine_message(connection, report)
            if isinstance(combined, IterationReport):
                completed.append(combined)
        self._node_of.update(dict.fromkeys((report.worker for report in completed), node))
        return tuple(completed)

    def mark_direct_report(self, worker: Worker) -> None:
        """Record that a worker reported over its own connection, over which it is acknowledged."""
        self._node_of.pop(worker, None)

    def acknowledge_reports(self, workers: Sequence[Worker], message: Acknowledged) -> None:
        """Acknowledge reports of these workers with `message`.

        Workers that report by themselves get it now; the next `send_answers` sends it to those that
        report through their node's agent.
        """
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

        Waits up to `ANNOUNCE_SECONDS` for the agents to disconnect by themselves. `error` says why
        the run ended early; None: it is complete. `anew`: the run starts again.
        """
        for node in self._connections:
            self.send(node, RunEnded(error, anew))
        # An agent that has read the message disconnects; closed sooner, it might not get it.
        with suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                while not all(connection.is_closed for connection in self._connections.values()):
                    await asyncio.sleep(POLL_SECONDS)
        for connection in self._connections.values():
            connection.close()
