"""Layer receiver: gets layers from other workers, while all wait or while training goes on.

They come from several live workers side by side, as parts, each with its optimizer's state. Where training goes on,
that is the state before some step; then come the gradients of that step and of each one after it, and the receiver
makes the same steps (`runtime.model.state.followed_part`). Optimizers are elementwise, so that they end in the same
bits.
When the order begins that the layers are for, every sender sends the iteration that is committed, and a receiver
that was one step further goes back. Where all wait, the senders send it right after the state.
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

from slipstream.runtime.model.state.followed_part import CopiedPart, FollowedPart
from slipstream.runtime.model.state.part_state import PartState, require_fits
from slipstream.runtime.protocol.authentication import Secret, introduce
from slipstream.runtime.protocol.to_worker import Move
from slipstream.runtime.replay.sockets import Sockets, sockets_of
from slipstream.runtime.replay.transfers import TIMEOUT, CommunicationError
from slipstream.runtime.worker.layer_messages import (
    LayerPart,
    LayerRequest,
    Message,
    MessageError,
    OrderBegins,
    PartName,
    PartStepped,
    UpToDate,
    pack,
    read_message,
)
from slipstream.schedules.schedule import Worker

CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.002
Module = Callable[[int], nn.Module]
Follow = Callable[[PartState, nn.Module], FollowedPart]
Address = tuple[str, int]


class Sender(NamedTuple):
    """Where some layers come from."""

    address: Address
    parts: tuple[PartName, ...]


class LayerFetch(NamedTuple):
    """What one process of a worker is to get, from those of the same rank."""

    number: int
    """The coordinator's number of a fetch while training goes on; 0 where all wait."""
    order: int
    """Where all wait, the one that begins with these layers; else the one that trains while they are fetched."""
    senders: Mapping[Worker, Sender]
    follow: bool
    """Whether the senders train meanwhile."""


def senders_for(worker: Worker, moves: Iterable[Move], addresses: Iterable[tuple[Worker, Sequence[Address]]],
                rank: int = 0) -> dict[Worker, Sender]:
    """Where the layers, or parts, come from that some moves bring to this rank of a worker; `addresses` are those of
    all ranks of all sources."""
    by_worker, found = dict(addresses), dict[Worker, Sender]()
    for move in moves:
        if move.target == worker:
            before = found[move.source].parts if move.source in found else ()
            found[move.source] = Sender(by_worker[move.source][rank], (
                *before, PartName(move.layer, move.start, move.stop, move.state)))
    return found


class ReceiverEvents:
    """Called by a receiver's threads about a fetch while training goes on. By default, nothing happens."""

    def loaded(self, iteration: int) -> None:
        """A layer has come, as it is before this iteration's step. An exception ends the fetch."""

    def up_to_date(self, fetch: LayerFetch) -> None:
        """All layers are here, and follow their senders; called once."""

    def failed(self, fetch: LayerFetch) -> None:
        """The fetch has failed; called once."""


class LayerReceiver:
    """Gets the layers that one worker needs: those of the last `LayerFetch` of an order.

    Parameters
    ----------
    module
        A layer of which parts are to come: any, as long as it is built.
    follow
        Makes what follows a part with its optimizer's state.
    secret
        What those who may give layers know.
    """

    def __init__(self, module: Module, follow: Follow, device: torch.device, secret: Secret,
                 events: ReceiverEvents | None = None) -> None:
        self._begin = partial(_Transfer, module=module, follow=follow, device=device, secret=secret,
                              events=events or ReceiverEvents())
        self._lock = threading.Lock()
        self._transfers: dict[tuple[int, bool], _Transfer] = {}
        """By order, and whether it follows: a fetch may come before the worker is in that order."""

    def begin(self, fetch: LayerFetch) -> None:
        """Drop what is being fetched in the same order, and fetch this, if it names any sender."""
        key = fetch.order, fetch.follow
        with self._lock:
            if key in self._transfers:
                self._transfers.pop(key).close()
            if fetch.senders:
                self._transfers[key] = self._begin(fetch)

    def take(self, order: int, fetch: int, require: Callable[[], None]) -> list[PartState]:
        """What was fetched for an order, as it is when that begins: under this number, and where all wait.

        Waits until all senders are in the order, too; `require` is called meanwhile and may raise. Raises
        CommunicationError when a sender is gone. What was fetched under any other number is dropped.
        """
        found: list[PartState] = []
        for transfer in self._until(order):
            try:
                # An order may have ended before what all waited for in it was taken.
                if transfer.fetch.number == fetch if transfer.fetch.follow else transfer.fetch.order == order:
                    transfer.take(order, require)
                    found += [part.state() for part in transfer.parts.values()]
            finally:
                transfer.close()
        require()  # else what was to come may have been dropped with the order
        return found

    def drop(self, order: int) -> None:
        """An order begins without this worker: what was fetched for it is of no use."""
        for transfer in self._until(order):
            transfer.close()

    def sockets(self) -> Sockets:
        """Those that are open."""
        with self._lock:
            transfers = list(self._transfers.values())
        return frozenset().union(*(transfer.sockets() for transfer in transfers))

    def _until(self, order: int) -> list["_Transfer"]:
        """Those that the beginning of an order ends."""
        with self._lock:
            return [self._transfers.pop(key) for key in sorted(self._transfers) if key < (order, True)]


class _Transfer:
    """One fetch: a thread for each sender applies its messages."""

    def __init__(self, fetch: LayerFetch, *, module: Module, follow: Follow, device: torch.device,
                 secret: Secret, events: ReceiverEvents) -> None:
        self.fetch = fetch
        self._secret = secret
        self._module = module
        self._follow = follow
        self._device = device
        self._events = events
        self.parts: dict[PartName, FollowedPart] = {}
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._up_to_date: set[Worker] = set()
        self._orders: dict[Worker, int] = {}
        """That of each sender."""
        self._broken: str | None = None
        self._over = False
        for source, sender in fetch.senders.items():
            threading.Thread(target=self._receive, args=(source, sender), daemon=True,
                             name=f"layers from {source}").start()

    def take(self, order: int, require: Callable[[], None]) -> None:
        """Wait until all is here. See `LayerReceiver.take`."""
        with self._changed:
            while any(self._orders.get(sender) != order for sender in self.fetch.senders):
                if self._broken is not None:
                    raise CommunicationError(self._broken)
                require()
                self._changed.wait(POLL_SECONDS)
            self._over = True

    def close(self) -> None:
        """End the connections to the senders."""
        with self._changed:
            self._over = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def sockets(self) -> Sockets:
        """Those that are open."""
        with self._changed:
            return sockets_of(self._connections)

    def _receive(self, source: Worker, sender: Sender) -> None:
        """Apply the messages of one sender, until the end."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            with socket.create_connection(sender.address, CONNECT_SECONDS) as connection:
                if not self._enter(connection):
                    return
                try:
                    request = LayerRequest(sender.parts, None if self.fetch.follow else self.fetch.order)
                    keys = introduce(connection, self._secret, "layers", lambda tags: b"".join(pack(tags, request)))
                    connection.settimeout(TIMEOUT.total_seconds())
                    with connection.makefile("rb") as stream:
                        while not self._over:
                            self._apply(source, *read_message(stream, keys.receiving))
                finally:
                    with self._changed:
                        self._connections.remove(connection)
        except Exception as error:  # whatever it is, somebody waits for the layers
            self._break(f"fetching layers from worker {source} failed: {' '.join(str(error).split())}")

    def _enter(self, connection: socket.socket) -> bool:
        with self._changed:
            if not self._over:
                self._connections.append(connection)
            return not self._over

    def _apply(self, sender: Worker, message: Message, tensors: Mapping[str, Tensor]) -> None:
        match message:
            case LayerPart():
                self._load(sender, message, tensors)
            case PartStepped():
                self._part(sender, message.part).follow(message.iteration, tensors)
            case OrderBegins():
                self._go_back(sender, message)
            case UpToDate():
                self._note_up_to_date(sender)
            case LayerRequest():
                raise MessageError("it asks, where it was asked")

    def _load(self, sender: Worker, message: LayerPart, tensors: Mapping[str, Tensor]) -> None:
        name = message.part
        if name not in self.fetch.senders[sender].parts:
            raise MessageError(f"it sent a part of layer {name.layer} for which it was not asked")
        part = PartState(name.layer, name.start, name.stop, tensors, name.state, message.iteration - 1)
        module, stepped = self._module(name.layer), name.state and self.fetch.follow
        require_fits(module, part)
        self.parts[name] = self._follow(part, module) if stepped else CopiedPart(part)
        if self.fetch.follow:
            self._events.loaded(message.iteration)

    def _part(self, sender: Worker, name: PartName) -> FollowedPart:
        if name not in self.fetch.senders[sender].parts or name not in self.parts:
            raise MessageError(f"it has stepped a part of layer {name.layer} that it has not sent")
        return self.parts[name]

    def _go_back(self, sender: Worker, begins: OrderBegins) -> None:
        for part in self.fetch.senders[sender].parts:
            self._part(sender, part).go_back(begins.iteration)
        with self._changed:
            self._orders[sender] = begins.order
            self._changed.notify_all()

    def _note_up_to_date(self, sender: Worker) -> None:
        with self._changed:
            before = len(self._up_to_date)
            self._up_to_date.add(sender)
            done = before < len(self._up_to_date) == len(self.fetch.senders) and not self._over
        if done and self.fetch.follow:
            self._events.up_to_date(self.fetch)

    def _break(self, reason: str) -> None:
        with self._changed:
            first = self._broken is None and not self._over
            self._broken = self._broken or reason
            self._changed.notify_all()
        if first and self.fetch.follow:
            print(f"order {self.fetch.order}: {reason}", file=sys.stderr, flush=True)
            self._events.failed(self.fetch)
