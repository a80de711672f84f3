"""What the launcher of another node does while node 0 is gone."""

import os

import pytest

from slipstream.runtime.config import ConfigError
from slipstream.runtime.node_agent import _build_own_settings, _NodeAgent
from slipstream.runtime.processes.restart_policy import StartLimit
from slipstream.runtime.processes.stop_signals import StopSignals
from slipstream.runtime.protocol.rendezvous import RendezvousError
from slipstream.runtime.protocol.to_coordinator import WorkerEnded
from slipstream.runtime.protocol.to_node_agent import NodeSetup, RunEnded
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.coordinator.talking import SETUP
from tests.runtime.running import tiny
from tests.runtime.speaking import COMMON, own_job

LOST = WorkerEnded(Worker(1, 0), -9)
"""The report that a worker has been killed."""
WHOLE = Worker(1, 1)
"""A worker whose processes all live."""


class Link:
    """A link to a node 0 that is gone, and then to another one.

    The latter ends the run.
    """

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
    agent = _NodeAgent(
        1,
        link,
        Processes(),
        StartLimit([WHOLE]),
        StopSignals(),
        None,
        notify=lambda _: None,
        grace_seconds=1.0,
        coordinator_timeout_seconds=60.0,
    )
    assert agent.serve() is None
    assert link.told == [WHOLE] and link.sent == [LOST]


def own_settings(tmp_path, notes, **training):
    """Settings of a node that is told to train by `training`.

    Node 0 trains along a cosine of 20 iterations.
    """
    at_node_0 = tiny(learning_rate_schedule="cosine")
    here = tiny(**{"learning_rate_schedule": "cosine", **training})
    setup = NodeSetup(COMMON, (1, 1), (Worker(0, 1),), at_node_0, 0)
    return _build_own_settings(own_job(grid(2, 2, 2), here, tmp_path), setup, notes.append)


def test_a_node_trains_for_the_iterations_of_node_0(tmp_path):
    """Its learning rates depend on them."""
    notes: list[str] = []
    assert own_settings(tmp_path, notes, iterations=8).config == tiny(
        learning_rate_schedule="cosine"
    )
    assert notes == ["training.iterations is 8 here and 20 at node 0; trains for 20"]
    assert own_settings(tmp_path, notes).config.training.iterations == 20 and len(notes) == 1


def test_a_node_with_another_job_file_does_not_take_part(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^training\.learning_rate is 0\.002 here and 0\.001 at node 0"
    ):
        own_settings(tmp_path, [], learning_rate=0.002)
