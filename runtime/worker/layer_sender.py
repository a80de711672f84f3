"""Where others get layers while training goes on: the state before some step, then the gradients of every step.

A worker that will need a layer connects and asks. Before its next optimizer step, the source copies the layer's state
to host memory, as a checkpoint does; from then on it copies the gradients of each step that it makes for good. Threads
send all this while the worker trains. Gradients and state lie in a queue until they are sent. It is bounded: where the
connection carries less than training makes, training waits until the queue is empty, and then the follower is even.
"""

import contextlib
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from torch import Tensor

from runtime.worker.layer_frames import Ask, Even, FrameError, Mark, State, Step, Subject, read_frame, write_frame
from runtime.worker.sockets import Sockets, sockets_of

TIMEOUT_SECONDS = 30.0
"""Of a chunk, which a follower that is alive takes in milliseconds."""
QUEUE_STATES = 3
"""As many times the memory of what was asked for may wait to be sent."""
ROOM_SECONDS = 0.002


class Layers(Protocol):
    """What the worker holds."""

    def holds(self, layer: int) -> bool:
        """Whether it has a layer."""

    def layer_state(self, layer: int) -> Mapping[str, Tensor]:
        """A layer with its optimizer's state; the tensors themselves."""

    def layer_gradients(self, layer: int) -> Mapping[str, Tensor]:
        """A layer's gradients; the tensors themselves."""


class Source:
    """One worker's, for any number of followers.

    Parameters
    ----------
    host
        The address to listen on.
    bytes_per_second
        How fast state is sent to each follower at most; None: as fast as it goes.
    """

    def __init__(self, host: str, bytes_per_second: float | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        """Where it listens."""
        self._seconds_per_byte = 0.0 if bytes_per_second is None else 1 / bytes_per_second
        self._lock = threading.Lock()
        self._asking: list[_Line] = []
        self._lines: list[_Line] = []
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True, name="source").start()

    @property
    def asked(self) -> bool:
        """Whether somebody waits for `before_step`."""
        return bool(self._asking)

    def before_step(self, iteration: int, layers: Layers) -> None:
        """Give those who have asked the state before an iteration's step; all iterations before it are committed."""
        with self._lock:
            asking, self._asking = self._asking, []
        copies: dict[int, dict[str, Tensor]] = {}
        for line in asking:
            if not all(map(layers.holds, line.layers)):
                line.close()
                continue
            for layer in line.layers:
                if layer not in copies:
                    copies[layer] = _copied(layers.layer_state(layer))
            line.begin([(State(layer, iteration), copies[layer]) for layer in line.layers])
            self._lines.append(line)

    def stepped(self, iteration: int, layers: Layers) -> None:
        """Tell all followers of a step: gradients are those by which it was made."""
        copies: dict[int, dict[str, Tensor]] = {}
        for line in self._open_lines():
            if not all(map(layers.holds, line.layers)):
                line.close()
                continue
            for layer in line.layers:
                if layer not in copies:
                    copies[layer] = _copied(layers.layer_gradients(layer))
                line.put(Step(layer, iteration), copies[layer])

    def ordered(self, order: int, committed: int) -> None:
        """Tell all followers that this worker is back at a committed iteration, and an order begins."""
        for line in self._open_lines():
            line.put(Mark(order, committed), {})

    def wait_for_room(self, require: Callable[[], None]) -> None:
        """Return when no queue is too long. Raises what `require` does, which is called meanwhile."""
        while any(line.full for line in self._open_lines()):
            require()
            time.sleep(ROOM_SECONDS)

    def sockets(self) -> Sockets:
        """Those that are open."""
        with self._lock:
            return sockets_of([self._listener, *self._connections])

    def close(self) -> None:
        """Serve nobody any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for line in [*self._asking, *self._lines]:
            line.close()

    def _open_lines(self) -> list["_Line"]:
        if self._lines:
            self._lines = [line for line in self._lines if not line.closed]
        return self._lines

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True, name="asked").start()

    def _serve(self, connection: socket.socket) -> None:
        """Hear what one follower asks, and then, when it has gone."""
        with self._connected(connection), contextlib.suppress(OSError, FrameError):
            connection.settimeout(TIMEOUT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ask, _ = read_frame(connection)
            if not isinstance(ask, Ask):
                return
            line = _Line(connection, ask.layers, self._seconds_per_byte)
            with self._lock:
                self._asking.append(line)
            try:
                while not line.closed:
                    with contextlib.suppress(TimeoutError):
                        if not connection.recv(1):
                            break
            finally:
                line.close()
                with self._lock, contextlib.suppress(ValueError):
                    self._asking.remove(line)

    @contextlib.contextmanager
    def _connected(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()


class _Line:
    """What goes to one follower, and the thread that sends it."""

    def __init__(self, connection: socket.socket, layers: tuple[int, ...], seconds_per_byte: float) -> None:
        self.layers = layers
        self.closed = False
        self.full = False
        """From when too much waits until nothing does."""
        self._connection = connection
        self._seconds_per_byte = seconds_per_byte
        self._queue: deque[tuple[Subject, dict[str, Tensor]]] = deque()
        self._bytes = 0
        self._most_bytes = math.inf
        self._changed = threading.Condition()

    def begin(self, states: list[tuple[State, dict[str, Tensor]]]) -> None:
        """Send these, and whatever is put in from now on."""
        self._most_bytes = QUEUE_STATES * sum(_size(state) for _, state in states)
        for subject, state in states:
            self.put(subject, state)
        threading.Thread(target=self._send, daemon=True, name="line").start()

    def put(self, subject: Subject, tensors: dict[str, Tensor]) -> None:
        """Send this after all that was put in before."""
        with self._changed:
            self._queue.append((subject, tensors))
            self._bytes += _size(tensors)
            self.full = self.full or self._bytes > self._most_bytes
            self._changed.notify()

    def close(self) -> None:
        """Send no more; the follower is told by the end of the connection."""
        with self._changed:
            self.closed = True
            self._queue.clear()
            self._changed.notify()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _send(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self.closed)
                    if self.closed:
                        return
                    subject, tensors = self._queue.popleft()
                write_frame(self._connection, subject, tensors,
                            self._tarry if isinstance(subject, State) else lambda _: None)
                with self._changed:
                    self._bytes -= _size(tensors)
                    even = not self._queue
                    self.full = self.full and not even
                if even:
                    write_frame(self._connection, Even())
        except OSError:
            self.close()

    def _tarry(self, sent_bytes: int) -> None:
        if self._seconds_per_byte:
            time.sleep(sent_bytes * self._seconds_per_byte)
            if self.closed:
                raise ConnectionError("closed")


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
