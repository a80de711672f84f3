"""The layers of a process that stands for several ranks of its worker."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from slipstream.runtime.model.ranks.rank_holding import RankHolding
from slipstream.runtime.model.state.parts import Cut, Elements
from slipstream.runtime.protocol.to_coordinator import Kept
from slipstream.runtime.worker.layer_messages import PartName
from slipstream.runtime.worker.layer_store import Build, ByRank, LayerStore, Restore
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker

StandIn = Callable[[], AbstractContextManager[None]]
"""In what this gives, the thread is one of the ranks."""


class RankStores(LayerStore):
    """A store for each of the ranks, which others exchange parts with, and the layers that compute for all of them.

    Parameters
    ----------
    build
        Makes layers that have the shards of all these ranks.
    ranks
        Their stores, ascending, each with what stands in for its rank.
    holding
        Of the holdings of these.
    """

    def __init__(self, build: Build, restore: Restore, ranks: Sequence[tuple[LayerStore, StandIn]],
                 holding: RankHolding, device: torch.device) -> None:
        super().__init__(build, restore, holding, device)
        self._ranks = ranks
        self.holding: RankHolding = holding

    @property
    def by_rank(self) -> Sequence[LayerStore]:
        """Of each rank."""
        return [store for store, _ in self._ranks]

    def _at(self, rank: int) -> LayerStore:
        """That of one of the worker's ranks; those that this process stands for follow each other."""
        return self.by_rank[rank % len(self._ranks)]

    def module_at(self, rank: int, layer: int) -> nn.Module:
        """See `LayerStore.module_at`."""
        return self._at(rank).module(layer)

    def keeps(self, part: PartName) -> bool:
        """See `LayerStore.keeps`."""
        return self._at(part.rank).keeps(part)

    def part_state(self, part: PartName) -> dict[str, Tensor]:
        """See `LayerStore.part_state`."""
        return self._at(part.rank).part_state(part)

    def part_gradients(self, part: PartName) -> dict[str, Tensor]:
        """See `LayerStore.part_gradients`."""
        return self._at(part.rank).part_gradients(part)

    def prepare(self, layers: Iterable[int]) -> None:
        """Build layers that are likely to be needed soon."""
        layers = list(layers)
        super().prepare(layers)
        for store in self.by_rank:
            store.prepare(layers)

    def clear(self) -> None:
        """Hold nothing."""
        for store in self.by_rank:
            store.clear()
        self.holding.join({})

    def read(self, layers: Collection[int], iteration: int) -> None:
        """Read layers as they were before an iteration. Raises CheckpointError."""
        for store, stand_in in self._ranks:
            with stand_in():
                store.read(layers, iteration)

    def receive(self, received: ByRank) -> None:
        """See `LayerStore.receive`: each rank its own."""
        for store, mine in zip(self.by_rank, received, strict=True):
            store.receive([mine])

    def put(self, received: ByRank) -> None:
        """See `LayerStore.put`: each rank its own."""
        self.holding.give_parameters()
        for store, mine in zip(self.by_rank, received, strict=True):
            store.put([mine])
        self.holding.arrived()

    def keep_parts(self, cuts: Mapping[LayerRange, Cut], worker: Worker, after: int) -> None:
        """See `LayerStore.keep_parts`: each rank keeps its own."""
        self.holding.give_parameters()
        for store, stand_in in self._ranks:
            with stand_in():
                store.keep_parts(cuts, worker, after)
        self.holding.join(self._modules(cuts))
        self._built = {}

    def kept(self) -> Kept | None:
        """What is kept at each rank: they have cut alike, but one of them may have been stopped before it stepped."""
        if not self.holding.keeps_parts:
            return None
        found = [kept for store in self.by_rank if (kept := store.kept()) is not None]
        after = {kept.whole_after for kept in found}
        return Kept(tuple(part for part in found[0].parts if all(part in kept.parts for kept in found)),
                    found[0].whole_after if len(after) == 1 else None)

    def elements(self, layer: int) -> Elements:
        """How many a layer has at a rank."""
        return self.by_rank[0].elements(layer)
