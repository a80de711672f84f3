"""The layers of a process that stands for several ranks of its worker."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from slipstream.runtime.model.ranks.rank_holding import RankHolding
from slipstream.runtime.model.state.parts import Cut
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

    def put(self, received: ByRank) -> None:
        """See `LayerStore.put`."""
        self.holding.give_parameters()
        super().put(received)
        self.holding.arrived()

    def keep_parts(self, cuts: Mapping[LayerRange, Cut], worker: Worker, after: int) -> None:
        """See `LayerStore.keep_parts`: each rank keeps its own."""
        self.holding.give_parameters()
        for store, stand_in in self._ranks:
            with stand_in():
                store.keep_parts(cuts, worker, after)
        self.holding.join(self._modules(cuts))
        self._built = {}
