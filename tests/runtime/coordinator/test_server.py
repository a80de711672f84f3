"""The coordinator's end of its connections.

Who does not speak the protocol is cut off, and nobody else notices.
"""

import asyncio
import contextlib
import socket
import struct
from contextlib import ExitStack
from unittest.mock import Mock

import pytest

from slipstream.runtime.coordinator.connections import server
from slipstream.runtime.coordinator.connections.server import Server, start_server
from slipstream.runtime.protocol.authentication import PROTOCOL_VERSION, ChallengeAnswer, Secret
from slipstream.runtime.protocol.channel import MAX_BYTES, encode_frame
from slipstream.runtime.protocol.rendezvous import open_listener
from slipstream.runtime.protocol.to_coordinator import (
    Heartbeat,
    JoinNode,
    JoinWorker,
    Note,
    WorkerEnded,
)
from slipstream.runtime.protocol.to_worker import EndOrder, Leave
from slipstream.schedules.schedule import Worker
from tests.runtime.speaking import SECRET, talk, until

WORKER = Worker(0, 1)


def play(script, most_unknown=100):
    """Run a script against a server.

    It gets the server's address, and lists of what was heard and said of connections.
    """

    async def run():
        heard, said = [], []
        listener, address = open_listener()
        running = await start_server(
            listener,
            Server(
                SECRET,
                lambda connection, message: heard.append((connection, message)),
                said.append,
                most_unknown,
            ),
        )
        try:
            async with asyncio.timeout(120):
                return await script(address, heard, said)
        finally:
            running.close()

    return asyncio.run(run())


async def ends(reader):
    """Read to the end of the connection."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(2**16):
            pass


def test_messages_come_in_order_and_the_end_last():
    async def script(address, heard, _):
        spoken = await talk(address, JoinWorker(WORKER), Heartbeat(), Note(WORKER, "last words"))
        spoken.writer.close()
        await until(lambda: len(heard) == 4)
        return heard

    heard = play(script)
    assert [message for _, message in heard] == [
        JoinWorker(WORKER),
        Heartbeat(),
        Note(WORKER, "last words"),
        None,
    ]
    assert {connection.peer for connection, _ in heard} == {WORKER} and heard[0][0].is_closed


def a_stranger():
    """One who knows all but the secret."""
    return (
        ChallengeAnswer(Secret(b"another secret"), "control", PROTOCOL_VERSION + bytes(32)).hello
        + encode_frame(JoinWorker(WORKER)).data
    )


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: there\r\nAccept: everything that there is\r\n\r\n",
        bytes(10**7),
        a_stranger(),
    ],
    ids=["http", "10 MB", "another secret"],
)
def test_a_stranger_is_cut_off_with_one_line_and_never_heard_of(said):
    async def script(address, heard, lines):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(said)
        await ends(reader)
        return heard, lines

    heard, (line,) = play(script)
    assert heard == [] and line.startswith("127.0.0.1:")
    assert line.endswith(" was cut off: it does not know the secret of this run")


@pytest.mark.parametrize("message", [Heartbeat(), WorkerEnded(WORKER, 0)])
def test_who_does_not_say_who_it_is_is_cut_off_and_never_heard_of(message):
    async def script(address, heard, lines):
        spoken = await talk(address, message)
        await ends(spoken.reader)
        return heard, lines

    heard, (line,) = play(script)
    assert heard == [] and line.endswith(" was cut off: the first message must identify the sender")


@pytest.mark.parametrize(
    ("hello", "then", "why"),
    [
        (JoinNode(1), b"[]", "Expected `object`, got `array`"),
        (JoinNode(1), b"{}}", "missing required field `type`"),
        (JoinNode(1), b'{"type":"Heartbeat"}', "it sent Heartbeat, which this peer may not send"),
        (
            JoinWorker(WORKER),
            b'{"type":"WorkerEnded","worker":[0,1],"status":0}',
            "it sent WorkerEnded, which this peer may not send",
        ),
        (
            JoinWorker(WORKER),
            b'{"type":"Note","worker":[1,1],"text":"not me"}',
            "it sent Note, which this peer may not send",
        ),
        (
            JoinWorker(WORKER),
            b'{"type":"IterationReport","worker":[0,1],"order":"x"}',
            "Expected `int`, got `str`",
        ),
    ],
)
def test_nonsense_after_the_hello_ends_the_connection_with_one_line(hello, then, why):
    """Also what only others may say."""

    async def script(address, heard, lines):
        spoken = await talk(address, hello)
        spoken.say_body(then)
        await ends(spoken.reader)
        await until(lambda: len(heard) == 2)
        return heard, lines

    heard, (line,) = play(script)
    assert [message for _, message in heard] == [hello, None]
    assert (
        line.startswith(("node 1 at 127.0.0.1:", "worker 0.1 at 127.0.0.1:"))
        and why in line
        and "\n" not in line
    )


def test_what_is_too_long_is_refused_before_it_is_read():
    async def script(address, heard, lines):
        spoken = await talk(address, JoinWorker(WORKER))
        spoken.writer.write(struct.pack("<I", MAX_BYTES + 1))
        await ends(spoken.reader)
        return lines

    assert f"a peer sent a message of {MAX_BYTES + 1} bytes" in play(script)[0]


def test_all_workers_of_a_large_run_may_come_at_once():
    """More than asyncio lets wait by default, while the event loop is busy."""

    async def run():
        listener, address = open_listener()
        running = await start_server(listener, Server(SECRET, lambda *_: None, print, 400))
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(
                    socket.create_connection((address.host, address.port), timeout=0.5)
                )
        running.close()

    asyncio.run(run())


@pytest.mark.parametrize("said", [b"", b"half of what"], ids=["nothing", "a part"])
def test_who_never_ends_what_it_begins_to_say_is_cut_off(said, monkeypatch):
    monkeypatch.setattr(server, "HELLO_SECONDS", 0.05)

    async def script(address, heard, lines):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(said)
        await ends(reader)
        return lines

    assert play(script)[0].endswith("it did not identify itself within 0 s")


def test_of_many_who_say_nothing_the_oldest_goes_and_a_worker_comes_in():
    async def script(address, heard, lines):
        idle = [await asyncio.open_connection(address.host, address.port) for _ in range(60)]
        await talk(address, JoinWorker(WORKER))
        await until(lambda: heard)
        await ends(idle[0][0])
        return heard[0][1], lines

    heard, lines = play(script, most_unknown=20)
    assert heard == JoinWorker(WORKER)
    assert len(lines) == 10 and all(
        "more than 20 connections have no identified peer" in line for line in lines
    )


def test_what_is_sent_in_one_turn_of_the_event_loop_leaves_in_one_write_and_before_the_end():
    async def script(address, heard, _):
        spoken = await talk(address, JoinWorker(WORKER))
        await until(lambda: heard)
        connection, received = heard[0][0], []
        writes = connection._transport = Mock(wraps=connection._transport)
        for last in (False, True):
            writes.write.reset_mock()
            sent = [encode_frame(message) for message in (EndOrder(1), Leave())]
            for frame in sent:
                connection.send(frame)
            assert not writes.write.called
            if last:
                connection.close()
            await until(lambda: writes.write.called)
            while len(received) < 2:
                received += spoken.frames.parse_messages(await spoken.reader.read(2**16))
            assert writes.write.call_count == 1 and [frame.data[4:] for frame in sent] == received
            received.clear()

    play(script)


def test_who_does_not_read_is_cut_off(monkeypatch):
    monkeypatch.setattr(server, "MAX_UNSENT_BYTES", 10**6)

    async def script(address, heard, lines):
        spoken = await talk(address, JoinWorker(WORKER))
        await until(lambda: heard)
        for _ in range(100):
            heard[0][0].send(encode_frame(Note(WORKER, "x" * 10**6)))
        await until(lambda: len(heard) == 2)
        spoken.writer.close()  # it is kept until here: what is not referred to is closed
        return lines

    assert play(script)[0].endswith("it does not read what it is sent")


def test_what_is_sent_before_closing_arrives():
    async def script(address, heard, _):
        spoken = await talk(address, JoinWorker(WORKER))
        await until(lambda: heard)
        connection = heard[0][0]
        connection.send(encode_frame(Leave()))
        connection.close()
        connection.send(encode_frame(Leave()))
        return spoken.frames.parse_messages(await spoken.reader.read())

    assert play(script) == [b'{"type":"Leave"}']
