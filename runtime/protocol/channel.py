"""Exchange JSON messages with the coordinator over one TCP connection.

Each message comes after its length, in 4 bytes, little-endian, and before its tag
(`runtime.protocol.authentication`).
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
FIRST_ATTEMPT_SECONDS = 1.0
"""Time limit of the first attempt to connect; the system alone would try for minutes."""
ATTEMPT_SECONDS = 10.0
"""Time limit of each later attempt to connect."""
PROGRESS_SECONDS = 30.0
"""Seconds between two lines that report that node 0 does not answer."""
SILENT_SECONDS = 60
"""Seconds without acknowledgement after which the other machine counts as gone (Linux)."""
ANSWER_SECONDS = 60.0
"""Time limit for data from node 0, which is slow while thousands of workers start."""
CLOSE_SECONDS = 1.0
"""Longest silence of node 0 while what was sent arrives, before a connection is closed."""
_LENGTH = struct.Struct("<I")
_READ_BYTES = 2**18
T = TypeVar("T")
M = TypeVar("M")


class ProtocolError(ValueError):
    """Error, in one line, for a message that the protocol does not allow."""


class Decoder(Generic[T]):
    """Decoder for JSON messages whose type is one of a union.

    Decoders must be created at import, before any thread starts.
    """

    def __init__(self, union: object) -> None:
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(union)
        # msgspec crashes if two threads are the first to decode a type at the same moment, so each
        # type is decoded once here.
        for kind in get_args(union):
            with contextlib.suppress(msgspec.ValidationError):
                self._decoder.decode(f'{{"type":"{kind.__name__}"}}')

    def __call__(self, body: bytes) -> T:
        """Decode one message. Raises ProtocolError if it is none of the union."""
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(first_line(error)) from None


class Frame(NamedTuple):
    """Message encoded once for any connection; only its tag differs between connections."""

    data: bytes
    """Length of the message in 4 bytes, and then the message in JSON."""
    digest: bytes
    """SHA-256 of the message."""

    def with_tag(self, tags: TagSequence) -> bytes:
        """Return the bytes to send on the connection that has these `tags`."""
        return self.data + tags.compute_next(self.digest)


def encode_frame(message: msgspec.Struct) -> Frame:
    """Encode a message as a frame. Raises ProtocolError if it is too long."""
    body = msgspec.json.encode(message)
    if len(body) > MAX_BYTES:
        raise ProtocolError(
            f"a message of {len(body)} bytes is too long; at most {MAX_BYTES} are allowed"
        )
    return Frame(_LENGTH.pack(len(body)) + body, hashlib.sha256(body).digest())


class FrameParser:
    """Parser that splits the bytes of a connection into messages, and checks their tags."""

    def __init__(self, tags: TagSequence) -> None:
        self._tags = tags
        self._rest = bytearray()

    def parse_messages(self, data: bytes) -> list[bytes]:
        """Return the JSON of each message that `data` completes; keep the rest for later.

        Raises ProtocolError if a message is too long or has a wrong tag.
        """
        self._rest += data
        bodies, start = [], 0
        while len(self._rest) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._rest, start)
            # Refuse a wrong length at once, rather than wait for its bytes and store them.
            if size > MAX_BYTES:
                raise ProtocolError(
                    f"a peer sent a message of {size} bytes; at most {MAX_BYTES} are allowed"
                )
            end = start + _LENGTH.size + size
            if len(self._rest) < end + TAG_BYTES:
                break
            body = bytes(self._rest[start + _LENGTH.size : end])
            # Nothing of a message is used before its tag is known to fit.
            tag = bytes(self._rest[end : end + TAG_BYTES])
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

    One thread reads; any thread may send. The constructor connects, and raises RendezvousError if
    node 0 cannot be reached in time, or if the handshake fails.

    Parameters
    ----------
    hello
        First message, which is sent at once.
    decode
        Function that decodes the coordinator's messages.
    timeout_seconds
        Time limit for connecting, and again for the coordinator's part of the handshake, for which
        it has at least 10 s and at most `ANSWER_SECONDS`.
    waiting
        Function that is called with a line of text at the first failed attempt, and every 30 s.
    """

    def __init__(
        self,
        address: Rendezvous,
        secret: Secret,
        hello: msgspec.Struct,
        decode: Callable[[bytes], T],
        timeout_seconds: float,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._decode = decode
        self._sending = threading.Lock()
        self._socket = _connect_with_retries(address, timeout_seconds, waiting)
        self._early: list[T] = []
        # Before both ends have proved that they know the secret, nothing that arrives is a message.
        try:
            self._tags, receiving = authenticate_connection(
                self._socket,
                secret,
                "control",
                encode_frame(hello).with_tag,
                min(timeout_seconds, ANSWER_SECONDS),
            )
        except (AuthenticationError, OSError) as error:
            self._socket.close()
            raise RendezvousError(
                f"node 0 at {address} was reached, but {describe_reason(error)}"
            ) from None
        self._frames = FrameParser(receiving)
        # A selector says when there is data, so only the rest of a message is waited for.
        self._socket.settimeout(ANSWER_SECONDS)

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket, for a selector."""
        return self._socket.fileno()

    @property
    def has_pending(self) -> bool:
        """True if `read` would return at once although a selector sees nothing on the socket."""
        return bool(self._early)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises ProtocolError if it is too long.

        Raises RendezvousError if node 0 is gone, or does not take the message in `ANSWER_SECONDS`.
        If node 0 is on this machine and reads, the message has arrived when this returns.
        """
        data = encode_frame(message)
        try:
            with self._sending:  # tags count the messages in the order in which they are sent
                self._socket.sendall(data.with_tag(self._tags))
        except OSError as error:
            raise _gone_error(error) from None

    def read(self) -> list[T]:
        """Wait for data, and return the messages that they complete, if any.

        Raises RendezvousError at the end of the connection, after an invalid message, and if
        nothing comes within `ANSWER_SECONDS`.
        """
        # These came together with the first message, so no selector reports them.
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
        """Return the coordinator's first message, which must be of one of these types.

        Messages that came with it are left for `read`. Raises RendezvousError as `read` does, and
        if the message is of another type, or is not complete after `ANSWER_SECONDS`.
        """
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
        """Close the connection when node 0 has, or is silent for `CLOSE_SECONDS`."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(CLOSE_SECONDS)
            self._socket.shutdown(socket.SHUT_WR)
            # Otherwise the system would drop data that has not arrived.
            while self._socket.recv(_READ_BYTES):
                pass
        self._socket.close()


def enable_keepalive(connection: socket.socket, silent_seconds: int = SILENT_SECONDS) -> None:
    """Make a socket send small messages at once, and notice a lost machine (Linux).

    If the other machine is lost, the socket fails after about `silent_seconds`.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # An idle connection is probed; data that nobody acknowledges end it after as long.
    if sys.platform.startswith("linux"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, silent_seconds // 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, silent_seconds // 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silent_seconds)


def _connect_with_retries(
    address: Rendezvous, timeout_seconds: float, waiting: Callable[[str], None]
) -> socket.socket:
    deadline, next_line, attempt = time.monotonic() + timeout_seconds, 0.0, FIRST_ATTEMPT_SECONDS
    while True:
        try:
            connection = _try_connect(
                address, min(attempt, max(RETRY_SECONDS, deadline - time.monotonic()))
            )
        except OSError as error:
            if time.monotonic() >= next_line:
                waiting(f"waiting for node 0 at {address}: {describe_reason(error)}")
                next_line = time.monotonic() + PROGRESS_SECONDS
            # A slow network gets more time from the second attempt on.
            attempt = ATTEMPT_SECONDS
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"cannot reach node 0 at {address} within {timeout_seconds:.0f} s: "
                    f"{describe_reason(error)}"
                ) from None
            time.sleep(RETRY_SECONDS)
            continue
        # None: the socket was connected to itself; try again.
        if connection is not None:
            return connection


def _try_connect(address: Rendezvous, seconds: float) -> socket.socket | None:
    """Try once to connect; None if the socket was connected to itself. Raises OSError."""
    connection = socket.create_connection((address.host, address.port), seconds)
    try:
        if connection.getsockname() == connection.getpeername():
            # If no process listens on a port of this machine, the system may choose that port for
            # this end: TCP then connects the socket to itself.
            connection.close()
            return None
        connection.settimeout(None)
        enable_keepalive(connection)
    except OSError:
        connection.close()
        raise
    return connection


def _gone_error(reason: OSError | str) -> RendezvousError:
    return RendezvousError(
        f"node 0 is gone: {reason if isinstance(reason, str) else describe_reason(reason)}"
    )
