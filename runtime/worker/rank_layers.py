"""Layers of each rank that a process stands for, handed on and fetched as the rank itself would.

There is one sender, and one receiver, for each of these ranks (`runtime.model.ranks.own_ranks`); mostly that is one.
Others reach a rank at its own address, wherever it is.
"""

import threading
from collections.abc import Callable, Sequence

from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.worker.layer_receiver import LayerFetch, LayerReceiver, ReceiverEvents
from slipstream.runtime.worker.layer_sender import LayerSender
from slipstream.runtime.worker.layer_store import ByRank, LayerStore


class RankSenders:
    """The senders of this process: `LayerSender`, for each rank that it stands for."""

    def __init__(self, senders: Sequence[LayerSender], store: LayerStore) -> None:
        self._senders, self._layers = senders, store.by_rank

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Where each rank listens."""
        return tuple(one.address for one in self._senders)

    @property
    def asked(self) -> bool:
        """Whether a receiver waits for `before_step`."""
        return any(one.asked for one in self._senders)

    def before_step(self, iteration: int) -> None:
        """See `LayerSender.before_step`."""
        for one, layers in zip(self._senders, self._layers, strict=True):
            one.before_step(iteration, layers)

    def stepped(self, iteration: int) -> None:
        """See `LayerSender.stepped`."""
        for one, layers in zip(self._senders, self._layers, strict=True):
            one.stepped(iteration, layers)

    def generation_begins(self, generation: int, committed: int) -> None:
        """See `LayerSender.generation_begins`."""
        for one in self._senders:
            one.generation_begins(generation, committed)

    def give(self, generation: int, committed: int, receivers: int, require: Callable[[], None]) -> None:
        """See `LayerSender.give`."""
        for one, layers in zip(self._senders, self._layers, strict=True):
            one.give(generation, committed, receivers, layers, require)

    def wait_for_room(self, require: Callable[[], None]) -> None:
        """See `LayerSender.wait_for_room`."""
        for one in self._senders:
            one.wait_for_room(require)

    def sockets(self) -> Sockets:
        """Those that are open."""
        return frozenset().union(*(one.sockets() for one in self._senders))


class RankReceivers:
    """The receivers of this process: `LayerReceiver`, for each rank that it stands for."""

    def __init__(self, receivers: Sequence[LayerReceiver]) -> None:
        self._receivers = receivers

    def begin(self, fetches: Sequence[LayerFetch]) -> None:
        """See `LayerReceiver.begin`: of each rank its own."""
        for one, fetch in zip(self._receivers, fetches, strict=True):
            one.begin(fetch)

    def take(self, generation: int, fetch: int, require: Callable[[], None]) -> ByRank:
        """See `LayerReceiver.take`: of each rank its own."""
        return [one.take(generation, fetch, require) for one in self._receivers]

    def drop(self, generation: int) -> None:
        """See `LayerReceiver.drop`."""
        for one in self._receivers:
            one.drop(generation)

    def sockets(self) -> Sockets:
        """Those that are open."""
        return frozenset().union(*(one.sockets() for one in self._receivers))

class AllUpToDate(ReceiverEvents):
    """Tells that a fetch is up to date once that of each rank is; all else at once."""

    def __init__(self, events: ReceiverEvents, ranks: int) -> None:
        self._events = events
        self._ranks = ranks
        self._lock = threading.Lock()
        self._done: dict[int, int] = {}
        """Ranks by the number of a fetch."""

    def loaded(self, iteration: int) -> None:
        """See `ReceiverEvents.loaded`."""
        self._events.loaded(iteration)

    def up_to_date(self, fetch: LayerFetch) -> None:
        """See `ReceiverEvents.up_to_date`."""
        with self._lock:
            self._done[fetch.number] = done = self._done.get(fetch.number, 0) + 1
        if done == self._ranks:
            self._events.up_to_date(fetch)

    def failed(self, fetch: LayerFetch) -> None:
        """See `ReceiverEvents.failed`."""
        self._events.failed(fetch)
