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
from slipstream.runtime.moving.layer_server import LayerServer, ReceiverConnection
from slipstream.runtime.moving.layer_store import LayerStore
from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.replay.sockets import Sockets, identify_sockets
from slipstream.schedules.schedule import Worker

POLL_SECONDS = 0.002
ROOM_SECONDS = 30.0
"""Time for which training waits for receivers to empty their queues. Others are dropped: they fetch
again, or get their layers while all wait."""


class LayerSender:
    """Sender of one worker's layers to any number of receivers, for the training thread.

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
        """Address at which the sender listens."""
        self._server = LayerServer(self._listener, secret, 0.0 if bytes_per_second is None else 1 / bytes_per_second)
        threading.Thread(target=self._server.serve, daemon=True, name="layer sender").start()

    @property
    def has_requests(self) -> bool:
        """True if a receiver waits for `send_state_before_step`."""
        return any(receiver.request.order is None for receiver in self._server.list_asking())

    def send_state_before_step(self, iteration: int, layers: LayerStore) -> None:
        """Send the state before an iteration's step to the receivers that requested it. All
        iterations before it must be committed."""
        copied = _HostCopies()
        for receiver in self._server.list_asking():
            if receiver.request.order is None and self._drop_unless_held(receiver, layers):
                self._server.send_states(receiver, _read_parts(receiver.request, iteration, layers, copied))

    def queue_step(self, iteration: int, layers: LayerStore) -> None:
        """Queue the gradients of a step for all receivers that follow this worker's steps.
        Receivers of parts without optimizer state get the new parameters."""
        copied = _HostCopies()
        for receiver in self._server.list_following():
            if self._drop_unless_held(receiver, layers):
                for part in receiver.request.parts:
                    self._server.queue_message(receiver, PartStepped(part, iteration), copied(partial(
                        layers.get_part_gradients if part.state else layers.get_part_state, after=iteration), part))

    def queue_order_begins(self, order: int, committed: int) -> None:
        """Queue, for all receivers that follow, that an order begins after `committed`."""
        for receiver in self._server.list_following():
            self._server.queue_message(receiver, OrderBegins(order, committed))

    def send_to_waiting(self, order: int, committed: int, receivers: int, layers: LayerStore,
                        require: Callable[[], None]) -> None:
        """Send layers for an order while all workers wait, until `receivers` have all they need.

        The layers are sent as they are after iteration `committed`, the last committed one.
        `require` is called meanwhile, and may raise.
        """
        answered: list[ReceiverConnection] = []
        while len(answered) < receivers or any(one.has_pending for one in answered):
            for one in self._server.list_asking():
                if one.request.order == order and self._drop_unless_held(one, layers):
                    self._server.send_states(one, _read_parts(one.request, committed + 1, layers, lambda read,
                                                              name: read(name)))
                    self._server.queue_message(one, OrderBegins(order, committed))
                    answered.append(one)
            require()
            time.sleep(POLL_SECONDS)

    def find_full_receivers(self) -> list[Worker | None]:
        """Return the receivers for which `wait_for_room` would wait; None for an unnamed one."""
        return [receiver.request.receiver for receiver in self._server.list_following() if receiver.full]

    def wait_for_room(self, require: Callable[[], None]) -> list[Worker | None]:
        """Wait while too much data is queued for a receiver that follows this worker's steps.

        The function `require` is called meanwhile, and may raise. After `ROOM_SECONDS`, receivers
        that still have too much queued are dropped, and returned as by `find_full_receivers`.
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
        """Return the open sockets: the listening one, and those of connections to receivers."""
        return identify_sockets([self._listener, *self._server.list_sockets()])

    def close(self) -> None:
        """End the thread, and close all connections."""
        self._server.close()

    def _drop_unless_held(self, receiver: ReceiverConnection, layers: LayerStore) -> bool:
        held = all(layers.has_part(part) for part in receiver.request.parts)
        if not held:
            self._server.drop_receiver(receiver)
        return held


def _read_parts(request: LayerRequest, iteration: int, layers: LayerStore, by: "_CallReadPart"
                ) -> list[tuple[LayerPart, Mapping[str, Tensor]]]:
    """Return all parts that a receiver has requested, as they are before a step."""
    # For each part, `by(read, part)` returns the result of `read(part)`, or an earlier copy of it.
    return [(LayerPart(part, iteration), by(partial(layers.get_part_state, after=iteration - 1), part))
            for part in request.parts]


_ReadPart = Callable[[PartRange], Mapping[str, Tensor]]
_CallReadPart = Callable[[_ReadPart, PartRange], Mapping[str, Tensor]]


class _HostCopies:
    """Copies of parts in host memory, each made once for all receivers."""

    def __init__(self) -> None:
        self._found: dict[PartRange, Mapping[str, Tensor]] = {}

    def __call__(self, read: _ReadPart, name: PartRange) -> Mapping[str, Tensor]:
        if name not in self._found:
            self._found[name] = {key: tensor.detach().to("cpu", copy=True).contiguous()
                                 for key, tensor in read(name).items()}
        return self._found[name]
