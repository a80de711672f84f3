"""What the launcher of node 0 tells the workers: a numbered sequence of orders in the store, as JSON.

Between two orders nothing changes: who takes part, who plays which role, where the iterations begin. An order ends for
all when its *over* key is set; then each worker says how far it got, and waits for the next order.
"""

from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import TCPStore

from runtime.protocol.rendezvous import asking_node_0
from schedules.schedule import Worker

PATIENCE = timedelta(days=365)
"""For the next order: whoever gives orders may take its time, and when it dies, the connection ends."""


class Factor(msgspec.Struct, frozen=True, array_like=True):
    """What the gradients of an iteration are multiplied by; None: it made no step. See `runtime.model.clipping`."""

    iteration: int
    factor: float | None


class Move(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A layer, with its optimizer's state, that `target` lacks and gets from `source`."""

    target: Worker
    source: Worker
    layer: int


class Train(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run iterations by a schedule, until the last one or until told otherwise."""

    number: int
    first_iteration: int
    """The iterations before it are committed."""
    schedule: msgspec.Raw
    moves: tuple[Move, ...] = ()
    """Made before the first op, while all wait."""
    addresses: tuple[tuple[Worker, tuple[str, int]], ...] = ()
    """Where each of their sources listens (`runtime.worker.layer_sender`)."""
    fetch: int = 0
    """The `Fetch` that gave those who need them their layers before; 0: none."""
    factor: Factor | None = None
    """Of the last committed iteration, for those who did not hear of it."""
    founding: bool = False
    """Whether the members meet by a quorum of the lighthouse: the first time, when people may start them."""


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All iterations are committed: write layers, and tell the digests of all parameters."""

    number: int
    first_iteration: int
    """One after the last."""
    writers: tuple[tuple[int, Worker], ...]
    """Who writes each layer."""
    factor: Factor | None = None


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The run is over."""

    number: int


Order = Train | Finish | Leave


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """For some, while all train: get layers for the next order, and keep them up to date.

    It ends those given during the same order, and ends itself with the next order, whether that takes it up or not.
    """

    number: int
    order: int
    """The one that is being followed."""
    moves: tuple[Move, ...] = ()
    needs: tuple[tuple[Worker, tuple[int, ...]], ...] = ()
    """The stages that are new to each target."""
    addresses: tuple[tuple[Worker, tuple[str, int]], ...] = ()
    """Where each source listens (`runtime.worker.layer_sender`)."""


FETCHES_KEY = "fetches"
"""Counts them."""


def give(store: TCPStore, order: Order) -> None:
    """Give the next order."""
    store.set(f"order/{order.number}", msgspec.json.encode(order).decode())


def await_order(store: TCPStore, number: int) -> Order:
    """Wait for an order and read it. Raises RendezvousError when node 0 is gone."""
    key = f"order/{number}"
    with asking_node_0():
        store.wait([key], PATIENCE)
        order: Order = msgspec.json.decode(store.get(key), type=Order)
    return order


def give_fetch(store: TCPStore, fetch: Fetch) -> None:
    """Tell everyone of the next fetch."""
    store.set(f"fetch/{fetch.number}", msgspec.json.encode(fetch).decode())
    store.add(FETCHES_KEY, 1)


def await_fetch(store: TCPStore, number: int) -> Fetch:
    """Wait for a fetch and read it. Raises RendezvousError when node 0 is gone."""
    key = f"fetch/{number}"
    with asking_node_0():
        store.wait([key], PATIENCE)
        return msgspec.json.decode(store.get(key), type=Fetch)


def over_key(number: int) -> str:
    """Set when an order has ended; see `runtime.worker.heartbeat`."""
    return f"over/{number}"


def turn_key(number: int) -> str:
    """Holds the iteration before which all members stop; 0 or missing: run to the end."""
    return f"turn/{number}"
