"""Exchange JSON messages with the coordinator over one TCP connection. Each is between its length,
in 4 bytes, little-endian, and its tag (`runtime.protocol.authentication`)."""

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

from slipstream.runtime.errors import describe_reason, first_line
from slipstream.runtime.protocol.authentication import (
    TAG_BYTES,
    AuthenticationError,
    Secret,
    TagSequence,
    authenticate_connection,
)
from slipstream.runtime.protocol.rendezvous import Rendezvous, RendezvousError

MAX_BYTES = 2**28
"""Largest size of a message; schedules are the largest."""
RETRY_SECONDS = 0.05
"""Time between two attempts to connect."""
FIRST_ATTEMPT_SECONDS, ATTEMPT_SECONDS = 1.0, 10.0
"""Time limits of the first and later attempts to connect. The system would try for minutes."""
PROGRESS_SECONDS = 30.0
"""Seconds from one line that reports that node 0 does not answer to the next."""
SILENT_SECONDS = 60
"""Time after which a peer whose machine acknowledges nothing counts as gone (Linux)."""
ANSWER_SECONDS = 60.0
"""Time limit for the rest of a message, which takes long if thousands start at once."""
CLOSE_SECONDS = 1.0
_LENGTH = struct.Struct("<I")
_READ_BYTES = 2**18
T = TypeVar("T")
M = TypeVar("M")


class ProtocolError(ValueError):
    """Error for a message that no peer may send. The message is one line."""


class Decoder(Generic[T]):
    """Decoder for JSON messages whose type is one of a union.

    It is created at import, before any thread starts, and its constructor decodes each type once:
    msgspec crashes if two threads are the first to decode a type at the same moment.
    """

    def __init__(self, union: object) -> None:
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(union)
        for kind in get_args(union):
            with contextlib.suppress(msgspec.ValidationError):
                self._decoder.decode(f'{{"type":"{kind.__name__}"}}')

    def __call__(self, body: bytes) -> T:
        """Decode one message. Raises ProtocolError."""
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(first_line(error)) from None


class Frame(NamedTuple):
    """Encoded message for any connection, which determines only the tag behind it."""

    data: bytes
    """Length of the message in 4 bytes, and then the message in JSON."""
    digest: bytes
    """SHA-256 of the message."""

    def with_tag(self, tags: TagSequence) -> bytes:
        """Return the bytes to send on one connection, with the next of its `tags`."""
        return self.data + tags.compute_next(self.digest)


def encode_frame(message: msgspec.Struct) -> Frame:
    """Encode a message as a frame. Raises ProtocolError if it is too long."""
    body = msgspec.json.encode(message)
    if len(body) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes is too long; at most {MAX_BYTES} are allowed")
    return Frame(_LENGTH.pack(len(body)) + body, hashlib.sha256(body).digest())


class FrameParser:
    """Parser that splits the bytes of a connection into messages, and checks their tags."""

    def __init__(self, tags: TagSequence) -> None:
        self._tags = tags
        self._rest = bytearray()

    def parse_messages(self, data: bytes) -> list[bytes]:
        """Return the JSON of each message that is complete after `data`; keep the rest. Raises
        ProtocolError if a message is too long or has a wrong tag."""
        self._rest += data
        bodies, start = [], 0
        while len(self._rest) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._rest, start)
            if size > MAX_BYTES:
                raise ProtocolError(f"a peer sent a message of {size} bytes; at most {MAX_BYTES} are allowed")
            end = start + _LENGTH.size + size
            if len(self._rest) < end + TAG_BYTES:
                break
            body, tag = bytes(self._rest[start + _LENGTH.size:end]), bytes(self._rest[end:end + TAG_BYTES])
            try:
                self._tags.verify_next(tag, hashlib.sha256(body).digest())
            except AuthenticationError as error:
                raise ProtocolError(str(error)) from None
            bodies.append(body)
            start = end + TAG_BYTES
        del self._rest[:start]
        return bodies


class Channel(Generic[T]):
    """Connection to the coordinator, at the end of a worker or node agent.

    One thread reads; any thread may send. The constructor connects and sends `hello`. It waits up
    to `timeout_seconds` for the coordinator to listen, and then as long for the coordinator's part
    of the handshake, but at least 10 s and at most `ANSWER_SECONDS`. `waiting` is called with a
    line at the first failed attempt, and every 30 s. Raises RendezvousError.
    """

    def __init__(self, address: Rendezvous, secret: Secret, hello: msgspec.Struct, decode: Callable[[bytes], T],
                 timeout_seconds: float, waiting: Callable[[str], None] = lambda _: None) -> None:
        self._decode = decode
        self._sending = threading.Lock()
        self._socket = _connect_with_retries(address, timeout_seconds, waiting)
        self._early: list[T] = []
        try:
            self._tags, receiving = authenticate_connection(self._socket, secret, "control",
                                                            encode_frame(hello).with_tag,
                                                            min(timeout_seconds, ANSWER_SECONDS))
        except (AuthenticationError, OSError) as error:
            self._socket.close()
            raise RendezvousError(f"node 0 at {address} was reached, but {describe_reason(error)}") from None
        self._frames = FrameParser(receiving)
        self._socket.settimeout(ANSWER_SECONDS)

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket, for a selector."""
        return self._socket.fileno()

    @property
    def has_pending(self) -> bool:
        """True if `read` would not wait although a selector sees nothing on the socket."""
        return bool(self._early)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, which has then arrived if node 0 is here. Raises RendezvousError."""
        data = encode_frame(message)
        try:
            with self._sending:  # tags count the messages in the order in which they are sent
                self._socket.sendall(data.with_tag(self._tags))
        except OSError as error:
            raise _gone_error(error) from None

    def read(self) -> list[T]:
        """Wait for data, and return the messages that are complete with it. Raises RendezvousError
        at the end of the connection, and if nothing comes within `ANSWER_SECONDS`."""
        if self._early:
            early, self._early = self._early, []
            return early
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise _gone_error(error) from None
        if not data:
            raise _gone_error("it has ended, or has given up this process")
        try:
            return [self._decode(body) for body in self._frames.parse_messages(data)]
        except ProtocolError as error:
            raise RendezvousError(f"node 0 sent an invalid message: {error}") from None

    def read_first(self, *kinds: type[M]) -> M:
        """Return the coordinator's first message, which must be of one of these types. Raises
        RendezvousError if it is not, or does not come within `ANSWER_SECONDS`."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._early:
            if time.monotonic() > deadline:
                raise _gone_error("it takes too long to answer")
            self._early = self.read()
        first = self._early.pop(0)
        if not isinstance(first, kinds):
            raise RendezvousError(f"node 0 sent an invalid first message: {type(first).__name__}")
        return first

    def abort(self) -> None:
        """Shut the connection down, so that a thread that reads from it gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection after all that was sent has arrived."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(CLOSE_SECONDS)
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(_READ_BYTES):  # otherwise the system would drop data that has not arrived
                pass
        self._socket.close()


def enable_keepalive(connection: socket.socket, silent_seconds: int = SILENT_SECONDS) -> None:
    """Have a socket send small messages at once, and notice lost machines. `silent_seconds` are
    those after which a machine that acknowledges nothing counts as gone (Linux)."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, silent_seconds // 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, silent_seconds // 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silent_seconds)


def _connect_with_retries(address: Rendezvous, timeout_seconds: float, waiting: Callable[[str], None]) -> socket.socket:
    deadline, next_line, attempt = time.monotonic() + timeout_seconds, 0.0, FIRST_ATTEMPT_SECONDS
    while True:
        try:
            connection = _try_connect(address, min(attempt, max(RETRY_SECONDS, deadline - time.monotonic())))
        except OSError as error:
            if time.monotonic() >= next_line:
                waiting(f"waiting for node 0 at {address}: {describe_reason(error)}")
                next_line = time.monotonic() + PROGRESS_SECONDS
            attempt = ATTEMPT_SECONDS
            if time.monotonic() > deadline:
                raise RendezvousError(f"cannot reach node 0 at {address} within {timeout_seconds:.0f} s: "
                                      f"{describe_reason(error)}") from None
            time.sleep(RETRY_SECONDS)
            continue
        if connection is not None:
            return connection


def _try_connect(address: Rendezvous, seconds: float) -> socket.socket | None:
    """Try once to connect; None if TCP has connected the socket to itself. Raises OSError."""
    connection = socket.create_connection((address.host, address.port), seconds)
    try:
        if connection.getsockname() == connection.getpeername():
            # If no process listens on a port of this machine, the system may choose that port for this end: TCP
            # then connects the socket to itself.
            connection.close()
            return None
        connection.settimeout(None)
        enable_keepalive(connection)
    except OSError:
        connection.close()
        raise
    return connection


def _gone_error(reason: OSError | str) -> RendezvousError:
    return RendezvousError(f"node 0 is gone: {reason if isinstance(reason, str) else describe_reason(reason)}")
