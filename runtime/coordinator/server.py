"""The coordinator's ends of its connections: one server, to which workers and node agents connect."""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from runtime.protocol import to_coordinator
from runtime.protocol.channel import Frames, ProtocolError, keep_alive
from runtime.protocol.rendezvous import BACKLOG
from runtime.protocol.to_coordinator import FromNodeAgent, FromWorker, JoinNode, JoinWorker, ToCoordinator
from schedules.schedule import Worker

HELLO_SECONDS = 10.0
"""A connection whose first message takes longer is closed."""

Heard = Callable[["Connection", ToCoordinator | None], None]
"""Called with each message, in order, and with None when the connection has ended."""


class Connection(asyncio.Protocol):
    """One connection to a worker or a node agent."""

    def __init__(self, heard: Heard) -> None:
        self._heard = heard
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._hello: asyncio.TimerHandle | None = None
        self.peer: Worker | int | None = None
        """The worker, or the number of the node; None before the first message."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first message, which names the peer."""
        self._transport = cast(asyncio.Transport, transport)
        keep_alive(transport.get_extra_info("socket"))
        self._hello = asyncio.get_running_loop().call_later(HELLO_SECONDS, self.close)

    def data_received(self, data: bytes) -> None:
        """Pass messages on; on anything else, close the connection."""
        try:
            for body in self._frames.feed(data):
                self._take(to_coordinator.decode(body))
        except ProtocolError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The connection has ended, at either end."""
        if self._hello is not None:
            self._hello.cancel()
        self._transport = None
        if self.peer is not None:
            self._heard(self, None)

    @property
    def closed(self) -> bool:
        """Whether the peer is gone."""
        return self._transport is None

    def send(self, data: bytes) -> None:
        """Send a frame; nothing happens where the peer is gone."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection, once what was sent has gone out."""
        if self._transport is not None:
            self._transport.close()

    def _take(self, message: ToCoordinator) -> None:
        if self.peer is None:
            if isinstance(message, JoinWorker):
                self.peer = message.worker
            elif isinstance(message, JoinNode):
                self.peer = message.node
            else:
                raise ProtocolError("the first message must say who speaks")
            assert self._hello is not None
            self._hello.cancel()
        elif not _may_say(self.peer, message):
            raise ProtocolError(f"{self.peer} speaks for another")
        self._heard(self, message)


def _may_say(peer: Worker | int, message: ToCoordinator) -> bool:
    """Whether a message is one that this peer may send: a worker's about itself, or a node agent's."""
    if isinstance(peer, int):
        return isinstance(message, FromNodeAgent)
    return isinstance(message, FromWorker) and getattr(message, "worker", peer) == peer


async def serve(listener: socket.socket, heard: Heard) -> asyncio.Server:
    """Accept connections on a listening socket."""
    return await asyncio.get_running_loop().create_server(lambda: Connection(heard), sock=listener,
                                                           backlog=BACKLOG)
