"""Receive layers from other workers, while all workers wait or while training continues.

Layers come from several workers in parallel, as parts with their optimizer state. During training,
a part arrives in the state before some step; the gradients of that step and of each later one
follow, and the receiver makes the same steps (`runtime.moving.received_part`), to the same bits.

When the order begins that the layers are for, every sender sends the number of the committed
iteration, and a receiver that was one step further undoes that step.
"""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.runtime.moving.layer_messages import (
    LayerPart,
    LayerRequest,
    Message,
    MessageError,
    OrderBegins,
    PartRange,
    PartStepped,
    UpToDate,
    encode_message,
    read_message,
)
from slipstream.runtime.moving.received_part import CopiedPart, ReceivedPart
from slipstream.runtime.protocol.authentication import Secret, authenticate_connection
from slipstream.runtime.protocol.to_worker import LayerMove
from slipstream.runtime.replay.sockets import Sockets, identify_sockets
from slipstream.runtime.replay.transfers import TRANSFER_TIMEOUT, CommunicationError
from slipstream.runtime.state.part_state import PartState, require_fits
from slipstream.schedules.schedule import Worker

CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.002
GetModule = Callable[[int], nn.Module]
CreateFollower = Callable[[PartState, nn.Module], ReceivedPart]
Address = tuple[str, int]


class LayerSource(NamedTuple):
    """Address of another worker's layer sender, and the parts that are requested of it."""

    address: Address
    parts: tuple[PartRange, ...]


class FetchRequest(NamedTuple):
    """Parts that this process is to receive, from other workers' processes of its rank."""

    number: int
    """Number that the coordinator gave to a fetch during training; 0 if all workers wait."""
    order: int
    """Order that trains during the fetch or, if all wait, begins after it."""
    senders: Mapping[Worker, LayerSource]
    follow: bool
    """True if the senders train during the fetch, so that their steps must be repeated."""


def find_layer_sources(
    worker: Worker,
    moves: Iterable[LayerMove],
    addresses: Iterable[tuple[Worker, Sequence[Address]]],
    rank: int = 0,
) -> dict[Worker, LayerSource]:
    """Return which parts `worker` has to request of which senders, by `moves`.

    `addresses` has those of all ranks of each sender; that of `rank` is returned. Raises KeyError
    for a sender without any.
    """
    addresses_of, parts_of = dict(addresses), dict[Worker, list[PartRange]]()
    for move in moves:
        if move.target == worker:
            part = PartRange(move.layer, move.start, move.stop, move.state)
            parts_of.setdefault(move.source, []).append(part)
    return {
        source: LayerSource(addresses_of[source][rank], tuple(parts))
        for source, parts in parts_of.items()
    }


class ReceiverCallbacks:
    """Handlers of the progress of a fetch during training, called in a receiver's threads.

    Those of this class do nothing.
    """

    def on_part_loaded(self, iteration: int) -> None:
        """Handle a part that came in the state before `iteration`; an exception ends the fetch."""

    def on_up_to_date(self, fetch: FetchRequest) -> None:
        """Handle, once, that a fetch has all parts, and now repeats the senders' steps."""

    def on_fetch_failed(self, fetch: FetchRequest, reason: str, *, unreachable: bool) -> None:
        """Handle the failure of a fetch for `reason`; called once, at its first error.

        `unreachable` is True if no connection to a sender could be made.
        """


class LayerReceiver:
    """Receiver of the layers that a worker needs, in a thread for each sender.

    Parameters
    ----------
    module
        Function that returns a layer, whose parts are to come; its present values do not matter.
    follow
        Function that returns the object which repeats the sender's steps on a part with optimizer
        state.
    device
        Device that computes the repeated steps.
    secret
        Secret of the run, which senders must know.
    events
        Handlers of the progress of fetches during training; None: nothing is done.
    worker
        Name of this worker for senders; None: they do not need it.
    """

    def __init__(
        self,
        module: GetModule,
        follow: CreateFollower,
        device: torch.device,
        secret: Secret,
        events: ReceiverCallbacks | None = None,
        worker: Worker | None = None,
    ) -> None:
        self._begin = partial(
            _Transfer,
            module=module,
            follow=follow,
            device=device,
            secret=secret,
            events=events or ReceiverCallbacks(),
            worker=worker,
        )
        self._lock = threading.Lock()
        self._transfers: dict[tuple[int, bool], _Transfer] = {}
        """Fetches by order, and by whether senders train; one may come before its order."""

    def start_fetch(self, fetch: FetchRequest) -> None:
        """Start a fetch, if it has senders.

        An earlier fetch of the same order is dropped, if for both or for neither the senders train
        meanwhile (`follow`).
        """
        key = fetch.order, fetch.follow
        with self._lock:
            if key in self._transfers:
                self._transfers.pop(key).close()
            if fetch.senders:
                self._transfers[key] = self._begin(fetch)

    def take_parts(self, order: int, fetch: int, require: Callable[[], None]) -> list[PartState]:
        """Wait until all senders have begun `order`, and return the parts fetched for it.

        These come from the fetch with number `fetch`, made during training (0: there was none), and
        from a fetch for which all workers wait. Parts of other fetches up to this order are
        dropped. Meanwhile `require` is called repeatedly, and may raise. Raises CommunicationError
        if a sender is gone, or if a part or a step of it did not fit.
        """
        states: list[PartState] = []
        transfers = self._pop_until(order)
        try:
            for transfer in transfers:
                # An order may have ended before the parts for which all waited in it were taken.
                is_wanted = transfer.fetch.order == order
                if transfer.fetch.follow:
                    is_wanted = transfer.fetch.number == fetch
                if is_wanted:
                    transfer.wait_for_order(order, require)
                    states += [part.to_part_state() for part in transfer.parts.values()]
                transfer.close()
        finally:
            # If one of them fails, nobody else would close those that follow.
            for transfer in transfers:
                transfer.close()
        # Otherwise parts may be missing because they were dropped when the order ended.
        require()
        return states

    def drop_fetches(self, order: int) -> None:
        """Drop all parts fetched up to `order`, which begins without this worker."""
        for transfer in self._pop_until(order):
            transfer.close()

    def list_sockets(self) -> Sockets:
        """Return the open sockets of the connections to all senders."""
        with self._lock:
            transfers = list(self._transfers.values())
        return frozenset().union(*(transfer.list_sockets() for transfer in transfers))

    def _pop_until(self, order: int) -> list["_Transfer"]:
        # A fetch that was started in this order during training, for the next order, stays.
        with self._lock:
            keys = [key for key in sorted(self._transfers) if key < (order, True)]
            return [self._transfers.pop(key) for key in keys]


class _Transfer:
    def __init__(
        self,
        fetch: FetchRequest,
        *,
        module: GetModule,
        follow: CreateFollower,
        device: torch.device,
        secret: Secret,
        events: ReceiverCallbacks,
        worker: Worker | None,
    ) -> None:
        self.fetch = fetch
        self._worker = worker
        self._secret = secret
        self._module = module
        self._follow = follow
        self._device = device
        self._events = events
        self.parts: dict[PartRange, ReceivedPart] = {}
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._up_to_date: set[Worker] = set()
        self._orders: dict[Worker, int] = {}
        """Last order that each sender has begun."""
        self._broken: CommunicationError | None = None
        self._over = False
        # A thread for each sender, so that a slow one does not hold up the others.
        for source, sender in fetch.senders.items():
            threading.Thread(
                target=self._receive_from,
                args=(source, sender),
                daemon=True,
                name=f"layers from {source}",
            ).start()

    def wait_for_order(self, order: int, require: Callable[[], None]) -> None:
        """Wait until all senders have begun `order`. Raises CommunicationError if one is gone."""
        with self._changed:
            while any(self._orders.get(sender) != order for sender in self.fetch.senders):
                if self._broken is not None:
                    raise self._broken
                require()
                self._changed.wait(POLL_SECONDS)
            self._over = True

    def close(self) -> None:
        """Close the connections to the senders."""
        with self._changed:
            self._over = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def list_sockets(self) -> Sockets:
        """Return the open sockets of the connections to this fetch's senders."""
        with self._changed:
            return identify_sockets(self._connections)

    def _receive_from(self, source: Worker, sender: LayerSource) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        # Whether it was ever connected tells an unreachable sender from one that died.
        connected = False
        try:
            with socket.create_connection(sender.address, CONNECT_SECONDS) as connection:
                connected = True
                if not self._register_connection(connection):
                    return
                try:
                    order = None if self.fetch.follow else self.fetch.order
                    request = LayerRequest(sender.parts, order, self._worker)
                    keys = authenticate_connection(
                        connection,
                        self._secret,
                        "layers",
                        lambda tags: b"".join(encode_message(tags, request)),
                    )
                    connection.settimeout(TRANSFER_TIMEOUT.total_seconds())
                    with connection.makefile("rb") as stream:
                        while not self._over:
                            self._apply_message(source, *read_message(stream, keys.receiving))
                finally:
                    with self._changed:
                        self._connections.remove(connection)
        except Exception as error:  # any error must reach the thread that waits for the layers
            reason = f"fetching layers from worker {source} failed: {' '.join(str(error).split())}"
            self._fail_transfer(CommunicationError(reason, (source,)), unreachable=not connected)

    def _register_connection(self, connection: socket.socket) -> bool:
        with self._changed:
            if not self._over:
                self._connections.append(connection)
            return not self._over

    def _apply_message(
        self, sender: Worker, message: Message, tensors: Mapping[str, Tensor]
    ) -> None:
        match message:
            case LayerPart():
                self._load_part(sender, message, tensors)
            case PartStepped():
                self._find_part(sender, message.part).follow_step(message.iteration, tensors)
            case OrderBegins():
                self._return_to_committed(sender, message)
            case UpToDate():
                self._record_up_to_date(sender)
            case LayerRequest():
                raise MessageError("it sent a request instead of an answer")

    def _load_part(self, sender: Worker, message: LayerPart, tensors: Mapping[str, Tensor]) -> None:
        # A sender is not trusted to send only what was requested, nor in the right shapes.
        name = message.part
        if name not in self.fetch.senders[sender].parts:
            raise MessageError(f"it sent a part of layer {name.layer} that was not requested")
        after = message.iteration - 1
        part = PartState(name.layer, name.start, name.stop, tensors, name.state, after)
        module, is_stepped = self._module(name.layer), name.state and self.fetch.follow
        require_fits(module, part)
        self.parts[name] = self._follow(part, module) if is_stepped else CopiedPart(part)
        if self.fetch.follow:
            self._events.on_part_loaded(message.iteration)

    def _find_part(self, sender: Worker, name: PartRange) -> ReceivedPart:
        if name not in self.fetch.senders[sender].parts or name not in self.parts:
            raise MessageError(f"it has stepped a part of layer {name.layer} that it has not sent")
        return self.parts[name]

    def _return_to_committed(self, sender: Worker, begins: OrderBegins) -> None:
        # The last step that was repeated may be one that the workers undo.
        for part in self.fetch.senders[sender].parts:
            self._find_part(sender, part).return_to(begins.iteration)
        with self._changed:
            self._orders[sender] = begins.order
            self._changed.notify_all()

    def _record_up_to_date(self, sender: Worker) -> None:
        with self._changed:
            is_new = sender not in self._up_to_date
            self._up_to_date.add(sender)
            is_done = is_new and len(self._up_to_date) == len(self.fetch.senders) and not self._over
        if is_done and self.fetch.follow:
            self._events.on_up_to_date(self.fetch)

    def _fail_transfer(self, error: CommunicationError, *, unreachable: bool) -> None:
        # Errors after the first, or after `close`, say nothing.
        with self._changed:
            is_first = self._broken is None and not self._over
            self._broken = self._broken or error
            self._changed.notify_all()
        if is_first and self.fetch.follow:
            print(f"order {self.fetch.order}: {error}", file=sys.stderr, flush=True)
            self._events.on_fetch_failed(self.fetch, str(error), unreachable=unreachable)
