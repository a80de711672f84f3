"""Node 0 dies or ends while others are about to join.

Nobody is left behind, and nobody waits for nothing.
"""

import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import msgspec
import pytest

from slipstream.runtime.node_agent import _connect_to_coordinator
from slipstream.runtime.protocol import to_coordinator, to_worker
from slipstream.runtime.protocol.channel import Channel, FrameParser, encode_frame
from slipstream.runtime.protocol.coordinator_link import CoordinatorLink
from slipstream.runtime.protocol.rendezvous import Rendezvous, RendezvousError
from slipstream.runtime.protocol.store import host_store
from slipstream.runtime.protocol.to_node_agent import NodeTaken
from slipstream.runtime.worker import context, main_thread
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator.talking import SETUP
from tests.runtime.speaking import SECRET, be_asked

SOON = 60.0


class Node0s:
    """One node 0 after the other at the same address.

    Each has an answer, before it is gone; None: nothing.
    """

    def __init__(self, *answers):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Rendezvous(*self._listener.getsockname())
        self.heard = []
        self._thread = threading.Thread(target=self._serve, args=(answers,), daemon=True)
        self._thread.start()

    def _serve(self, answers):
        with self._listener:
            for answer in answers:
                connection, _ = self._listener.accept()
                with connection:
                    keys = be_asked(connection, "control").keys
                    frames, bodies = FrameParser(keys.receiving), []
                    while not bodies:
                        bodies = frames.parse_messages(connection.recv(4096))
                    self.heard.append(to_coordinator.decode(bodies[0]))
                    if answer is not None:
                        connection.sendall(encode_frame(answer).with_tag(keys.sending))


def test_a_worker_whose_node_0_dies_before_it_has_answered_joins_the_next_one():
    node_0 = Node0s(None, SETUP)
    spec = SimpleNamespace(
        worker=Worker(0, 0), rank=0, settings=SimpleNamespace(coordinator_timeout_seconds=SOON)
    )
    channel, setup = main_thread._join_run(
        spec,
        lambda hello, seconds: Channel(node_0.address, SECRET, hello, to_worker.decode, seconds),
    )
    channel.close()
    assert setup == SETUP and len(node_0.heard) == 2


def test_a_worker_whose_node_0_dies_while_it_starts_follows_the_next_one(monkeypatch):
    # It would wait for the other's store, and end, and nobody would know that it was waited for.
    monkeypatch.setattr(context, "STORE_TIMEOUT", context.timedelta(seconds=5))
    store, address = host_store()
    setups = [
        msgspec.structs.replace(SETUP, epoch=1),
        msgspec.structs.replace(SETUP, epoch=2, store=address),
    ]
    node_0 = Node0s(*setups)

    def connect(hello, seconds):
        return Channel(node_0.address, SECRET, hello, to_worker.decode, seconds)

    hello = to_coordinator.JoinWorker(Worker(0, 0))
    channel = connect(hello, SOON)
    link = CoordinatorLink(channel, channel.read_first(type(SETUP)), connect)
    spec = SimpleNamespace(
        worker=Worker(0, 0), rank=0, settings=SimpleNamespace(coordinator_timeout_seconds=SOON)
    )
    with closing(link):
        assert context._connect_to_store(spec, link).port == address.port
        assert link.setup == setups[1] and node_0.heard[1].epoch == 1
    del store


def test_a_launcher_that_was_told_to_wait_does_not_wait_for_a_run_that_has_ended():
    node_0 = Node0s(NodeTaken(), None)
    job = SimpleNamespace(settings=SimpleNamespace(secret=SECRET, coordinator_timeout_seconds=1.0))
    began = time.monotonic()
    with pytest.raises(RendezvousError):
        _connect_to_coordinator(node_0.address, job, 1, 600.0, lambda _: None)
    assert time.monotonic() - began < 300.0 and len(node_0.heard) == 2


def test_a_program_does_not_wait_for_plans_that_nobody_needs_any_more():
    """Threads of a pool within a planning thread are waited for when Python ends."""
    script = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from slipstream.cli import app as commands, start

def app(prog_name, obj):
    begun = threading.Event()
    def plan():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: (begun.set(), threading.Event().wait(3600)))
    threading.Thread(target=plan, daemon=True, name="planning").start()
    begun.wait()
    print("told", end="")
    sys.exit(143)

commands.app = app
start.main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert (ended.returncode, ended.stdout) == (143, "told"), ended.stderr
