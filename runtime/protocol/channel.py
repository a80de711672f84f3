"""One TCP connection to the coordinator: messages in JSON, between their length and their tag.

The length has 4 bytes, little-endian; `runtime.protocol.authentication` makes the tags.
"""

import contextlib
import hashlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar, get_args

import msgspec

from slipstream.runtime.errors import first_line, reason_of
from slipstream.runtime.protocol.authentication import TAG_BYTES, AuthenticationError, Secret, Tags, introduce
from slipstream.runtime.protocol.rendezvous import Rendezvous, RendezvousError

MAX_BYTES = 2**28
"""Of a message; a schedule is the largest."""
RETRY_SECONDS = 0.05
"""Between two attempts to connect."""
FIRST_ATTEMPT_SECONDS, ATTEMPT_SECONDS = 1.0, 10.0
"""How long one may take: where no packet comes back, the system would try for minutes."""
TELL_SECONDS = 30.0
"""How often it is said that nobody answers."""
SILENT_SECONDS = 60
"""A peer whose machine acknowledges nothing for so long is gone (Linux)."""
ANSWER_SECONDS = 60.0
"""What was begun to be sent, to node 0 or from it, arrives in milliseconds; where thousands start at once, later."""
CLOSE_SECONDS = 1.0
_LENGTH = struct.Struct("<I")
_READ_BYTES = 2**18
T = TypeVar("T")
M = TypeVar("M")


class ProtocolError(ValueError):
    """A peer sent what no peer may send. The message is one line."""


class Decoder(Generic[T]):
    """Reads the messages of one union.

    Made at import, before any thread starts, and used once for each type: msgspec crashes where two threads are the
    first to read a type at the same moment.
    """

    def __init__(self, union: object) -> None:
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(union)
        for kind in get_args(union):
            with contextlib.suppress(msgspec.ValidationError):
                self._decoder.decode(f'{{"type":"{kind.__name__}"}}')

    def __call__(self, body: bytes) -> T:
        """Read one message. Raises ProtocolError."""
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(first_line(error)) from None


class Frame(NamedTuple):
    """A message as it is sent on any connection: only the tag behind it is that of one."""

    data: bytes
    """Its length, and itself."""
    digest: bytes
    """SHA-256 of the message."""

    def tagged(self, tags: Tags) -> bytes:
        """As it is sent on one connection."""
        return self.data + tags.next(self.digest)


def frame(message: msgspec.Struct) -> Frame:
    """A message as it is sent."""
    body = msgspec.json.encode(message)
    if len(body) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes is too long")
    return Frame(_LENGTH.pack(len(body)) + body, hashlib.sha256(body).digest())


class Frames:
    """Cuts the bytes that a connection brings into messages, and checks their tags."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete with these bytes.

        Raises ProtocolError where one would be too long or has a wrong tag.
        """
        self._rest += data
        found, place = [], 0
        while len(self._rest) - place >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._rest, place)
            if size > MAX_BYTES:
                raise ProtocolError(f"a peer sent a message of {size} bytes")
            end = place + _LENGTH.size + size
            if len(self._rest) < end + TAG_BYTES:
                break
            body, tag = bytes(self._rest[place + _LENGTH.size:end]), bytes(self._rest[end:end + TAG_BYTES])
            try:
                self._tags.require(tag, hashlib.sha256(body).digest())
            except AuthenticationError as error:
                raise ProtocolError(str(error)) from None
            found.append(body)
            place = end + TAG_BYTES
        del self._rest[:place]
        return found


class Channel(Generic[T]):
    """A worker's or node agent's end of its connection to the coordinator. One thread reads, any thread may send.

    Connects when it is made, waiting up to `timeout_seconds` for the coordinator to listen, and as long again, if that
    is no longer than `ANSWER_SECONDS`, for its part of the handshake; sends `hello`.
    `waiting` is called with a line at once where that takes time, and every 30 s. Raises RendezvousError.
    """

    def __init__(self, address: Rendezvous, secret: Secret, hello: msgspec.Struct, decode: Callable[[bytes], T],
                 timeout_seconds: float, waiting: Callable[[str], None] = lambda _: None) -> None:
        self._decode = decode
        self._sending = threading.Lock()
        self._socket = _connect(address, timeout_seconds, waiting)
        self._early: list[T] = []
        try:
            self._tags, receiving = introduce(self._socket, secret, "control", frame(hello).tagged,
                                              min(timeout_seconds, ANSWER_SECONDS))
        except (AuthenticationError, OSError) as error:
            self._socket.close()
            raise RendezvousError(f"node 0 at {address} was reached, but {reason_of(error)}") from None
        self._frames = Frames(receiving)
        self._socket.settimeout(ANSWER_SECONDS)

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether `read` returns at once although a selector sees nothing to read."""
        return bool(self._early)

    def send(self, message: msgspec.Struct) -> None:
        """Send. Where node 0 is this machine, the message has arrived when this returns. Raises RendezvousError."""
        data = frame(message)
        try:
            with self._sending:  # tags are numbered in the order of the messages
                self._socket.sendall(data.tagged(self._tags))
        except OSError as error:
            raise _gone(error) from None

    def read(self) -> list[T]:
        """Wait for data; the messages that are complete with it.

        Raises RendezvousError at the connection's end, and where nothing comes for `ANSWER_SECONDS`.
        """
        if self._early:
            early, self._early = self._early, []
            return early
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise _gone(error) from None
        if not data:
            raise _gone("it ended, or has given this process up")
        try:
            return [self._decode(body) for body in self._frames.feed(data)]
        except ProtocolError as error:
            raise RendezvousError(f"node 0 sent what makes no sense: {error}") from None

    def wait_for(self, *kinds: type[M]) -> M:
        """The coordinator's first message, of one of these types.

        Raises RendezvousError, also where it does not come in `ANSWER_SECONDS`.
        """
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._early:
            if time.monotonic() > deadline:
                raise _gone("it takes too long to answer")
            self._early = self.read()
        first = self._early.pop(0)
        if not isinstance(first, kinds):
            raise RendezvousError(f"node 0 sent what makes no sense: {type(first).__name__} first")
        return first

    def abort(self) -> None:
        """End the connection: whoever reads finds so."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, once what was sent has arrived."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(CLOSE_SECONDS)
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(_READ_BYTES):  # else the system would drop what has not arrived
                pass
        self._socket.close()


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and notice where the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_SECONDS // 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)


def _connect(address: Rendezvous, timeout_seconds: float, waiting: Callable[[str], None]) -> socket.socket:
    deadline, tell, attempt = time.monotonic() + timeout_seconds, 0.0, FIRST_ATTEMPT_SECONDS
    while True:
        try:
            connection = _attempt(address, min(attempt, max(RETRY_SECONDS, deadline - time.monotonic())))
        except OSError as error:
            if time.monotonic() >= tell:
                waiting(f"waiting for node 0 at {address}: {reason_of(error)}")
                tell = time.monotonic() + TELL_SECONDS
            attempt = ATTEMPT_SECONDS
            if time.monotonic() > deadline:
                raise RendezvousError(f"cannot reach node 0 at {address} within {timeout_seconds:.0f} s: "
                                      f"{reason_of(error)}") from None
            time.sleep(RETRY_SECONDS)
            continue
        if connection is not None:
            return connection


def _attempt(address: Rendezvous, seconds: float) -> socket.socket | None:
    """A connection; None: once more. Raises OSError, also where the other end is gone as soon as it was there."""
    connection = socket.create_connection((address.host, address.port), seconds)
    try:
        if connection.getsockname() == connection.getpeername():
            # Where nobody listens on a port of this machine, the system may choose the same port for this end: TCP
            # then connects the socket with itself.
            connection.close()
            return None
        connection.settimeout(None)
        keep_alive(connection)
    except OSError:
        connection.close()
        raise
    return connection


def _gone(reason: OSError | str) -> RendezvousError:
    return RendezvousError(f"node 0 is gone: {reason if isinstance(reason, str) else reason_of(reason)}")
