"""The node agents: which nodes are there, what they are told, and the reports of iterations that they gather."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress

from slipstream.runtime.coordinator.connections.message_validation import Bounds
from slipstream.runtime.coordinator.connections.server import Connection
from slipstream.runtime.coordinator.connections.worker_connections import WorkerConnections
from slipstream.runtime.coordinator.run import Run
from slipstream.runtime.processes.process_manager import ProcessManager
from slipstream.runtime.protocol.channel import frame
from slipstream.runtime.protocol.to_coordinator import Gathered, JoinNode, Ran
from slipstream.runtime.protocol.to_node_agent import GoOn, NodeSetup, NodeTaken, RunEnded, StillRunning, ToNodeAgent
from slipstream.runtime.protocol.to_worker import Acknowledged
from slipstream.schedules.schedule import Worker

ANNOUNCE_SECONDS = 2.0
"""How long they may take to end once they are sent the end of the run."""
LOOK_SECONDS = 0.005


class NodeAgents:
    """The connections to the agents of the other nodes.

    A report is answered the way it came: by its worker's own connection, or by the agent of its node.
    """

    def __init__(self, run: Run, processes: ProcessManager, workers: WorkerConnections, bounds: Bounds) -> None:
        self._run = run
        self._processes = processes
        self._workers = workers
        self._bounds = bounds
        self._connections: dict[int, Connection] = {}
        self._node_of: dict[Worker, int] = {}
        """The node whose agent brought the last report of a worker."""
        self._answers: dict[int, list[tuple[tuple[Worker, ...], Acknowledged]]] = {}
        """What agents are to be told because of the present event."""

    @property
    def connected(self) -> Collection[int]:
        """The nodes that are there."""
        return self._connections.keys()

    def speaks_for(self, connection: Connection) -> Collection[Worker]:
        """The workers of the node whose agent is at the other end."""
        node = connection.peer
        if not isinstance(node, int) or self._connections.get(node) is not connection:
            return ()
        return self._processes.workers_of(node)

    def admit(self, connection: Connection, join: JoinNode, *, restarted: bool) -> bool:
        """Have a node start its workers: those of one that is started again come in as any that return. Whether it
        does.

        One that has followed another coordinator keeps those that live. A node that is there already, or has not been
        missed yet, is told to ask again.
        """
        node = join.node
        setup, shares, known = self._run.setup, self._run.shares, 0 < node < self._run.setup.nodes
        if join.epoch and (join.epoch >= setup.epoch or self._run.behind is None):
            why = "its connection had ended" if join.epoch == setup.epoch else "it has followed another one"
            connection.send(frame(RunEnded(f"node 0 goes on without node {node}: {why}")))
            connection.close()
            return False
        before = self._connections.get(node)
        if before is not None and not self._workers.are_given_up(self._processes.workers_of(node)):
            connection.send(frame(NodeTaken()))
            connection.close()
            return False
        if known:
            self._connections[node] = connection
            if before is not None:
                before.close()
            if join.epoch:
                self._processes.node_found(node, join.alive)
            else:
                self._processes.node_started(node)
        connection.send(frame(NodeSetup(
            tuple(map(len, shares)), setup.device, setup.transport, tuple(shares[node]) if known else (),
            self._run.config, setup.first_iteration, restarted=restarted,
            epoch=setup.epoch)))
        return known and not join.epoch

    def disconnected(self, connection: Connection) -> bool:
        """A connection has ended; whether it was that of a node which is gone with it."""
        node = connection.peer
        if not isinstance(node, int) or self._connections.get(node) is not connection:
            return False
        del self._connections[node]
        return True

    def send(self, node: int, message: ToNodeAgent) -> None:
        """Send; nothing happens where the node is not there."""
        if node in self._connections:
            self._connections[node].send(frame(message))

    def take(self, node: int, here: Collection[Worker], gathered: Gathered, following: int) -> tuple[Ran, ...]:
        """What workers of a node have reported, of those that are there; `answer` answers its agent in any case.

        `following` is the iteration that is to be committed next.
        """
        self._answers[node], found = [], list[Ran]()
        for one in gathered.reports:
            report = one.report
            connection = self._workers.of(report.worker, one.rank) if report.worker in here else None
            if connection is None:
                continue
            wrong = self._bounds.wrong(report, following)
            if wrong is not None:
                connection.cut_off(wrong)
                continue
            whole = self._workers.take(connection, report)
            found += [whole] if isinstance(whole, Ran) else []
        self._node_of.update(dict.fromkeys((one.worker for one in found), node))
        return tuple(found)

    def passed_by(self, worker: Worker) -> None:
        """A worker's last report came over its own connection."""
        self._node_of.pop(worker, None)

    def acknowledge(self, workers: Sequence[Worker], message: Acknowledged) -> None:
        """Tell workers at once, and what goes to agents with `answer`."""
        by_node: dict[int, list[Worker]] = {}
        for worker in workers:
            node = self._node_of.get(worker)
            if node is None:
                self._workers.send(worker, message)
            else:
                by_node.setdefault(node, []).append(worker)
        for node, there in by_node.items():
            self._answers.setdefault(node, []).append((tuple(there), message))

    def answer(self) -> None:
        """Send agents what they are to be told."""
        answers, self._answers = self._answers, {}
        for node, acknowledged in answers.items():
            self.send(node, GoOn(tuple(acknowledged)))

    def reassure(self) -> None:
        """Tell all that the run goes on."""
        for node in self._connections:
            self.send(node, StillRunning())

    async def announce_end(self, error: str | None, *, anew: bool) -> None:
        """Tell all how the run has ended, and wait until they have disconnected."""
        for node in self._connections:
            self.send(node, RunEnded(error, anew))
        with suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                while not all(connection.closed for connection in self._connections.values()):
                    await asyncio.sleep(LOOK_SECONDS)
        for connection in self._connections.values():
            connection.close()
