"""The coordinator's end of its connections: who does not speak the protocol is cut off, and nobody else notices."""

import asyncio
import socket
import struct
from contextlib import ExitStack

import pytest

from runtime.coordinator import server
from runtime.coordinator.server import serve
from runtime.protocol.channel import MAX_BYTES, frame
from runtime.protocol.rendezvous import listen
from runtime.protocol.to_coordinator import Ended, Heartbeat, JoinNode, JoinWorker, Note
from runtime.protocol.to_worker import Leave
from schedules.schedule import Worker

WORKER = Worker(0, 1)


def play(script):
    """Run a script against a server: with a function that connects, and what was heard, in order."""
    async def run():
        heard = []
        listener, address = listen()
        running = await serve(listener, lambda connection, message: heard.append((connection, message)))
        try:
            async with asyncio.timeout(20):
                return await script(lambda: asyncio.open_connection(address.host, address.port), heard)
        finally:
            running.close()

    return asyncio.run(run())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_messages_come_in_order_and_the_end_last():
    async def script(connect, heard):
        _reader, writer = await connect()
        writer.write(frame(JoinWorker(WORKER)) + frame(Heartbeat()) + frame(Note(WORKER, "last words")))
        writer.close()
        await until(lambda: len(heard) == 4)
        return heard

    heard = play(script)
    assert [message for _, message in heard] == [JoinWorker(WORKER), Heartbeat(), Note(WORKER, "last words"), None]
    assert {connection.peer for connection, _ in heard} == {WORKER} and heard[0][0].closed


@pytest.mark.parametrize("said", [
    frame(Heartbeat()), frame(Ended(WORKER, 0)), b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", MAX_BYTES + 1),
    struct.pack("<I", 3) + b"{}}"])
def test_a_stranger_is_cut_off_and_never_heard_of(said):
    async def script(connect, heard):
        reader, writer = await connect()
        writer.write(said)
        assert await reader.read() == b""
        return heard

    assert play(script) == []


@pytest.mark.parametrize(("hello", "then"), [
    (JoinNode(1), struct.pack("<I", 2) + b"[]"), (JoinNode(1), frame(Heartbeat())),
    (JoinWorker(WORKER), frame(Ended(WORKER, 0))), (JoinWorker(WORKER), frame(Note(Worker(1, 1), "not me")))])
def test_nonsense_after_the_hello_ends_the_connection(hello, then):
    """Also what only others may say."""
    async def script(connect, heard):
        reader, writer = await connect()
        writer.write(frame(hello) + then)
        assert await reader.read() == b""
        await until(lambda: len(heard) == 2)
        return heard

    assert [message for _, message in play(script)] == [hello, None]


def test_all_workers_of_a_large_run_may_come_at_once():
    """More than asyncio lets wait by default, while the event loop is busy."""
    async def run():
        listener, address = listen()
        running = await serve(listener, lambda *_: None)
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(socket.create_connection((address.host, address.port), timeout=0.5))
        running.close()

    asyncio.run(run())


def test_who_says_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(server, "HELLO_SECONDS", 0.05)

    async def script(connect, heard):
        reader, _ = await connect()
        return await reader.read()

    assert play(script) == b""


def test_what_is_sent_before_closing_arrives():
    async def script(connect, heard):
        reader, writer = await connect()
        writer.write(frame(JoinWorker(WORKER)))
        await until(lambda: heard)
        connection = heard[0][0]
        connection.send(frame(Leave()))
        connection.close()
        connection.send(frame(Leave()))
        return await reader.read()

    assert play(script) == frame(Leave())
