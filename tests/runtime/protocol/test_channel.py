"""Messages on a connection: cut apart, checked, bounded; a coordinator that is late, silent or gone."""

import socket
import struct
import threading
import time

import msgspec
import pytest

from runtime.protocol import channel as channel_module
from runtime.protocol import to_coordinator, to_node_agent, to_worker
from runtime.protocol.channel import MAX_BYTES, Channel, Frames, ProtocolError, frame
from runtime.protocol.rendezvous import Rendezvous, RendezvousError, listen
from runtime.protocol.to_coordinator import Heartbeat, JoinWorker, Note, Ran
from runtime.protocol.to_worker import Acknowledged, EndOrder, Leave
from schedules.schedule import Worker

WORKER = Worker(1, 2)
SOON = 10.0


def test_messages_are_whole_however_the_bytes_come():
    messages = [Heartbeat(), Note(WORKER, "x" * 300), Ran(WORKER, 1, 2, None, 0.5)]
    data = b"".join(map(frame, messages))
    for step in (1, 7, len(data)):
        frames = Frames()
        found = [body for start in range(0, len(data), step) for body in frames.feed(data[start:start + step])]
        assert list(map(to_coordinator.decode, found)) == messages


def test_a_message_that_is_too_long_is_refused_before_it_is_read():
    with pytest.raises(ProtocolError, match=f"a message of {MAX_BYTES + 1} bytes"):
        Frames().feed(struct.pack("<I", MAX_BYTES + 1))


@pytest.mark.parametrize("decode", [to_coordinator.decode, to_worker.decode, to_node_agent.decode])
@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"type":"Unheard"}', b'{"type":"Ran","order":"x"}', b"\xff",
                                  b'{"type":"Leave","more":' + b"[" * 10**5])
def test_whatever_is_no_message_is_refused(decode, body):
    with pytest.raises(ProtocolError):
        decode(body)


def test_no_type_has_the_name_of_another_and_each_says_when_it_is_sent():
    for union in (to_coordinator.ToCoordinator, to_worker.ToWorker, to_node_agent.ToNodeAgent):
        kinds = union.__args__
        assert len({kind.__name__ for kind in kinds}) == len(kinds)
        assert all(issubclass(kind, msgspec.Struct) and len(kind.__doc__) > 25 for kind in kinds)


@pytest.fixture
def coordinator():
    listener, address = listen()
    with listener:
        listener.settimeout(SOON)
        yield listener, address


def test_a_channel_says_who_it_is_and_reads_what_was_pushed(coordinator):
    listener, address = coordinator
    channel = Channel(address, JoinWorker(WORKER), to_worker.decode, SOON)
    connection, _ = listener.accept()
    with connection:
        (hello,) = Frames().feed(connection.recv(1000))
        assert to_coordinator.decode(hello) == JoinWorker(WORKER)
        connection.sendall(frame(Acknowledged(1, 2)) + frame(EndOrder(1)) + frame(Leave()))
        assert channel.wait_for(Acknowledged) == Acknowledged(1, 2) and channel.pending
        assert channel.read() == [EndOrder(1), Leave()] and not channel.pending
    with pytest.raises(RendezvousError, match="node 0 is gone"):
        channel.read()
    channel.close()


def test_any_thread_may_send_and_no_message_is_torn(coordinator):
    listener, address = coordinator
    channel = Channel(address, Heartbeat(), to_worker.decode, SOON)
    connection, _ = listener.accept()
    texts = [chr(65 + number) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=channel.send, args=(Note(WORKER, text),)) for text in texts]
    for thread in threads:
        thread.start()
    frames, found = Frames(), []
    with connection:
        while len(found) < 9:
            found += frames.feed(connection.recv(2**16))
    assert sorted(to_coordinator.decode(body).text for body in found[1:]) == texts
    channel.close()


def test_a_coordinator_that_makes_no_sense_is_left(coordinator):
    listener, address = coordinator
    channel = Channel(address, JoinWorker(WORKER), to_worker.decode, SOON)
    connection, _ = listener.accept()
    with connection:
        connection.sendall(struct.pack("<I", 2) + b"{}")
        with pytest.raises(RendezvousError, match="node 0 sent what makes no sense"):
            channel.read()


def test_a_channel_waits_for_the_coordinator_to_listen():
    listener, address = listen()
    listener.close()
    made: list[Channel] = []
    thread = threading.Thread(target=lambda: made.append(
        Channel(address, JoinWorker(WORKER), to_worker.decode, SOON)))
    thread.start()
    listener, _ = listen(address)
    with listener:
        thread.join(SOON)
        assert made
        made[0].close()


def test_a_coordinator_that_never_listens_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = Rendezvous("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(RendezvousError, match=f"cannot reach the meeting point {address} within 0 s: .*refused"):
            Channel(address, JoinWorker(WORKER), to_worker.decode, 0.2)


def test_who_waits_says_for_whom_at_once_and_now_and_then(monkeypatch):
    monkeypatch.setattr(channel_module, "TELL_SECONDS", 0.2)
    said = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = Rendezvous("127.0.0.1", taken.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(RendezvousError):
            Channel(address, JoinWorker(WORKER), to_worker.decode, 0.7,
                    lambda line: said.append((time.monotonic() - began, line)))
    assert 2 <= len(said) <= 4 and said[0][0] < 0.15
    assert {line for _, line in said} == {f"waiting for node 0 at {address}: Connection refused"}
