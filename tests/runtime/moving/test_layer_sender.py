"""Who gives layers away.

Tested is when it waits, for whom, and what ends one connection and no other.
"""

import threading

import pytest

from slipstream.runtime.moving import layer_sender, layer_server
from slipstream.runtime.moving.layer_messages import LayerPart, LayerRequest, PartRange
from slipstream.runtime.moving.layer_sender import LayerSender
from slipstream.runtime.moving.layer_server import QUEUE_STATES
from slipstream.runtime.replay.transfers import CommunicationError
from tests.runtime.moving.team import LEFT, SOON, TARGET, whole
from tests.runtime.speaking import ask


def test_who_gives_layers_away_waits_until_they_have_gone(team):
    """Else its next step would change what is being sent."""
    member, returned = team.members[LEFT], threading.Event()

    def give() -> None:
        member.sender.send_to_waiting(2, -1, 1, member.store, lambda: None)
        returned.set()

    thread = threading.Thread(target=give, daemon=True)
    thread.start()
    assert not returned.wait(0.05), "nobody has asked"
    with ask(member.sender.address, SOON) as stale, ask(member.sender.address, SOON) as asking:
        stale.send(LayerRequest((whole(0),), 1))
        assert not returned.wait(0.05), "what was asked for an earlier order does not count"
        asking.send(LayerRequest((whole(0),), 2))
        assert asking.receive()[0] == LayerPart(whole(0), 0)
        thread.join(SOON)
        assert returned.is_set()


def test_waiting_for_those_who_are_to_be_given_layers_can_be_called_off(team):
    def refuse() -> None:
        raise CommunicationError("it is over")

    with pytest.raises(CommunicationError, match="it is over"):
        team.members[LEFT].sender.send_to_waiting(2, 0, 1, team.members[LEFT].store, refuse)
    team.fetch(0, 2, follow=False)
    with pytest.raises(CommunicationError, match="it is over"):
        team.receiver.take_parts(2, 0, refuse)


def test_one_thread_serves_all(team):
    before = set(threading.enumerate())
    connections = [ask(team.members[LEFT].sender.address, SOON) for _ in range(5)]
    for connection in connections:
        connection.send(LayerRequest((whole(0), whole(1))))
    team.members[LEFT].run(0)
    assert set(threading.enumerate()) <= before, (
        "a thread was started; those of other tests may end meanwhile"
    )
    for connection in connections:
        connection.connection.close()


def test_a_layer_that_cannot_be_sent_ends_its_connection_and_no_other(team, monkeypatch):
    def asking():
        connection = ask(team.members[LEFT].sender.address, SOON)
        connection.send(LayerRequest((whole(0),)))
        while not team.members[LEFT].sender.has_requests:
            threading.Event().wait(0.01)
        return connection

    with monkeypatch.context() as broken, asking() as connection:
        broken.setattr(layer_server, "encode_message", lambda *_: 1 / 0)
        team.members[LEFT].run(0)
        with pytest.raises(OSError):
            connection.receive()
    with asking() as connection:
        team.members[LEFT].run(1)
        assert connection.receive()[0] == LayerPart(whole(0), 1)


def test_training_waits_where_too_much_is_queued_until_nothing_is(team):
    # It does so for a connection that carries less than training makes; not for one that is gone.
    member, waited = team.members[LEFT], []
    with ask(member.sender.address, SOON) as slow:
        slow.send(LayerRequest((whole(0),)))
        while not member.sender.has_requests:
            threading.Event().wait(0.01)
        iteration = 0
        member.run(0)
        member.sender.wait_for_room(lambda: waited.append("never"))
        assert not waited
        reader = threading.Thread(
            target=lambda: [slow.receive() for _ in range(iteration + 2)], daemon=True
        )

        def read() -> None:
            if not waited:
                reader.start()
            waited.append("a while")

        while not waited:
            assert iteration < 10_000, "nothing is bounded"
            iteration += 1
            member.run(iteration)
            member.sender.wait_for_room(read)
        # Before the first step, AdamW has no state.
        assert iteration + 1 >= QUEUE_STATES and not full(member.sender)
        reader.join(SOON)


def test_a_receiver_that_takes_nothing_is_dropped_and_training_goes_on(team, monkeypatch):
    """It is named, so that all know for whom its senders wait."""
    monkeypatch.setattr(layer_sender, "ROOM_SECONDS", 0.05)
    member = team.members[LEFT]
    with ask(member.sender.address, SOON) as slow:
        slow.send(LayerRequest((whole(0),), None, TARGET))
        while not member.sender.has_requests:
            threading.Event().wait(0.01)
        named, dropped = [], []
        for iteration in range(10_000):  # at first, the system's buffers take more
            named.clear()
            member.run(iteration)
            dropped = member.sender.wait_for_room(
                lambda: named.append(member.sender.find_full_receivers())
            )
            if dropped:
                break
        assert dropped == [TARGET] and named and all(receivers == [TARGET] for receivers in named)
        assert (
            member.sender.find_full_receivers() == [] == member.sender.wait_for_room(lambda: None)
        )
        member.run(iteration + 1)
        assert not member.sender._server.list_following()


def full(sender: LayerSender) -> bool:
    """Whether training would wait."""

    def refuse() -> None:
        raise TimeoutError

    try:
        sender.wait_for_room(refuse)
    except TimeoutError:
        return True
    return False


def test_one_that_asks_for_what_is_not_held_is_refused(team):
    with ask(team.members[LEFT].sender.address, SOON) as connection:
        connection.send(LayerRequest((PartRange(7, 0, 1, True),)))
        while not team.members[LEFT].sender.has_requests:
            threading.Event().wait(0.01)
        team.members[LEFT].run(0)
        with pytest.raises(OSError):
            connection.receive()
