"""What a process holds that stands for several ranks of its worker, where workers keep parts of optimizer states.

Each of these ranks has a holding of its own: its shards, and what it keeps of their state, cut as at any rank
(`runtime.model.parts`). So others exchange parts with it as with the rank itself. The layers that compute have all of
these shards in one: their gradients go to the ranks before they are summed, and parameters come back after a step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from runtime.config import TrainingConfig
from runtime.model.holding import Holding
from runtime.model.part_optimizer import PartOptimizer
from runtime.model.parts import Cut, Span
from runtime.model.rank_optimizers import RankOptimizers
from runtime.model.shards import shards_of
from runtime.model.sharing import NOTHING_SHARED, Sharing
from schedules.layers import LayerRange


class RankHolding(Holding):
    """Layers that compute, which `ranks`, ascending, step together; it has their gradients and parameters only."""

    def __init__(self, config: TrainingConfig, ranks: Sequence[Holding], sharing: Sharing = NOTHING_SHARED) -> None:
        self._ranks = ranks
        super().__init__({}, config, sharing)

    def join(self, modules: Mapping[int, nn.Module]) -> None:
        """Hold exactly these layers, which each rank holds; its parameters are as they should be."""
        self.modules, self.cuts = dict(sorted(modules.items())), self._ranks[0].cuts
        self._sharing.tie(self.modules)
        self.optimizer = self._build(self.modules)
        self._gradients = {}
        self.reduce_by(self.cuts)
        self.arrived()

    @property
    def part_optimizers(self) -> Sequence[PartOptimizer]:
        """Of each rank."""
        return [optimizer for one in self._ranks for optimizer in one.part_optimizers]

    def flat_parameters(self, own_rank: int = 0) -> Iterable[tuple[LayerRange, Tensor, Cut]]:
        """Those of a rank, counted from 0."""
        return self._ranks[own_rank].flat_parameters()

    def copies(self, layers: LayerRange, own_rank: int = 0) -> Mapping[Span, Tensor]:
        """Those of a rank, counted from 0."""
        return self._ranks[own_rank].copies(layers)

    def arrived(self) -> None:
        """The ranks have all elements of their parameters: compute with these. Also with what is not trained."""
        for layer, module in self.modules.items():
            shards, states = shards_of(module), [one.modules[layer].state_dict() for one in self._ranks]
            for name, own in module.state_dict().items():
                found = [state[name] for state in states]
                own.copy_(found[0] if name not in shards else shards[name].joined(torch.stack(found)))

    @contextmanager
    def summed(self, layers: LayerRange) -> Iterator[list[list[Tensor]]]:
        """The gradients of a range at each rank, to be summed in place, by which it steps."""
        for layer in range(*layers):
            for name, parameter in self.modules[layer].named_parameters():
                if parameter.grad is not None and not self._sharing.is_shared(layer, name):
                    self._give(layer, name)
        yield [one.gradients(layers) for one in self._ranks]

    @contextmanager
    def summed_shared(self, first: str) -> Iterator[list[list[Tensor]]]:
        """As `summed`, of a parameter that layers share, by its first name."""
        self._give(*next(mine for place, (mine, *_) in self._sharing.held(self.modules) if str(place) == first))
        yield [one.shared_gradients[first] for one in self._ranks]

    def _give(self, layer: int, name: str) -> None:
        """The gradient of a parameter to each rank, as that has it."""
        module = self.modules[layer]
        gradient, shard = module.get_parameter(name).grad, shards_of(module).get(name)
        assert gradient is not None
        for rank, one in enumerate(self._ranks):
            theirs = one.modules[layer].get_parameter(name).grad
            assert theirs is not None
            theirs.copy_(gradient if shard is None else shard.cut(gradient, rank, len(self._ranks)))

    def _build(self, modules: Mapping[int, nn.Module]) -> RankOptimizers:  # noqa: ARG002  # they have those
        return RankOptimizers(self.part_optimizers)
