"""The node agents: which nodes are there, and what they are told."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress

from slipstream.runtime.coordinator.run import Run
from slipstream.runtime.coordinator.server import Connection
from slipstream.runtime.processes.process_manager import ProcessManager
from slipstream.runtime.protocol.channel import frame
from slipstream.runtime.protocol.to_coordinator import JoinNode
from slipstream.runtime.protocol.to_node_agent import NodeSetup, NodeTaken, RunEnded, StillRunning, ToNodeAgent
from slipstream.schedules.schedule import Worker

ANNOUNCE_SECONDS = 2.0
"""How long they may take to end once they are sent the end of the run."""
LOOK_SECONDS = 0.005


class NodeAgents:
    """The connections to the agents of the other nodes.

    Parameters
    ----------
    is_missed
        Whether all workers of a node have been given up: its machine may be gone without a word.
    """

    def __init__(self, run: Run, processes: ProcessManager, is_missed: Callable[[int], bool]) -> None:
        self._run = run
        self._processes = processes
        self._is_missed = is_missed
        self._connections: dict[int, Connection] = {}

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
        if before is not None and not self._is_missed(node):
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
