"""Layer server: the thread of a layer sender that talks to the receivers, and what waits to be sent to each.

It accepts connections, checks that a receiver knows the secret of the run, reads its request, and sends what the thread
that trains puts into its queue. A connection that breaks or says anything else is ended, with a line in this worker's
log, and the others go on.
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

from slipstream.runtime.protocol.authentication import (
    HELLO_BYTES,
    HELLO_SECONDS,
    AuthenticationError,
    Challenge,
    Keys,
    Refusals,
    Secret,
)
from slipstream.runtime.worker.layer_messages import (
    MAX_HEADER_BYTES,
    LayerPart,
    LayerRequest,
    Message,
    MessageError,
    UpToDate,
    pack,
    read_message,
)

TIMEOUT_SECONDS = 30.0
"""A receiver that is alive takes something in milliseconds."""
IDLE_SECONDS = 600.0
"""How long it waits for something to do before it looks again."""
CHUNK_BYTES = 2**20
"""Handed to a connection in one call."""
QUEUE_STATES = 3
"""As many times the memory of what was asked for may wait to be sent."""
MOST_UNKNOWN = 64
"""Connections that may be open without having asked for anything; the oldest is closed where there are more."""


class Receiver:
    """One connection, and what is to be sent on it."""

    def __init__(self, connection: socket.socket, address: str, challenge: Challenge) -> None:
        self.connection = connection
        self.address = address
        self.challenge = challenge
        self.keys: Keys | None = None
        """None until it has proved that it knows the secret."""
        self.request = LayerRequest(())
        self.received = bytearray()
        """Of the handshake, and then of its request, until that is complete."""
        self.asking = False
        self.answered = False
        self.closed = False
        self.full = False
        """True from when too much waits to be sent until nothing does."""
        self.queue: deque[tuple[Message, Mapping[str, Tensor]]] = deque()
        self.queued_bytes = 0
        self.most_bytes = math.inf
        self.pieces: Iterator[bytes | memoryview] = iter(())
        """Those left of the message that is being sent."""
        self.piece = memoryview(b"")
        """What is left of the one that is being sent."""
        self.sending: tuple[Message, int] | None = None
        """The message that is being sent, and the bytes of its tensors."""
        self.not_before = 0.0
        self.progress = time.monotonic()

    @property
    def unknown(self) -> bool:
        """Whether it has not asked for anything yet."""
        return not (self.asking or self.answered or self.closed)

    @property
    def pending(self) -> bool:
        """Whether anything is still to be sent."""
        return not self.closed and (bool(self.queue) or self.sending is not None)


class LayerServer:
    """The thread that serves, and what it shares with the one that trains, under a lock."""

    def __init__(self, listener: socket.socket, secret: Secret, seconds_per_byte: float) -> None:
        self._listener = listener
        self._secret = secret
        self._refused = Refusals(lambda line: print(line, file=sys.stderr, flush=True))
        self._seconds_per_byte = seconds_per_byte
        self._lock = threading.Lock()
        self._receivers: list[Receiver] = []
        self._over = False
        self._wake_up, self._woken = socket.socketpair()
        for one in (listener, self._wake_up, self._woken):
            one.setblocking(False)

    def asking(self) -> list[Receiver]:
        """Those that wait for an answer."""
        with self._lock:
            return [one for one in self._receivers if one.asking and not one.closed]

    def following(self) -> list[Receiver]:
        """Those that have been answered and want every step."""
        if not self._receivers:
            return []
        with self._lock:
            return [one for one in self._receivers if one.answered and one.request.order is None
                    and not one.closed]

    def connections(self) -> list[socket.socket]:
        """Those that are open."""
        with self._lock:
            return [self._wake_up, self._woken, *(one.connection for one in self._receivers)]

    def answer(self, receiver: Receiver, states: Sequence[tuple[LayerPart, Mapping[str, Tensor]]]) -> None:
        """Send states, and whatever is put in from now on."""
        with self._lock:
            receiver.asking, receiver.answered = False, True
            receiver.most_bytes = QUEUE_STATES * sum(_size(state) for _, state in states)
        for message, state in states:
            self.put(receiver, message, state)

    def put(self, receiver: Receiver, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send this after all that was put in before."""
        with self._lock:
            receiver.queue.append((message, tensors or {}))
            receiver.queued_bytes += _size(tensors or {})
            receiver.full = receiver.full or receiver.queued_bytes > receiver.most_bytes
        self._wake()

    def drop(self, receiver: Receiver) -> None:
        """Send no more, and end the connection."""
        with self._lock:
            receiver.closed = True
            receiver.queue.clear()
        with contextlib.suppress(OSError):
            receiver.connection.shutdown(socket.SHUT_RDWR)
        self._wake()

    def close(self) -> None:
        """End the thread and all connections."""
        self._over = True
        for receiver in self._receivers:
            self.drop(receiver)
        self._wake()

    def serve(self) -> None:
        """The thread: accept connections, read requests, send; until `close`."""
        with selectors.DefaultSelector() as selector, self._listener, self._wake_up, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._over:
                for key, events in selector.select(self._choose_what_to_wait_for(selector)):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fileobj is self._woken:
                        self._woken.recv(4096)
                    else:
                        self._attend(key.data, events)
                self._forget_the_closed(selector)
            self._forget_the_closed(selector)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread will wake up anyway; closed: it has ended
            self._wake_up.send(b"\0")

    def _choose_what_to_wait_for(self, selector: selectors.BaseSelector) -> float:
        """Which connections to write to; the seconds after which to look again."""
        now, wait = time.monotonic(), math.inf
        for receiver in self._receivers:
            pending, held_back = receiver.pending, receiver.not_before > now
            if receiver.unknown:
                wait = min(wait, HELLO_SECONDS)
                if now - receiver.progress > HELLO_SECONDS:
                    self._cut_off(receiver, f"it did not ask for anything within {HELLO_SECONDS:.0f} s")
            elif pending:
                wait = min(wait, max(receiver.not_before - now, 0) if held_back else TIMEOUT_SECONDS)
                if not held_back and now - max(receiver.progress, receiver.not_before) > TIMEOUT_SECONDS:
                    self.drop(receiver)
            else:
                receiver.progress = now
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if pending and not held_back else 0)
            if selector.get_key(receiver.connection).events != events:
                selector.modify(receiver.connection, events, receiver)
        return min(wait, IDLE_SECONDS)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            connection, (host, port, *_) = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            receiver = Receiver(connection, f"{host}:{port}", Challenge(self._secret, "layers"))
            with self._lock:
                self._receivers.append(receiver)
            selector.register(connection, selectors.EVENT_READ, receiver)
            unknown = [one for one in self._receivers if one.unknown]
            if len(unknown) > MOST_UNKNOWN:
                self._cut_off(unknown[0], f"more than {MOST_UNKNOWN} connections ask for nothing")
            connection.send(receiver.challenge.greeting)  # there is room for it, and for the proof

    def _forget_the_closed(self, selector: selectors.BaseSelector) -> None:
        with self._lock:
            closed = [one for one in self._receivers if one.closed]
            self._receivers = [one for one in self._receivers if not one.closed]
        for receiver in closed:
            selector.unregister(receiver.connection)
            receiver.connection.close()

    def _attend(self, receiver: Receiver, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._hear(receiver)
            if events & selectors.EVENT_WRITE and not receiver.closed:
                self._send(receiver)
        except BlockingIOError:
            pass
        except OSError:
            self.drop(receiver)
        except (AuthenticationError, MessageError) as error:
            self._cut_off(receiver, str(error))
        except Exception:  # this thread serves the others, too, and whoever trains waits for it
            traceback.print_exc()
            self.drop(receiver)

    def _cut_off(self, receiver: Receiver, why: str) -> None:
        """End the connection because of what its peer says, and say so."""
        self._refused(f"{receiver.address}, which may ask for layers,", why)
        self.drop(receiver)

    def _hear(self, receiver: Receiver) -> None:
        """Read some of the handshake or of a request; after that, nothing comes but the end."""
        data = receiver.connection.recv(4096)
        if not data:
            raise ConnectionError("closed")
        if receiver.asking or receiver.answered or len(receiver.received) > MAX_HEADER_BYTES:
            raise MessageError("it sent more than one request")
        receiver.received += data
        if receiver.keys is None:
            if len(receiver.received) < HELLO_BYTES:
                return
            proof, receiver.keys = receiver.challenge.admit(bytes(receiver.received[:HELLO_BYTES]))
            receiver.connection.send(proof)
            del receiver.received[:HELLO_BYTES]
        try:
            request, _ = read_message(io.BytesIO(receiver.received), receiver.keys.receiving)
        except ConnectionError:
            return  # there is more to come
        if not isinstance(request, LayerRequest):
            raise MessageError("it does not ask")
        with self._lock:
            receiver.request, receiver.asking = request, True

    def _send(self, receiver: Receiver) -> None:
        """Hand one chunk to the connection."""
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

    def _next_piece(self, receiver: Receiver) -> bytes | memoryview:
        """What is to be sent next; nothing where all has gone."""
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
                    # Never neither in the queue nor being sent: `pending` is read without the lock.
                    message, tensors = receiver.queue[0]
                    receiver.sending = message, _size(tensors)
                    receiver.queue.popleft()
                elif sent is not None and not isinstance(sent[0], UpToDate):
                    message, tensors = UpToDate(), {}
                    receiver.sending = message, 0
                else:
                    receiver.sending = None
                    return b""
            assert receiver.keys is not None
            receiver.pieces = pack(receiver.keys.sending, message, tensors)


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
