"""Layers of each rank that a process stands for, handed on and fetched as the rank itself would.

There is one sender, and one receiver, for each of these ranks (`runtime.model.ranks.own_ranks`); mostly that is one.
Others reach a rank at its own address, wherever it is.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from slipstream.runtime.model.layers.shards import Shards, shards_of, state_of_rank
from slipstream.runtime.model.ranks.own_ranks import joined_state
from slipstream.runtime.model.state.holding import Holding
from slipstream.runtime.model.state.optimizer import UndoableOptimizer
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.worker.layer_messages import MessageError, PartName
from slipstream.runtime.worker.layer_receiver import LayerFetch, LayerReceiver, ReceiverEvents
from slipstream.runtime.worker.layer_sender import Layers, LayerSender
from slipstream.runtime.worker.layer_store import ByRank, LayerStore


class _RankLayers:
    """What one of these ranks holds."""

    def __init__(self, store: LayerStore, own_rank: int, ranks: int) -> None:
        self._store, self._own_rank, self._ranks = store, own_rank, ranks

    def holds(self, layer: int) -> bool:
        return self._store.holds(layer)

    def layer_state(self, layer: int) -> Mapping[str, Tensor]:
        return state_of_rank(self._store.layer_state(layer), self._shards(layer), self._own_rank, self._ranks)

    def layer_gradients(self, layer: int) -> Mapping[str, Tensor]:
        shards = self._shards(layer)
        return {name: shards[name].cut(tensor, self._own_rank, self._ranks) if name in shards else tensor
                for name, tensor in self._store.layer_gradients(layer).items()}

    def keeps(self, part: PartName) -> bool:  # noqa: ARG002  # layers are kept whole
        return False

    def part_state(self, part: PartName) -> Mapping[str, Tensor]:
        raise MessageError(f"it asked for a part of layer {part.layer}, where layers are kept whole")

    def part_gradients(self, part: PartName) -> Mapping[str, Tensor]:
        return self.part_state(part)

    def _shards(self, layer: int) -> Shards:
        return shards_of(self._store.holding.modules[layer])


class RankSenders:
    """The senders of this process: `LayerSender`, for each rank that it stands for."""

    def __init__(self, senders: Sequence[LayerSender], store: LayerStore) -> None:
        self._senders = senders
        self._layers: Sequence[Layers] = store.by_rank if len(store.by_rank) == len(senders) else [
            _RankLayers(store, own_rank, len(senders)) for own_rank in range(len(senders))]

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

    def __init__(self, receivers: Sequence[LayerReceiver], store: LayerStore) -> None:
        self._receivers = receivers
        self._store = store

    def begin(self, fetches: Sequence[LayerFetch]) -> None:
        """See `LayerReceiver.begin`: of each rank its own."""
        for one, fetch in zip(self._receivers, fetches, strict=True):
            one.begin(fetch)

    def take(self, generation: int, fetch: int, require: Callable[[], None]) -> dict[int, Holding]:
        """See `LayerReceiver.take`."""
        first, *others = [one.take(generation, fetch, require) for one in self._receivers]
        return {layer: self._joined(layer, [holding, *(other[layer] for other in others)])
                for layer, holding in first.items()} if others else first

    def take_parts(self, generation: int, fetch: int, require: Callable[[], None]) -> ByRank:
        """See `LayerReceiver.take_parts`: of each rank its own."""
        return [one.take_parts(generation, fetch, require) for one in self._receivers]

    def drop(self, generation: int) -> None:
        """See `LayerReceiver.drop`."""
        for one in self._receivers:
            one.drop(generation)

    def sockets(self) -> Sockets:
        """Those that are open."""
        return frozenset().union(*(one.sockets() for one in self._receivers))

    def _joined(self, layer: int, by_rank: Sequence[Holding]) -> Holding:
        found = self._store.fresh(layer)
        _whole(found).load_layer_state(layer, joined_state(
            [_whole(one).layer_state(layer) for one in by_rank], shards_of(found.modules[layer])))
        return found


def _whole(holding: Holding) -> UndoableOptimizer:
    assert isinstance(holding.optimizer, UndoableOptimizer), "parts of layers are fetched as parts"
    return holding.optimizer


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
