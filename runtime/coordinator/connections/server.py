"""Server side of the coordinator's connections, for workers and node agents."""

import asyncio
import math
import socket
from collections.abc import Callable
from typing import cast, get_args

from slipstream.runtime.protocol import to_coordinator
from slipstream.runtime.protocol.authentication import (
    HELLO_BYTES,
    HELLO_SECONDS,
    AuthenticationError,
    Challenge,
    RefusalLog,
    Secret,
    TagSequence,
)
from slipstream.runtime.protocol.channel import (
    MAX_BYTES,
    Frame,
    FrameParser,
    ProtocolError,
    enable_keepalive,
)
from slipstream.runtime.protocol.rendezvous import BACKLOG
from slipstream.runtime.protocol.to_coordinator import (
    FromNodeAgent,
    FromWorker,
    JoinNode,
    JoinWorker,
    ToCoordinator,
)
from slipstream.schedules.schedule import Worker

MAX_UNSENT_BYTES = 2 * MAX_BYTES
"""Unsent bytes above which a peer is cut off, because it does not read."""

_FROM_WORKER = frozenset(get_args(FromWorker))
_FROM_NODE_AGENT = frozenset(get_args(FromNodeAgent))

MessageCallback = Callable[["Connection", ToCoordinator | None], None]
"""Function that is called with each message, and with None at the connection's end."""


class Server:
    """Coordinator's server: the connections that are open, and the functions that they call.

    Parameters
    ----------
    secret
        Secret by which the server and its peers authenticate each other.
    heard
        Function that is called with each message of a connection, and with None when the connection
        of an identified peer has ended.
    say
        Function that is called with lines about connections that were cut off (`RefusalLog`).
    most_unknown
        Number of connections that may be open without an identified peer; if there are more, the
        oldest is closed.
    """

    def __init__(
        self, secret: Secret, heard: MessageCallback, say: Callable[[str], None], most_unknown: int
    ) -> None:
        self.secret = secret
        self.heard = heard
        self.refused = RefusalLog(say)
        self._most_unknown = most_unknown
        self._unknown: dict[Connection, None] = {}
        self._open: set[Connection] = set()

    def add_connection(self, connection: "Connection") -> None:
        """Add a connection just opened; if too many are unidentified, cut off the oldest."""
        self._open.add(connection)
        self._unknown[connection] = None
        if len(self._unknown) > self._most_unknown:
            next(iter(self._unknown)).cut_off(
                f"more than {self._most_unknown} connections have no identified peer"
            )

    def mark_identified(self, connection: "Connection") -> None:
        """Stop counting a connection as unidentified: its peer is known, or it has ended."""
        self._unknown.pop(connection, None)

    def remove_connection(self, connection: "Connection") -> None:
        """Remove a connection that has ended."""
        self._open.discard(connection)

    def abort_all(self) -> None:
        """Abort open connections that are not closing yet, so that late peers notice the end."""
        for connection in list(self._open):
            if not connection.is_closing:
                connection.abort()


class Connection(asyncio.Protocol):
    """Connection to a worker or a node agent: authenticates the peer, then passes messages."""

    def __init__(self, server: Server) -> None:
        # The handshake, then tagged messages.
        self._server = server
        self._challenge = Challenge(server.secret, "control")
        self._received = bytearray()
        """Bytes of the handshake received so far."""
        self._frames: FrameParser | None = None
        """Decoder of messages; None until the peer has proved that it knows the secret."""
        self._tags: TagSequence | None = None
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        """Messages that are sent at the end of this turn of the event loop."""
        # The peer: where and who it is, and whether it still sends.
        self._hello: asyncio.TimerHandle | None = None
        self._address = ""
        self.peer: Worker | int | None = None
        """Worker, or number of the node, at the other end; None before the first message."""
        self.rank = 0
        """Rank of the process at the other end among the processes of its worker."""
        self.heard = math.inf
        """Time (`time.monotonic`) when the peer last sent anything; infinity: it may be silent."""
        self.over = False
        """True if the connection has ended and all its messages have been handled."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting; cut off a peer that is not identified within `HELLO_SECONDS`."""
        self._transport = cast(asyncio.Transport, transport)
        host, port, *_ = transport.get_extra_info("peername") or ("an unknown address", 0)
        self._address = f"{host}:{port}"
        enable_keepalive(transport.get_extra_info("socket"))
        self._hello = asyncio.get_running_loop().call_later(
            HELLO_SECONDS, self.cut_off, f"it did not identify itself within {HELLO_SECONDS:.0f} s"
        )
        self._transport.write(self._challenge.greeting)
        self._server.add_connection(self)

    def data_received(self, data: bytes) -> None:
        """Pass complete messages to the server's `heard`; cut off peers that send invalid data."""
        if self._transport is None or self._transport.is_closing():
            return
        # Nothing is decoded before the peer has proved that it knows the secret.
        try:
            if self._frames is None:
                data = self._shake_hands(data)
            if self._frames is not None:
                for body in self._frames.parse_messages(data):
                    self._receive_message(to_coordinator.decode(body))
        except (AuthenticationError, ProtocolError) as error:
            self.cut_off(str(error))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Tell the server's `heard` that an identified peer's connection ended, by either side."""
        self._stop_hello_timer()
        self._server.remove_connection(self)
        self._transport = None
        if self.peer is not None:
            self._server.heard(self, None)

    @property
    def is_closed(self) -> bool:
        """True if the connection has ended."""
        return self._transport is None

    @property
    def is_closing(self) -> bool:
        """True if the connection has ended, or ends when all sent data has been written."""
        return self._transport is None or self._transport.is_closing()

    def send(self, message: Frame) -> None:
        """Send a message with the next write, unless closing; cut off a peer not reading."""
        # One system call writes all, as calls are expensive.
        if not self.is_closing:
            assert self._tags is not None
            self._unsent.append(message.with_tag(self._tags))
            if len(self._unsent) == 1:
                asyncio.get_running_loop().call_soon(self._write_unsent)

    def close(self) -> None:
        """Close the connection when all sent data has been written."""
        self._write_unsent()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._stop_hello_timer()
        if self._transport is not None:
            self._transport.abort()

    def cut_off(self, why: str) -> None:
        """End the connection at once, unless it is closing; report the reason `why` to users."""
        self._stop_hello_timer()
        # A line for users: who it is, as far as that is known, and why.
        if self._transport is not None and not self._transport.is_closing():
            who = ""
            if self.peer is not None:
                kind = "node" if isinstance(self.peer, int) else "worker"
                who = f"{kind} {self.peer} at "
            self._server.refused(f"{who}{self._address}", why)
            self._transport.abort()

    def _write_unsent(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._transport is not None and unsent and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))
            # A peer that does not read must not fill this process's memory.
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self.cut_off("it does not read what it is sent")

    def _stop_hello_timer(self) -> None:
        self._server.mark_identified(self)
        if self._hello is not None:
            self._hello.cancel()

    def _shake_hands(self, data: bytes) -> bytes:
        """Process the handshake; return the bytes that follow it. Raises AuthenticationError."""
        self._received += data
        if len(self._received) < HELLO_BYTES:
            return b""
        # Each direction has tags of its own, so that nobody can send a message back to its sender.
        proof, (self._tags, receiving) = self._challenge.verify_hello(
            bytes(self._received[:HELLO_BYTES])
        )
        self._frames = FrameParser(receiving)
        assert self._transport is not None
        self._transport.write(proof)
        rest = bytes(self._received[HELLO_BYTES:])
        self._received.clear()
        return rest

    def _receive_message(self, message: ToCoordinator) -> None:
        # The peer is whom its first message names, and may then speak for nobody else.
        if self.peer is None:
            if isinstance(message, JoinWorker):
                self.peer, self.rank = message.worker, message.rank
            elif isinstance(message, JoinNode):
                self.peer = message.node
            else:
                raise ProtocolError("the first message must identify the sender")
            self._stop_hello_timer()
        elif not _can_send(self.peer, message):
            raise ProtocolError(f"it sent {type(message).__name__}, which this peer may not send")
        self._server.heard(self, message)


def _can_send(peer: Worker | int, message: ToCoordinator) -> bool:
    """Return whether `peer`, a worker or the node of an agent, may send a message."""
    if isinstance(peer, int):
        return type(message) in _FROM_NODE_AGENT
    # A worker may name no other one.
    return type(message) in _FROM_WORKER and getattr(message, "worker", peer) == peer


async def start_server(listener: socket.socket, server: Server) -> asyncio.Server:
    """Accept connections on a listening socket; return the server, which the caller closes."""
    return await asyncio.get_running_loop().create_server(
        lambda: Connection(server), sock=listener, backlog=BACKLOG
    )
