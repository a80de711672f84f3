"""Messages on a connection are cut apart, checked and bounded.

A coordinator is late, silent or gone.
"""

import queue
import select
import socket
import struct
import threading
import time

import msgspec
import pytest

from slipstream.runtime.protocol import authentication, to_coordinator, to_node_agent, to_worker
from slipstream.runtime.protocol import channel as channel_module
from slipstream.runtime.protocol.authentication import PROTOCOL_VERSION, TagSequence
from slipstream.runtime.protocol.channel import (
    MAX_BYTES,
    Channel,
    FrameParser,
    ProtocolError,
    encode_frame,
)
from slipstream.runtime.protocol.rendezvous import Rendezvous, RendezvousError, open_listener
from slipstream.runtime.protocol.to_coordinator import Heartbeat, IterationReport, JoinWorker, Note
from slipstream.runtime.protocol.to_worker import Acknowledged, EndOrder, Leave
from slipstream.schedules.schedule import Worker
from tests.runtime.running import free_port
from tests.runtime.speaking import SECRET, Asking, be_asked, framed

WORKER = Worker(1, 2)
SOON = 60.0
KEY = b"of tests"


def test_messages_are_whole_however_the_bytes_come():
    messages = [Heartbeat(), Note(WORKER, "x" * 300), IterationReport(WORKER, 1, 2, None, 0.5)]
    tags = TagSequence(KEY)
    data = b"".join(encode_frame(message).with_tag(tags) for message in messages)
    for step in (1, 7, len(data)):
        frames = FrameParser(TagSequence(KEY))
        found = [
            body
            for start in range(0, len(data), step)
            for body in frames.parse_messages(data[start : start + step])
        ]
        assert list(map(to_coordinator.decode, found)) == messages


def test_a_message_that_is_too_long_is_refused_before_it_is_read():
    with pytest.raises(ProtocolError, match=f"a message of {MAX_BYTES + 1} bytes"):
        FrameParser(TagSequence(KEY)).parse_messages(struct.pack("<I", MAX_BYTES + 1))


def test_messages_that_are_changed_repeated_left_out_or_of_another_connection_are_refused():
    tags = TagSequence(KEY)
    first, second = (encode_frame(Note(WORKER, text)).with_tag(tags) for text in ("one", "two"))
    changed = first.replace(b"one", b"won")
    for data in (
        changed,
        first + first,
        second,
        first[:-1] + b"?",
        encode_frame(Heartbeat()).with_tag(TagSequence(b"another")),
    ):
        with pytest.raises(ProtocolError, match="a message was changed on its way"):
            FrameParser(TagSequence(KEY)).parse_messages(data)
    assert len(FrameParser(TagSequence(KEY)).parse_messages(first + second)) == 2


@pytest.mark.parametrize("decode", [to_coordinator.decode, to_worker.decode, to_node_agent.decode])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"type":"Unheard"}',
        b'{"type":"IterationReport","order":"x"}',
        b"\xff",
        b'{"type":"Leave","more":' + b"[" * 10**5,
    ],
)
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
    listener, address = open_listener()
    with listener:
        listener.settimeout(SOON)
        yield Coordinator(listener), address


class Coordinator:
    """Accepts connections in a thread: a channel is made once hands have been shaken."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._accepted: queue.Queue[Asking] = queue.Queue()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._accepted.put(be_asked(connection, "control"))

    def accepted(self) -> tuple[Asking, FrameParser]:
        asking = self._accepted.get(timeout=SOON)
        return asking, FrameParser(asking.keys.receiving)


def send(asking: Asking, *messages: msgspec.Struct) -> None:
    for message in messages:
        asking.connection.sendall(encode_frame(message).with_tag(asking.keys.sending))


def test_a_channel_says_who_it_is_and_reads_what_was_pushed(coordinator):
    accepting, address = coordinator
    channel = Channel(address, SECRET, JoinWorker(WORKER), to_worker.decode, SOON)
    asking, frames = accepting.accepted()
    with asking:
        (hello,) = frames.parse_messages(asking.connection.recv(1000))
        assert to_coordinator.decode(hello) == JoinWorker(WORKER)
        send(asking, Acknowledged(1, 2), EndOrder(1), Leave())
        assert channel.read_first(Acknowledged) == Acknowledged(1, 2)
        rest = []
        while len(rest) < 2:
            rest += channel.read()
        assert rest == [EndOrder(1), Leave()] and not channel.has_pending
    with pytest.raises(RendezvousError, match="node 0 is gone"):
        channel.read()
    channel.close()


def test_any_thread_may_send_and_no_message_is_torn(coordinator):
    accepting, address = coordinator
    channel = Channel(address, SECRET, Heartbeat(), to_worker.decode, SOON)
    asking, frames = accepting.accepted()
    texts = [chr(65 + number) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=channel.send, args=(Note(WORKER, text),)) for text in texts]
    for thread in threads:
        thread.start()
    found = []
    with asking:
        while len(found) < 9:
            found += frames.parse_messages(asking.connection.recv(2**16))
    assert sorted(to_coordinator.decode(body).text for body in found[1:]) == texts
    channel.close()


def test_a_coordinator_that_makes_no_sense_is_left(coordinator):
    accepting, address = coordinator
    channel = Channel(address, SECRET, JoinWorker(WORKER), to_worker.decode, SOON)
    asking, _ = accepting.accepted()
    with asking:
        asking.connection.sendall(framed(b"{}", asking.keys))
        with pytest.raises(RendezvousError, match="node 0 sent an invalid message"):
            channel.read()


def test_a_coordinator_that_says_nothing_or_does_not_go_on_is_left(coordinator, monkeypatch):
    monkeypatch.setattr(channel_module, "ANSWER_SECONDS", 0.2)
    accepting, address = coordinator
    channel = Channel(address, SECRET, JoinWorker(WORKER), to_worker.decode, SOON)
    asking, _ = accepting.accepted()
    with asking:
        asking.connection.sendall(encode_frame(Leave()).data[:5])
        with pytest.raises(RendezvousError, match=r"node 0 is gone: (timed out|it takes too long)"):
            channel.read_first(Leave)


@pytest.mark.parametrize(
    ("greeting", "then", "reason"),
    [
        (
            b"HTTP/1.1 400 Bad Request" + bytes(40),
            b"",
            "the program there is not Slipstream of this version",
        ),
        (PROTOCOL_VERSION + bytes(32), b"", "it closed the connection: its secret differs"),
        (PROTOCOL_VERSION + bytes(32), bytes(32), "it does not know the secret of this run"),
        (b"", b"", "it closed the connection$"),
    ],
)
def test_who_does_not_know_the_secret_is_no_coordinator(greeting, then, reason):
    listener, address = open_listener()

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(greeting)
            if greeting.startswith(PROTOCOL_VERSION):
                connection.recv(1000)
                connection.sendall(then)

    thread = threading.Thread(target=answer)
    thread.start()
    with (
        listener,
        pytest.raises(RendezvousError, match=f"^node 0 at {address} was reached, but {reason}"),
    ):
        Channel(address, SECRET, JoinWorker(WORKER), to_worker.decode, SOON)
    thread.join(SOON)


def test_the_handshake_at_the_start_has_more_time_than_in_the_search_for_another_coordinator(
    monkeypatch,
):
    """Thousands may connect at once."""
    monkeypatch.setattr(authentication, "HELLO_SECONDS", 0.05)
    listener, address = open_listener()
    given_up = threading.Event()

    def late() -> None:
        first, _ = listener.accept()
        with first:
            given_up.wait(SOON)
        second, _ = listener.accept()
        with second:
            time.sleep(2 * authentication.HELLO_SECONDS)
            be_asked(second, "control")
            while second.recv(1000):
                pass

    thread = threading.Thread(target=late)
    with listener:
        thread.start()
        with pytest.raises(
            RendezvousError, match=r"was reached, but (it takes too long to answer|timed out)$"
        ):
            Channel(address, SECRET, JoinWorker(WORKER), to_worker.decode, 0.0)
        given_up.set()
        Channel(address, SECRET, JoinWorker(WORKER), to_worker.decode, SOON).close()
        thread.join(SOON)


def test_a_channel_waits_for_the_coordinator_to_listen():
    address = Rendezvous("127.0.0.1", free_port())
    channels: list[Channel] = []
    thread = threading.Thread(
        target=lambda: channels.append(
            Channel(address, SECRET, JoinWorker(WORKER), to_worker.decode, SOON)
        )
    )
    thread.start()
    listener, _ = open_listener(address)
    with listener:
        Coordinator(listener).accepted()
        thread.join(SOON)
        assert channels
        channels[0].close()


def test_a_coordinator_that_is_gone_as_soon_as_it_was_there_is_waited_for(coordinator, monkeypatch):
    # It is killed, say: the system may have said so before anything is asked of the connection.
    accepting, address = coordinator
    connect, cut = socket.create_connection, []

    def create_connection(*where):
        if cut:
            return connect(*where)
        with socket.create_server(("127.0.0.1", 0)) as dying:
            cut.append(connect(dying.getsockname()))
            with dying.accept()[0] as end:
                # Close by a reset.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        select.select(cut, [], [], SOON)
        return cut[0]

    monkeypatch.setattr(channel_module.socket, "create_connection", create_connection)
    channel = Channel(address, SECRET, JoinWorker(WORKER), to_worker.decode, SOON)
    accepting.accepted()
    assert cut
    channel.close()


def test_a_coordinator_that_never_listens_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = Rendezvous("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(
            RendezvousError, match=f"cannot reach node 0 at {address} within 0 s: .*refused"
        ):
            Channel(address, SECRET, JoinWorker(WORKER), to_worker.decode, 0.2)


@pytest.mark.parametrize(
    ("tells", "waits", "longest"), [(60.0, 0.2, 1), (0.3, 1.5, 6)], ids=["at once", "now and then"]
)
def test_who_waits_says_for_whom_at_once_and_now_and_then(tells, waits, longest, monkeypatch):
    monkeypatch.setattr(channel_module, "PROGRESS_SECONDS", tells)
    said = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = Rendezvous("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(RendezvousError):
            Channel(address, SECRET, JoinWorker(WORKER), to_worker.decode, waits, said.append)
    assert min(longest, 2) <= len(said) <= longest
    assert set(said) == {f"waiting for node 0 at {address}: Connection refused"}
