"""Layer sender: sends layers to other workers, while all wait or while training goes on, then with all later gradients.

A worker that needs layers connects, and sends a request (`runtime.worker.layer_messages`). Where training goes on, the
sender copies a layer's state to host memory before its next optimizer step, as a checkpoint does; from then on it
copies the gradients of each step that stands. A thread (`runtime.worker.layer_server`) serves all receivers while the
worker trains. What is to be sent lies in a queue for each of them. It is bounded: where the connection carries less
than training makes, training waits until the queue is empty, and then the receiver is up to date.
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
    """Sends the layers of one worker to any number of receivers. Its methods are for the thread that trains.

    Parameters
    ----------
    host
        The address to listen on.
    secret
        What those who may ask know.
    bytes_per_second
        How fast state is sent to each receiver at most while training goes on; None: as fast as it goes.
    """

    def __init__(self, host: str, secret: Secret, bytes_per_second: float | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        """Where it listens."""
        self._server = LayerServer(self._listener, secret, 0.0 if bytes_per_second is None else 1 / bytes_per_second)
        threading.Thread(target=self._server.serve, daemon=True, name="layer sender").start()

    @property
    def asked(self) -> bool:
        """Whether a receiver waits for `before_step`."""
        return any(one.request.order is None for one in self._server.asking())

    def before_step(self, iteration: int, layers: LayerStore) -> None:
        """Send the state before an iteration's step to receivers that wait; all iterations before it are committed."""
        copied = _Copies()
        for one in self._server.asking():
            if one.request.order is None and self._holds_all(one, layers):
                self._server.answer(one, _states(one.request, iteration, layers, copied))

    def stepped(self, iteration: int, layers: LayerStore) -> None:
        """Queue the gradients of a step, which the layers hold, for all receivers that follow."""
        copied = _Copies()
        for one in self._server.following():
            if self._holds_all(one, layers):
                for part in one.request.parts:
                    self._server.put(one, PartStepped(part, iteration), copied(partial(
                        layers.part_gradients if part.state else layers.part_state, after=iteration), part))

    def order_begins(self, order: int, committed: int) -> None:
        """Queue for all receivers that follow: an order begins, and this worker is at a committed iteration."""
        for one in self._server.following():
            self._server.put(one, OrderBegins(order, committed))

    def give(self, order: int, committed: int, receivers: int, layers: LayerStore,
             require: Callable[[], None]) -> None:
        """While all wait: send layers as they are to so many receivers, and return when they have been sent.

        `committed` is the last committed iteration. Raises what `require` does, which is called meanwhile.
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
        """Return when no queue is too long. Raises what `require` does, which is called meanwhile."""
        while any(one.full for one in self._server.following()):
            require()
            time.sleep(POLL_SECONDS)

    def sockets(self) -> Sockets:
        """Those that are open."""
        return sockets_of([self._listener, *self._server.connections()])

    def close(self) -> None:
        """End the thread and all connections."""
        self._server.close()

    def _holds_all(self, receiver: Receiver, layers: LayerStore) -> bool:
        held = all(layers.keeps(part) for part in receiver.request.parts)
        if not held:
            self._server.drop(receiver)
        return held


def _states(request: LayerRequest, iteration: int, layers: LayerStore, by: "_Reading"
            ) -> list[tuple[LayerPart, Mapping[str, Tensor]]]:
    """All that is asked for, as it is before an iteration's step."""
    return [(LayerPart(part, iteration), by(partial(layers.part_state, after=iteration - 1), part))
            for part in request.parts]


_Read = Callable[[PartName], Mapping[str, Tensor]]
_Reading = Callable[[_Read, PartName], Mapping[str, Tensor]]


class _Copies:
    """What several receivers get, copied once to host memory."""

    def __init__(self) -> None:
        self._found: dict[PartName, Mapping[str, Tensor]] = {}

    def __call__(self, read: _Read, name: PartName) -> Mapping[str, Tensor]:
        if name not in self._found:
            self._found[name] = {key: tensor.detach().to("cpu", copy=True).contiguous()
                                 for key, tensor in read(name).items()}
        return self._found[name]
