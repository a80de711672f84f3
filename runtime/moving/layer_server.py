"""Serve layers to receivers in a thread, each from its own queue.

The thread accepts connections, checks that a receiver knows the secret of the run, reads its
request, and sends the data that the training thread puts into its queue. A connection that breaks
or sends anything else is closed, with a line in this worker's log, and the others continue.
"""

import contextlib
import io
import math
import selectors
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from slipstream.runtime.moving.layer_messages import (
    MAX_HEADER_BYTES,
    LayerPart,
    LayerRequest,
    Message,
    MessageError,
    UpToDate,
    encode_message,
    read_message,
)
from slipstream.runtime.protocol.authentication import (
    HELLO_BYTES,
    HELLO_SECONDS,
    AuthenticationError,
    Challenge,
    ConnectionKeys,
    RefusalLog,
    Secret,
)

TIMEOUT_SECONDS = 30.0
"""Time after which a receiver that takes no data is dropped; most take milliseconds."""
IDLE_SECONDS = 600.0
"""Longest time that the thread waits for events before it checks again."""
CHUNK_BYTES = 2**20
"""Number of bytes that are passed to a connection in one call."""
QUEUE_STATES = 3
"""Size above which a queue is too long, in multiples of the requested state."""
MAX_UNKNOWN_RECEIVERS = 64
"""Largest number of open connections without a request; with more, the oldest is closed."""


class QueuedMessage(NamedTuple):
    """Message to be sent, with its tensors by name."""

    message: Message
    tensors: Mapping[str, Tensor]


class _SentMessage(NamedTuple):
    message: Message
    tensor_bytes: int


class ReceiverConnection:
    """Connection to one receiver, and the data to be sent on it."""

    def __init__(self, connection: socket.socket, address: str, challenge: Challenge) -> None:
        self.connection = connection
        self.address = address
        self.challenge = challenge
        self.keys: ConnectionKeys | None = None
        """Keys of the connection; None until the receiver has proved that it knows the secret."""
        self.request = LayerRequest(())
        self.received = bytearray()
        """Bytes read so far of the handshake, and then of the request."""
        self.asking = False
        self.answered = False
        self.closed = False
        self.full = False
        """True once too much data is queued, until the queue is empty again."""
        self.queue: deque[QueuedMessage] = deque()
        self.queued_bytes = 0
        self.max_bytes = math.inf
        """Bytes of tensors in the queue above which it is too long."""
        self.pieces: Iterator[bytes | memoryview] = iter(())
        """Remaining pieces of the message that is being sent."""
        self.piece = memoryview(b"")
        """Unsent rest of the piece that is being sent."""
        self.sending: _SentMessage | None = None
        self.not_before = 0.0
        """Time before which nothing more is sent, because the rate is limited."""
        self.progress = time.monotonic()
        """Time at which the receiver last took data, or had none to take."""

    @property
    def is_unknown(self) -> bool:
        """True if the connection is open and the receiver's request has not arrived yet."""
        return not (self.asking or self.answered or self.closed)

    @property
    def has_pending(self) -> bool:
        """True if data remain to be sent."""
        return not self.closed and (bool(self.queue) or self.sending is not None)


class LayerServer:
    """Server, run in a thread, that sends receivers what the training thread queues.

    `seconds_per_byte` limits the rate to each receiver that is sent state in training; 0: no limit.
    """

    # A lock protects what both threads use.

    def __init__(self, listener: socket.socket, secret: Secret, seconds_per_byte: float) -> None:
        self._listener = listener
        self._secret = secret
        self._refused = RefusalLog(lambda line: print(line, file=sys.stderr, flush=True))
        self._seconds_per_byte = seconds_per_byte
        self._lock = threading.Lock()
        self._receivers: list[ReceiverConnection] = []
        self._over = False
        self._wake_up, self._woken = socket.socketpair()
        for endpoint in (listener, self._wake_up, self._woken):
            endpoint.setblocking(False)

    def list_asking(self) -> list[ReceiverConnection]:
        """Return the receivers whose request has arrived and is not answered yet."""
        with self._lock:
            return [
                receiver for receiver in self._receivers if receiver.asking and not receiver.closed
            ]

    def list_following(self) -> list[ReceiverConnection]:
        """Return the receivers whose state is queued or sent, and that want all later gradients."""
        # Training asks after each step, mostly in vain: no lock is taken for that.
        if not self._receivers:
            return []
        with self._lock:
            return [
                receiver
                for receiver in self._receivers
                if receiver.answered and receiver.request.order is None and not receiver.closed
            ]

    def list_sockets(self) -> list[socket.socket]:
        """Return the open sockets: those of receivers, and the pair that wakes the thread."""
        with self._lock:
            return [
                self._wake_up,
                self._woken,
                *(receiver.connection for receiver in self._receivers),
            ]

    def send_states(self, receiver: ReceiverConnection, states: Sequence[QueuedMessage]) -> None:
        """Queue the states that a receiver has requested, and count it as answered."""
        with self._lock:
            receiver.asking, receiver.answered = False, True
            state_bytes = sum(_count_bytes(state.tensors) for state in states)
            receiver.max_bytes = QUEUE_STATES * state_bytes
        for message, tensors in states:
            self.queue_message(receiver, message, tensors)

    def queue_message(
        self,
        receiver: ReceiverConnection,
        message: Message,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Queue a message and its tensors (by name) for a receiver."""
        with self._lock:
            receiver.queue.append(QueuedMessage(message, tensors or {}))
            receiver.queued_bytes += _count_bytes(tensors or {})
            receiver.full = receiver.full or receiver.queued_bytes > receiver.max_bytes
        self._wake_thread()

    def drop_receiver(self, receiver: ReceiverConnection) -> None:
        """Send nothing more to a receiver, and close its connection."""
        # The thread closes the socket; a shutdown wakes it if it waits for this connection.
        with self._lock:
            receiver.closed = True
            receiver.queue.clear()
        with contextlib.suppress(OSError):
            receiver.connection.shutdown(socket.SHUT_RDWR)
        self._wake_thread()

    def close(self) -> None:
        """End the thread, which closes all connections, without waiting for it."""
        self._over = True
        for receiver in self._receivers:
            self.drop_receiver(receiver)
        self._wake_thread()

    def serve(self) -> None:
        """Accept connections, read requests and send data until `close`; the thread runs this."""
        with selectors.DefaultSelector() as selector, self._listener, self._wake_up, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._over:
                for key, events in selector.select(self._register_events(selector)):
                    if key.fileobj is self._listener:
                        self._accept_receiver(selector)
                    elif key.fileobj is self._woken:
                        self._woken.recv(4096)
                    else:
                        self._serve_receiver(key.data, events)
                self._remove_closed(selector)
            self._remove_closed(selector)

    def _wake_thread(self) -> None:
        # If full, the thread wakes up anyway; if closed, it has ended.
        with contextlib.suppress(OSError):
            self._wake_up.send(b"\0")

    def _register_events(self, selector: selectors.BaseSelector) -> float:
        """Drop receivers that are too slow, and register events; return the seconds to wait."""
        now, wait = time.monotonic(), math.inf
        for receiver in self._receivers:
            # A receiver is watched while it asks, while data wait for it, and otherwise not.
            pending, is_held_back = receiver.has_pending, receiver.not_before > now
            events = selectors.EVENT_READ
            if receiver.is_unknown:
                wait = min(wait, HELLO_SECONDS)
                if now - receiver.progress > HELLO_SECONDS:
                    self._refuse_receiver(
                        receiver, f"it did not send a request within {HELLO_SECONDS:.0f} s"
                    )
            elif not pending:
                receiver.progress = now
            elif is_held_back:
                wait = min(wait, receiver.not_before - now)
            else:
                wait = min(wait, TIMEOUT_SECONDS)
                if now - max(receiver.progress, receiver.not_before) > TIMEOUT_SECONDS:
                    self.drop_receiver(receiver)
            if pending and not is_held_back:
                events |= selectors.EVENT_WRITE
            if selector.get_key(receiver.connection).events != events:
                selector.modify(receiver.connection, events, receiver)
        return min(wait, IDLE_SECONDS)

    def _accept_receiver(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            connection, (host, port, *_) = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            receiver = ReceiverConnection(
                connection, f"{host}:{port}", Challenge(self._secret, "layers")
            )
            with self._lock:
                self._receivers.append(receiver)
            selector.register(connection, selectors.EVENT_READ, receiver)
            unknown = [receiver for receiver in self._receivers if receiver.is_unknown]
            if len(unknown) > MAX_UNKNOWN_RECEIVERS:
                self._refuse_receiver(
                    unknown[0], f"more than {MAX_UNKNOWN_RECEIVERS} connections sent no request"
                )
            # A new socket's buffer has room for it, and for the proof.
            connection.send(receiver.challenge.greeting)

    def _remove_closed(self, selector: selectors.BaseSelector) -> None:
        with self._lock:
            closed = [receiver for receiver in self._receivers if receiver.closed]
            self._receivers = [receiver for receiver in self._receivers if not receiver.closed]
        for receiver in closed:
            selector.unregister(receiver.connection)
            receiver.connection.close()

    def _serve_receiver(self, receiver: ReceiverConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read_request(receiver)
            if events & selectors.EVENT_WRITE and not receiver.closed:
                self._send_chunk(receiver)
        except BlockingIOError:
            pass
        except OSError:
            self.drop_receiver(receiver)
        except (AuthenticationError, MessageError) as error:
            self._refuse_receiver(receiver, str(error))
        except Exception:  # this thread serves the other receivers, too, and training waits for it
            traceback.print_exc()
            self.drop_receiver(receiver)

    def _refuse_receiver(self, receiver: ReceiverConnection, why: str) -> None:
        self._refused(f"{receiver.address}, connected to the layer server,", why)
        self.drop_receiver(receiver)

    def _read_request(self, receiver: ReceiverConnection) -> None:
        """Read some bytes of a receiver's handshake or request."""
        # After the request, a receiver may only close the connection.
        data = receiver.connection.recv(4096)
        if not data:
            raise ConnectionError("closed")
        if receiver.asking or receiver.answered or len(receiver.received) > MAX_HEADER_BYTES:
            raise MessageError("it sent more than one request")
        receiver.received += data
        # The handshake comes first: until it is complete, nothing is taken for a request.
        if receiver.keys is None:
            if len(receiver.received) < HELLO_BYTES:
                return
            proof, receiver.keys = receiver.challenge.verify_hello(
                bytes(receiver.received[:HELLO_BYTES])
            )
            receiver.connection.send(proof)
            del receiver.received[:HELLO_BYTES]
        try:
            request, _ = read_message(io.BytesIO(receiver.received), receiver.keys.receiving)
        except ConnectionError:
            return  # the request is not complete yet
        if not isinstance(request, LayerRequest):
            raise MessageError("it sent another message instead of a request")
        with self._lock:
            receiver.request, receiver.asking = request, True

    def _send_chunk(self, receiver: ReceiverConnection) -> None:
        if not receiver.piece:
            receiver.piece = memoryview(self._next_piece(receiver))
        sent = receiver.connection.send(receiver.piece[:CHUNK_BYTES])
        receiver.piece = receiver.piece[sent:]
        now = receiver.progress = time.monotonic()
        # Only state that is sent during training is limited; gradients must keep up.
        if (
            self._seconds_per_byte
            and receiver.sending
            and isinstance(receiver.sending.message, LayerPart)
            and receiver.request.order is None
        ):
            receiver.not_before = now + sent * self._seconds_per_byte
        if not receiver.piece:
            receiver.piece = memoryview(self._next_piece(receiver))

    def _next_piece(self, receiver: ReceiverConnection) -> bytes | memoryview:
        # The rest of the message that is being sent; then the next one in the queue; when that is
        # empty, once, that the receiver is up to date; and then nothing.
        while True:
            piece = next(receiver.pieces, None)
            if piece is not None:
                return piece
            with self._lock:
                sent = receiver.sending
                if sent is not None:
                    receiver.queued_bytes -= sent.tensor_bytes
                    receiver.full = receiver.full and bool(receiver.queue)
                if receiver.queue:
                    # Set before popping, never in between: `has_pending` reads without the lock.
                    message, tensors = receiver.queue[0]
                    receiver.sending = _SentMessage(message, _count_bytes(tensors))
                    receiver.queue.popleft()
                elif sent is not None and not isinstance(sent.message, UpToDate):
                    message, tensors = UpToDate(), {}
                    receiver.sending = _SentMessage(message, 0)
                else:
                    receiver.sending = None
                    return b""
            assert receiver.keys is not None
            receiver.pieces = encode_message(receiver.keys.sending, message, tensors)


def _count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
