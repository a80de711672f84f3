"""Send layers to other workers, while all workers wait, or during training and then with all later gradients.

A worker that needs layers connects, and sends a request (`runtime.worker.layer_messages`). During training, the sender
copies a layer's state to host memory before its next optimizer step, as a checkpoint does. From then on it copies the
gradients of each step that is not undone. A thread (`runtime.worker.layer_server`) serves all receivers while the
worker trains. Each receiver has a queue of data to be sent. The queue is bounded: if training produces more than the
connection carries, training waits until the queue is empty, and the receiver is then up to date.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.replay.sockets import Sockets, sockets_of
from slipstream.runtime.worker.layer_messages import (
    LayerPart,
    LayerRequest,
    OrderBegins,
    PartName,
    PartStepped,
)
from slipstream.runtime.worker.layer_server import LayerServer, Receiver
from slipstream.runtime.worker.layer_store import LayerStore

POLL_SECONDS = 0.002


class LayerSender:
    """Sender of one worker's layers to any number of receivers. Its methods are for the thread that trains.

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
    def asked(self) -> bool:
        """True if a receiver waits for `before_step`."""
        return any(receiver.request.order is None for receiver in self._server.asking())

    def before_step(self, iteration: int, layers: LayerStore) -> None:
        """Send the state before an iteration's step to receivers that wait. All iterations before it must be
        committed."""
        copied = _Copies()
        for receiver in self._server.asking():
            if receiver.request.order is None and self._holds_all(receiver, layers):
                self._server.answer(receiver, _states(receiver.request, iteration, layers, copied))

    def stepped(self, iteration: int, layers: LayerStore) -> None:
        """Queue the gradients of a step, which the layers hold, for all receivers that follow."""
        copied = _Copies()
        for receiver in self._server.following():
            if self._holds_all(receiver, layers):
                for part in receiver.request.parts:
                    self._server.put(receiver, PartStepped(part, iteration), copied(partial(
                        layers.part_gradients if part.state else layers.part_state, after=iteration), part))

    def order_begins(self, order: int, committed: int) -> None:
        """Queue a message for all receivers that follow: an order begins, and this worker is at the iteration
        `committed`."""
        for receiver in self._server.following():
            self._server.put(receiver, OrderBegins(order, committed))

    def give(self, order: int, committed: int, receivers: int, layers: LayerStore,
             require: Callable[[], None]) -> None:
        """Send layers to `receivers` receivers while all workers wait, and return when they have been sent.

        The layers are sent as they are; `committed` is the last committed iteration. `require` is called meanwhile, and
        may raise.
        """
        answered: list[Receiver] = []
        while len(answered) < receivers or any(one.pending for one in answered):
            for one in self._server.asking():
                if one.request.order == order and self._holds_all(one, layers):
                    self._server.answer(one, _states(one.request, committed + 1, layers, lambda read, name: read(name)))
                    self._server.put(one, OrderBegins(order, committed))
                    answered.append(one)
            require()
            time.sleep(POLL_SECONDS)

    def wait_for_room(self, require: Callable[[], None]) -> None:
        """Wait until no queue is too long. `require` is called meanwhile, and may raise."""
        while any(receiver.full for receiver in self._server.following()):
            require()
            time.sleep(POLL_SECONDS)

    def sockets(self) -> Sockets:
        """Return the open sockets."""
        return sockets_of([self._listener, *self._server.connections()])

    def close(self) -> None:
        """End the thread, and close all connections."""
        self._server.close()

    def _holds_all(self, receiver: Receiver, layers: LayerStore) -> bool:
        held = all(layers.keeps(part) for part in receiver.request.parts)
        if not held:
            self._server.drop(receiver)
        return held


def _states(request: LayerRequest, iteration: int, layers: LayerStore, by: "_Reading"
            ) -> list[tuple[LayerPart, Mapping[str, Tensor]]]:
    """Return all requested parts as they are before an iteration's step."""
    return [(LayerPart(part, iteration), by(partial(layers.part_state, after=iteration - 1), part))
            for part in request.parts]


_Read = Callable[[PartName], Mapping[str, Tensor]]
_Reading = Callable[[_Read, PartName], Mapping[str, Tensor]]


class _Copies:
    """Copies of parts in host memory, each made once for all receivers."""

    def __init__(self) -> None:
        self._found: dict[PartName, Mapping[str, Tensor]] = {}

    def __call__(self, read: _Read, name: PartName) -> Mapping[str, Tensor]:
        if name not in self._found:
            self._found[name] = {key: tensor.detach().to("cpu", copy=True).contiguous()
                                 for key, tensor in read(name).items()}
        return self._found[name]
