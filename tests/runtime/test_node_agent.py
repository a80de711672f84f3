"""What the launcher of another node does while node 0 is gone."""

import os

from slipstream.runtime.node_agent import _NodeAgent
from slipstream.runtime.processes.start_limit import StartLimit
from slipstream.runtime.processes.stop_signals import StopSignals
from slipstream.runtime.protocol.rendezvous import RendezvousError
from slipstream.runtime.protocol.to_coordinator import WorkerEnded
from slipstream.runtime.protocol.to_node_agent import RunEnded
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator.talking import SETUP

LOST, WHOLE = WorkerEnded(Worker(1, 0), -9), Worker(1, 1)


class Link:
    """To a node 0 that is gone, and then to another one, which ends the run."""

    has_pending, setup = True, SETUP

    def __init__(self):
        self.sent, self.told, self.gone = [], [], True
        self._read, self._write = os.pipe()

    def fileno(self):
        return self._read

    def read(self):
        if self.gone:
            raise RendezvousError("gone")
        return [RunEnded(None)]

    def follow_new_coordinator(self, hello, *_):
        self.gone, self.told = False, list(hello.alive)

    def send(self, message):
        self.sent.append(message)


class Processes:
    """Of which one has ended meanwhile, because of one of its ranks."""

    def __init__(self):
        self._ends = [LOST]
        self._read, self._write = os.pipe()

    def fileno(self):
        return self._read

    def poll(self):
        ends, self._ends = self._ends, []
        return ends

    def list_alive(self):
        return [WHOLE]


def test_the_next_node_0_is_told_who_has_ended_meanwhile():
    """So it can have a worker that has lost a rank go on without it."""
    link = Link()
    agent = _NodeAgent(1, link, Processes(), StartLimit([WHOLE]), StopSignals(), None, notify=lambda _: None,
                       grace_seconds=1.0, coordinator_timeout_seconds=60.0)
    assert agent.serve() is None
    assert link.told == [WHOLE] and link.sent == [LOST]
