"""Send layers to other workers, while all wait, or in training with all later gradients.

A worker that needs layers connects, and sends a request (`runtime.moving.layer_messages`). During
training, the sender copies a layer's state to host memory before its next optimizer step, as a
checkpoint does. From then on it copies the gradients of each step that is not undone. A thread
(`runtime.moving.layer_server`) serves all receivers while the worker trains. Each receiver has a
queue of data to be sent. The queue is bounded: if training produces more than the connection
carries, training waits until the queue is empty, and the receiver is then up to date. A receiver
that is too slow is dropped.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from slipstream.runtime.moving.layer_messages import (
    LayerPart,
    LayerRequest,
    OrderBegins,
    PartRange,
    PartStepped,
)
from slipstream.runtime.moving.layer_server import (
    LayerServer,
    QueuedMessage,
    ReceiverConnection,
)
from slipstream.runtime.moving.layer_store import LayerStore
from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.replay.sockets import Sockets, identify_sockets
from slipstream.schedules.schedule import Worker

POLL_SECONDS = 0.002
ROOM_SECONDS = 30.0
"""Time for which training waits for receivers to take the data queued for them."""
# Those that are slower are dropped: they fetch again, or get their layers while all wait.


class LayerSender:
    """Sender of one worker's layers to any number of receivers; the training thread calls it.

    A receiver that requests parts which this worker does not hold is dropped. Raises OSError if
    `host` cannot be listened on.

    Parameters
    ----------
    host
        Address to listen on.
    secret
        Secret of the run, which receivers must know.
    bytes_per_second
        Largest rate at which state is sent to each receiver during training. None: unlimited.
    """

    def __init__(self, host: str, secret: Secret, bytes_per_second: float | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._server = LayerServer(
            self._listener, secret, 0.0 if bytes_per_second is None else 1 / bytes_per_second
        )
        threading.Thread(target=self._server.serve, daemon=True, name="layer sender").start()

    @property
    def has_requests(self) -> bool:
        """True if a receiver has asked for state that `send_state_before_step` will send."""
        return any(receiver.request.order is None for receiver in self._server.list_asking())

    def send_state_before_step(self, iteration: int, layers: LayerStore) -> None:
        """Queue the state before the step of `iteration`, for the receivers that requested it.

        All earlier iterations must be committed. Raises VersionError if `layers` has another state.
        """
        # Training changes the state, so what is queued is a copy.
        copies = _HostCopies()
        for receiver in self._server.list_asking():
            if receiver.request.order is None and self._drop_unless_held(receiver, layers):
                states = _read_parts(receiver.request, iteration, layers, copies)
                self._server.send_states(receiver, states)

    def queue_step(self, iteration: int, layers: LayerStore) -> None:
        """Queue the gradients of an iteration's step, for receivers that repeat the steps.

        Receivers of parts without optimizer state get the new parameters instead. Raises
        VersionError unless `iteration` is the last one that `layers` has stepped.
        """
        # Later iterations change the tensors, so what is queued is a copy.
        copies = _HostCopies()
        for receiver in self._server.list_following():
            if not self._drop_unless_held(receiver, layers):
                continue
            for part in receiver.request.parts:
                read = layers.get_part_gradients if part.state else layers.get_part_state
                tensors = copies(partial(read, after=iteration), part)
                self._server.queue_message(receiver, PartStepped(part, iteration), tensors)

    def queue_order_begins(self, order: int, committed: int) -> None:
        """Tell receivers that follow this worker's steps that the order numbered `order` begins.

        Its first iteration is the one after `committed`.
        """
        for receiver in self._server.list_following():
            self._server.queue_message(receiver, OrderBegins(order, committed))

    def send_to_waiting(
        self,
        order: int,
        committed: int,
        receivers: int,
        layers: LayerStore,
        require: Callable[[], None],
    ) -> None:
        """Send layers to a number of `receivers` while all workers wait for `order` to begin.

        The layers are sent as they are after `committed`, the last committed iteration. Returns
        when all receivers have them or are gone; until then, `require` is called repeatedly, and
        may raise. Raises VersionError if `layers` has another state.
        """
        # Receivers ask at any time, so look for new ones until all have been served.
        answered: list[ReceiverConnection] = []
        while len(answered) < receivers or any(receiver.has_pending for receiver in answered):
            for receiver in self._server.list_asking():
                if receiver.request.order != order or not self._drop_unless_held(receiver, layers):
                    continue
                # Nothing changes the state while all wait, so it is not copied.
                states = _read_parts(receiver.request, committed + 1, layers, _read_uncopied)
                self._server.send_states(receiver, states)
                self._server.queue_message(receiver, OrderBegins(order, committed))
                answered.append(receiver)
            require()
            time.sleep(POLL_SECONDS)

    def find_full_receivers(self) -> list[Worker | None]:
        """Return the receivers for which too much data is queued; None for an unknown worker."""
        following = self._server.list_following()
        return [receiver.request.receiver for receiver in following if receiver.full]

    def wait_for_room(self, require: Callable[[], None]) -> list[Worker | None]:
        """Wait while too much data is queued for a receiver that repeats this worker's steps.

        After `ROOM_SECONDS`, drops the receivers that still have too much queued, and returns them
        (None for an unknown worker). Meanwhile `require` is called repeatedly, and may raise.
        """
        deadline = time.monotonic() + ROOM_SECONDS
        while full := [receiver for receiver in self._server.list_following() if receiver.full]:
            require()
            if time.monotonic() > deadline:
                for receiver in full:
                    self._server.drop_receiver(receiver)
                return [receiver.request.receiver for receiver in full]
            time.sleep(POLL_SECONDS)
        return []

    def list_sockets(self) -> Sockets:
        """Return the open sockets: for listening, to wake the thread, and to receivers."""
        return identify_sockets([self._listener, *self._server.list_sockets()])

    def close(self) -> None:
        """End the thread, which closes all connections, without waiting for it."""
        self._server.close()

    def _drop_unless_held(self, receiver: ReceiverConnection, layers: LayerStore) -> bool:
        # A receiver may have asked for parts that this worker no longer holds.
        has_all = all(layers.has_part(part) for part in receiver.request.parts)
        if not has_all:
            self._server.drop_receiver(receiver)
        return has_all


_ReadPart = Callable[[PartRange], Mapping[str, Tensor]]
_CallReadPart = Callable[[_ReadPart, PartRange], Mapping[str, Tensor]]


def _read_parts(
    request: LayerRequest, iteration: int, layers: LayerStore, call: _CallReadPart
) -> list[QueuedMessage]:
    read = partial(layers.get_part_state, after=iteration - 1)
    return [QueuedMessage(LayerPart(part, iteration), call(read, part)) for part in request.parts]


def _read_uncopied(read: _ReadPart, part: PartRange) -> Mapping[str, Tensor]:
    return read(part)


class _HostCopies:
    """Copies of parts in host memory, one for all receivers."""

    def __init__(self) -> None:
        self._copies: dict[PartRange, Mapping[str, Tensor]] = {}

    def __call__(self, read: _ReadPart, part: PartRange) -> Mapping[str, Tensor]:
        if part not in self._copies:
            self._copies[part] = {
                key: tensor.detach().to("cpu", copy=True).contiguous()
                for key, tensor in read(part).items()
            }
        return self._copies[part]
