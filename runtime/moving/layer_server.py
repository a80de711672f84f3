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
"""Time after which a receiver is dropped that takes nothing: usually, milliseconds."""
IDLE_SECONDS = 600.0
"""Longest time that the thread waits for events before it checks again."""
CHUNK_BYTES = 2**20
"""Number of bytes that are passed to a connection in one call."""
QUEUE_STATES = 3
"""Bound on a receiver's queue, as a multiple of the memory of the requested state."""
MAX_UNKNOWN_RECEIVERS = 64
"""Largest number of open connections without a request; then the oldest is closed."""


class ReceiverConnection:
    """Connection to one receiver, and the data to be sent on it."""

    def __init__(self, connection: socket.socket, address: str, challenge: Challenge) -> None:
        self.connection = connection
        self.address = address
        self.challenge = challenge
        self.keys: ConnectionKeys | None = None
        """Keys of the connection. None until the receiver has proved that it knows the secret."""
        self.request = LayerRequest(())
        self.received = bytearray()
        """Bytes of the handshake, and then of the request, until that is complete."""
        self.asking = False
        self.answered = False
        self.closed = False
        self.full = False
        """True from when too much data is queued until the queue is empty."""
        self.queue: deque[tuple[Message, Mapping[str, Tensor]]] = deque()
        self.queued_bytes = 0
        self.most_bytes = math.inf
        self.pieces: Iterator[bytes | memoryview] = iter(())
        """Remaining pieces of the message that is being sent."""
        self.piece = memoryview(b"")
        """Unsent rest of the piece that is being sent."""
        self.sending: tuple[Message, int] | None = None
        """Message that is being sent, and the number of bytes of its tensors."""
        self.not_before = 0.0
        self.progress = time.monotonic()

    @property
    def is_unknown(self) -> bool:
        """True if the connection is open and the receiver's request has not arrived."""
        return not (self.asking or self.answered or self.closed)

    @property
    def has_pending(self) -> bool:
        """True if data remain to be sent."""
        return not self.closed and (bool(self.queue) or self.sending is not None)


class LayerServer:
    """Server that sends layers to receivers in a thread of its own. The training thread passes it
    the data to send; a lock protects what both use."""

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
        """Return the receivers whose request has not been answered."""
        with self._lock:
            return [receiver for receiver in self._receivers if receiver.asking and not receiver.closed]

    def list_following(self) -> list[ReceiverConnection]:
        """Return the receivers that have been answered, and want each later step's gradients."""
        if not self._receivers:
            return []
        with self._lock:
            return [receiver for receiver in self._receivers if receiver.answered and receiver.request.order is None
                    and not receiver.closed]

    def list_sockets(self) -> list[socket.socket]:
        """Return the open sockets: those of receivers, and the pair that wakes the thread."""
        with self._lock:
            return [self._wake_up, self._woken, *(receiver.connection for receiver in self._receivers)]

    def send_states(self, receiver: ReceiverConnection,
                    states: Sequence[tuple[LayerPart, Mapping[str, Tensor]]]) -> None:
        """Queue the states that a receiver has requested; it counts as answered from then on.
        Further messages can then be queued for it."""
        with self._lock:
            receiver.asking, receiver.answered = False, True
            receiver.most_bytes = QUEUE_STATES * sum(_count_bytes(state) for _, state in states)
        for message, state in states:
            self.queue_message(receiver, message, state)

    def queue_message(self, receiver: ReceiverConnection, message: Message,
                      tensors: Mapping[str, Tensor] | None = None) -> None:
        """Queue a message with its tensors, by name, behind all that were queued before."""
        with self._lock:
            receiver.queue.append((message, tensors or {}))
            receiver.queued_bytes += _count_bytes(tensors or {})
            receiver.full = receiver.full or receiver.queued_bytes > receiver.most_bytes
        self._wake_thread()

    def drop_receiver(self, receiver: ReceiverConnection) -> None:
        """Send nothing more to a receiver, and close its connection."""
        with self._lock:
            receiver.closed = True
            receiver.queue.clear()
        with contextlib.suppress(OSError):
            receiver.connection.shutdown(socket.SHUT_RDWR)
        self._wake_thread()

    def close(self) -> None:
        """End the thread, and close all connections."""
        self._over = True
        for receiver in self._receivers:
            self.drop_receiver(receiver)
        self._wake_thread()

    def serve(self) -> None:
        """Accept connections, read requests and send data until `close`, in the thread."""
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
        with contextlib.suppress(OSError):  # if full, the thread wakes up anyway; if closed, it has ended
            self._wake_up.send(b"\0")

    def _register_events(self, selector: selectors.BaseSelector) -> float:
        """Register the events to wait for; return the seconds after which to do so again."""
        now, wait = time.monotonic(), math.inf
        for receiver in self._receivers:
            pending, held_back = receiver.has_pending, receiver.not_before > now
            if receiver.is_unknown:
                wait = min(wait, HELLO_SECONDS)
                if now - receiver.progress > HELLO_SECONDS:
                    self._refuse_receiver(receiver, f"it did not send a request within {HELLO_SECONDS:.0f} s")
            elif pending:
                wait = min(wait, max(receiver.not_before - now, 0) if held_back else TIMEOUT_SECONDS)
                if not held_back and now - max(receiver.progress, receiver.not_before) > TIMEOUT_SECONDS:
                    self.drop_receiver(receiver)
            else:
                receiver.progress = now
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if pending and not held_back else 0)
            if selector.get_key(receiver.connection).events != events:
                selector.modify(receiver.connection, events, receiver)
        return min(wait, IDLE_SECONDS)

    def _accept_receiver(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            connection, (host, port, *_) = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            receiver = ReceiverConnection(connection, f"{host}:{port}", Challenge(self._secret, "layers"))
            with self._lock:
                self._receivers.append(receiver)
            selector.register(connection, selectors.EVENT_READ, receiver)
            unknown = [one for one in self._receivers if one.is_unknown]
            if len(unknown) > MAX_UNKNOWN_RECEIVERS:
                self._refuse_receiver(unknown[0], f"more than {MAX_UNKNOWN_RECEIVERS} connections sent no request")
            connection.send(receiver.challenge.greeting)  # a new socket's buffer has room for it, and for the proof

    def _remove_closed(self, selector: selectors.BaseSelector) -> None:
        with self._lock:
            closed = [connected for connected in self._receivers if connected.closed]
            self._receivers = [connected for connected in self._receivers if not connected.closed]
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
        """Read some of the handshake or request, after which a peer may only close."""
        data = receiver.connection.recv(4096)
        if not data:
            raise ConnectionError("closed")
        if receiver.asking or receiver.answered or len(receiver.received) > MAX_HEADER_BYTES:
            raise MessageError("it sent more than one request")
        receiver.received += data
        if receiver.keys is None:
            if len(receiver.received) < HELLO_BYTES:
                return
            proof, receiver.keys = receiver.challenge.verify_hello(bytes(receiver.received[:HELLO_BYTES]))
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
        if self._seconds_per_byte and receiver.sending and isinstance(receiver.sending[0], LayerPart) \
                and receiver.request.order is None:
            receiver.not_before = now + sent * self._seconds_per_byte
        if not receiver.piece:
            receiver.piece = memoryview(self._next_piece(receiver))

    def _next_piece(self, receiver: ReceiverConnection) -> bytes | memoryview:
        """Return the next bytes to send to a receiver; empty if all has been sent."""
        while True:
            piece = next(receiver.pieces, None)
            if piece is not None:
                return piece
            with self._lock:
                sent = receiver.sending
                if sent is not None:
                    receiver.queued_bytes -= sent[1]
                    receiver.full = receiver.full and bool(receiver.queue)
                if receiver.queue:
                    # Set `sending` before popping, never in between: `pending` is read without the lock.
                    message, tensors = receiver.queue[0]
                    receiver.sending = message, _count_bytes(tensors)
                    receiver.queue.popleft()
                elif sent is not None and not isinstance(sent[0], UpToDate):
                    message, tensors = UpToDate(), {}
                    receiver.sending = message, 0
                else:
                    receiver.sending = None
                    return b""
            assert receiver.keys is not None
            receiver.pieces = encode_message(receiver.keys.sending, message, tensors)


def _count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
