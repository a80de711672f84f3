"""Shards: what a rank of a worker has of a layer's parameters, and the whole of it.

A layer whose module has an attribute `shards`, by the names of parameters, is cut over the ranks of a worker: each has
equal parts of these, and all of the others. What is saved is whole, so that any number of ranks can go on from it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.runtime.model.layers.sharing import name_of, put_tensor
from slipstream.runtime.model.layers.worker_group import WorkerGroup
from slipstream.runtime.torch_private import all_gather_single


class Shard(NamedTuple):
    """How a parameter lies on the ranks of a worker."""

    dim: int
    """Which is cut."""
    blocks: int = 1
    """It is so many blocks of equal length, one after the other, each cut by itself: 3 for q, k and v in one matrix."""

    def cut(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """What a rank has: a copy."""
        parts = in_parts(in_parts(whole, self.dim, self.blocks), self.dim + 1, ranks).select(self.dim + 1, rank)
        return parts.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def joined(self, parts: Tensor) -> Tensor:
        """The whole, from the parts of all ranks [ranks, ...]."""
        blocks = in_parts(parts, self.dim + 1, self.blocks)
        return blocks.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)


def in_parts(tensor: Tensor, dim: int, parts: int) -> Tensor:
    """A dimension as two: so many equal parts, and what lies within each."""
    return tensor.reshape(*tensor.shape[:dim], parts, -1, *tensor.shape[dim + 1:])


Shards = Mapping[str, Shard]
"""By the names of a layer's parameters; the others are whole on each rank."""


def shards_of(module: nn.Module) -> Shards:
    """What a layer says of its parameters."""
    found: Shards = getattr(module, "shards", {})
    return found


def cut_parameters(module: nn.Module, shards: Shards, group: WorkerGroup) -> None:
    """Put this rank's parts in the place of whole parameters."""
    for name, shard in shards.items():
        part = shard.cut(module.get_parameter(name).detach(), group.rank(), group.size())
        put_tensor(module, name, nn.Parameter(part))


def cut_state(state: Mapping[str, Tensor], shards: Shards, group: WorkerGroup | None) -> dict[str, Tensor]:
    """What this rank has of a layer's whole state (`part_state.whole`)."""
    return dict(state) if group is None else state_of_rank(state, shards, group.rank(), group.size())


def state_of_rank(state: Mapping[str, Tensor], shards: Shards, rank: int, ranks: int) -> dict[str, Tensor]:
    """A layer's state as one of so many ranks has it; what is not cut is whole at each."""
    return {key: tensor if (shard := shard_of(key, tensor, shards)) is None
            else shard.cut(tensor, rank, ranks) for key, tensor in state.items()}


def whole_state(state: Mapping[str, Tensor], shards: Shards, group: WorkerGroup | None) -> dict[str, Tensor]:
    """A layer's whole state from what the ranks have of it. All of them must call this together."""
    if group is None:
        return dict(state)
    # Slots of an optimizer that has been loaded may be in another order than on other ranks.
    return {key: tensor if (shard := shard_of(key, tensor, shards)) is None
            else shard.joined(gathered(tensor.detach(), group)) for key, tensor in sorted(state.items())}


def whole_layer(module: nn.Module, group: WorkerGroup | None) -> dict[str, Tensor]:
    """A layer's whole parameters and buffers. All ranks of a worker must call this together."""
    found = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    return found if group is None else {
        name: tensor if (shard := shards_of(module).get(name)) is None else shard.joined(gathered(tensor, group))
        for name, tensor in found.items()}


def gathered(tensor: Tensor, group: WorkerGroup) -> Tensor:
    """The tensors of all ranks, [ranks, ...]."""
    found = tensor.new_empty((group.size(), *tensor.shape))
    all_gather_single(found, tensor.contiguous(), group)
    return found


def shard_of(key: str, tensor: Tensor, shards: Shards) -> Shard | None:
    """How a tensor of a state is cut: as its parameter is, if it has an element for each of the parameter's."""
    shard = shards.get(name_of(key))
    return None if shard is None or tensor.dim() <= shard.dim else shard
