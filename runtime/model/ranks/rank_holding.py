"""What a process holds that stands for several ranks of its worker, where workers keep parts of optimizer states.

Each of these ranks has a holding of its own (`runtime.model.ranks.rank_parts`): what it keeps of its shards' state, cut
as at any rank (`runtime.model.state.parts`). So others exchange parts with it as with the rank itself. The layers that
compute have all of these shards in one. Gradients go to the ranks before they are summed, and parameters come back
after a step: nothing is in both places for longer than it takes to get there.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.model.layers.shards import shards_of
from slipstream.runtime.model.layers.sharing import NOTHING_SHARED, Sharing
from slipstream.runtime.model.ranks.rank_parts import RankParts
from slipstream.runtime.model.state.holding import Holding, gradient_dtype
from slipstream.runtime.model.state.part_state import trained
from slipstream.schedules.layers import LayerRange


class RankHolding(Holding):
    """Layers that compute, which `ranks`, ascending, step together; it has their gradients and parameters only."""

    def __init__(self, config: TrainingConfig, ranks: Sequence[RankParts], sharing: Sharing = NOTHING_SHARED) -> None:
        self._ranks = ranks
        super().__init__({}, config, sharing)

    def join(self, modules: Mapping[int, nn.Module]) -> None:
        """Hold exactly these layers, which each rank holds; its parameters are as they should be."""
        self.modules, self.cuts = dict(sorted(modules.items())), self._ranks[0].cuts
        self._sharing.tie(self.modules)
        self.reduce_by(self.cuts)
        self.arrived()

    def reduce_by(self, ranges: Iterable[LayerRange]) -> None:  # noqa: ARG002  # the ranks have flat ones then
        """Gradients are zero, and of each parameter by itself."""
        self.shared_gradients = {str(first): [] for first, _ in self._sharing.held(self.modules)}
        for parameter in self.parameters().values():
            parameter.grad = None
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Start the next sum of gradients; the ranks have none any more."""
        for one in self._ranks:
            one.zero_gradients()
        for parameter in self.parameters().values():
            if parameter.requires_grad and parameter.grad is None:
                kind = gradient_dtype(self._config) or parameter.dtype
                if kind != parameter.dtype:
                    parameter.grad_dtype = kind
                parameter.grad = torch.zeros_like(parameter, dtype=kind)
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @property
    def by_rank(self) -> Sequence[RankParts]:
        """The ranks."""
        return self._ranks

    def parameters_by_rank(self) -> Sequence[Mapping[str, Tensor]]:
        """Of the layers that compute, cut as each rank has them."""
        return [{str(self._sharing.first(layer, name)): parameter if (shard := shards_of(module).get(name)) is None
                 else shard.cut(parameter.detach(), rank, len(self._ranks))
                 for layer, module in self.modules.items() for name, parameter in module.named_parameters()}
                for rank in range(len(self._ranks))]

    def arrived(self) -> None:
        """The ranks have all elements of their parameters: compute with these. Also with what is not trained."""
        assert all(one.has_parameters for one in self._ranks), "they have come to all ranks"
        for layer, module in self.modules.items():
            shards, states = shards_of(module), [one.modules[layer].state_dict() for one in self._ranks]
            for name, own in module.state_dict().items():
                found = [state[name] for state in states]
                own.copy_(found[0] if name not in shards else shards[name].joined(torch.stack(found)))
        for one in self._ranks:
            one.drop_parameters()
        super().arrived()

    def give_parameters(self) -> None:
        """To each rank, as that has them; what it keeps may be older, after an undone step, and stays as it is."""
        for rank, one in enumerate(self._ranks):
            one.take_parameters()
            for layer, module in self.modules.items():
                shards = shards_of(module)
                for name, parameter in trained(one.modules[layer]).items():
                    mine = module.get_parameter(name).detach()
                    parameter.detach().copy_(
                        mine if name not in shards else shards[name].cut(mine, rank, len(self._ranks)))
        for optimizer in self.part_optimizers:
            optimizer.write()
            optimizer.write_copies()

    def summed(self, what: LayerRange | str) -> list[list[Tensor]]:
        """See `Holding.summed`: each rank's, by which it steps."""
        by_rank = [one.take_gradients(what) for one in self._ranks]
        for place in [self._sharing.held_as(what, self.modules)] if isinstance(what, str) else [
                (layer, name) for layer in range(*what) for name, one in self.modules[layer].named_parameters()
                if one.grad is not None and not self._sharing.is_shared(layer, name)]:
            self._give_gradient(*place)
        return by_rank

    def _give_gradient(self, layer: int, name: str) -> None:
        """That of a parameter to each rank, as that has it; here it is no more."""
        module = self.modules[layer]
        parameter, shard = module.get_parameter(name), shards_of(module).get(name)
        assert parameter.grad is not None
        for rank, one in enumerate(self._ranks):
            theirs = one.modules[layer].get_parameter(name).grad
            assert theirs is not None
            theirs.copy_(parameter.grad if shard is None else shard.cut(parameter.grad, rank, len(self._ranks)))
        parameter.grad = None
