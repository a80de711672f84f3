"""What NCCL's manners do to a session, over the double that has them."""

import queue
import threading
import time

import pytest
import torch

from benchmarks.conformance import LAYERS, RELEASED_SECONDS, WORKERS, Team
from slipstream.runtime.replay.group_store import GroupStore
from slipstream.runtime.replay.nccl import DECISION_KEY
from slipstream.runtime.replay.transfers import CommunicationError
from tests.runtime.replay.double import EARLY, Double
from tests.runtime.replay.transports import DOUBLE, use


@pytest.fixture
def team(monkeypatch):
    use(DOUBLE, monkeypatch)
    team_ = Team(DOUBLE)
    yield team_
    team_.close()


def blocked_receive(team):
    """Worker 0.1 waits for a tensor that worker 1.1 never sends."""
    sessions = team.connected()
    arriving = sessions[1].receive((1,), torch.float64, WORKERS[2], 0)
    return sessions, arriving


def receive_from_one_that_is_gone(team):
    """Worker 1.1 leaves meanwhile; torch says at once that the receive is completed."""
    sessions, arriving = blocked_receive(team)
    for end in sessions[2].groups_by_name().values():
        end.abort()
    while not arriving.work.is_completed():
        time.sleep(0.001)
    return sessions, arriving


def test_the_device_answers_and_not_torch(team, monkeypatch):
    # A peer is gone, torch says at once that the receive is completed, and its watchdog does not
    # know why yet.
    monkeypatch.setattr("tests.runtime.replay.double.ERROR_SECONDS", 60.0)
    sessions, arriving = receive_from_one_that_is_gone(team)
    assert not sessions[1].is_quiescent() and sessions[1].failure_reason() is None
    sessions[1].abort()
    arriving.work.wait()
    sessions[1].drain()
    assert sessions[1].is_quiescent()


def test_what_fails_before_the_order_ends_is_aborted_all_the_same(team):
    # A receive waits on the device for a peer that is gone, and the next operation is refused.
    sessions, _ = receive_from_one_that_is_gone(team)
    with pytest.raises(CommunicationError, match="remote process exited"):
        sessions[1].receive((1,), torch.float64, WORKERS[2], 0)
    sessions[1].abort()
    sessions[1].drain()
    assert sessions[1].is_quiescent()


def test_who_asks_whether_all_is_over_does_not_wait_for_the_device(team):
    sessions, _ = blocked_receive(team)
    began = time.monotonic()
    for _ in range(100):
        assert not sessions[1].is_quiescent()
    sessions[1].abort()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("early", ["0", "1"])
def test_a_member_that_hangs_while_others_connect_holds_up_nobody(team, early, monkeypatch):
    # Connecting goes on in a thread of its own; whoever waits for it goes on when the order ends,
    # and is over.
    monkeypatch.setenv(EARLY, early)
    hang, connect = threading.Event(), Double._connect
    monkeypatch.setattr(
        Double,
        "_connect",
        lambda self, seconds: (
            hang.wait(RELEASED_SECONDS) if self.rank == 0 else None,
            connect(self, seconds),
        ),
    )
    # The third has said that it has no group of an order before.
    team.store.set(f"order1/kept {WORKERS[2]}:0", "{}")
    sessions = [team.session(member) for member in team.members[:2]]
    futures = [
        team.begin(
            member, lambda session=session: session.connect(pairs={(WORKERS[0], WORKERS[1])})
        )
        for member, session in zip(team.members, sessions, strict=False)
    ]
    time.sleep(0.2)
    assert not any(future.done() for future in futures)
    for session in sessions:
        session.abort()
    assert all(
        isinstance(future.exception(RELEASED_SECONDS / 2), CommunicationError) for future in futures
    )
    hang.set()
    for session in sessions:
        session.drain()
        assert session.is_quiescent()


def test_who_leaves_a_meeting_after_all_have_come_still_connects(team, monkeypatch):
    """Else the others would wait within NCCL for good, where nothing ends it."""
    connected, connect, wait = queue.SimpleQueue(), Double._connect, GroupStore.wait
    monkeypatch.setattr(
        Double, "_connect", lambda self, seconds: (connect(self, seconds), connected.put(self.rank))
    )

    def leave(self, keys, timeout=None):
        """Worker 0.1 finds that the order has ended.

        The other has just decided to connect.
        """
        wait(self, keys, timeout)
        if keys == ["here/1"]:
            self.wait([DECISION_KEY])
            raise CommunicationError("the order is over")

    monkeypatch.setattr(GroupStore, "wait", leave)
    sessions = [team.session(member) for member in team.members[:2]]
    futures = [
        team.begin(
            member, lambda session=session: session.connect({LAYERS[0]: WORKERS[:2]}, pairs=())
        )
        for member, session in zip(team.members, sessions, strict=False)
    ]
    assert {connected.get(timeout=RELEASED_SECONDS), connected.get(timeout=RELEASED_SECONDS)} == {
        0,
        1,
    }
    sessions[0].abort()
    assert all(
        isinstance(future.exception(RELEASED_SECONDS), CommunicationError) for future in futures
    )
