"""Cut a layer's parameters into shards, one a rank, and join them.

A layer whose module has an attribute `shards` is cut over the ranks of a worker: each rank has
equal parts of the parameters named there, and the others whole. Saved layers are whole, so that a
run with any number of ranks can resume from them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.runtime.ranks.worker_group import WorkerGroup
from slipstream.runtime.torch_private import all_gather_single


class Shard(NamedTuple):
    """Division of a parameter over the ranks of a worker."""

    dim: int
    """Dimension that is cut."""
    blocks: int = 1
    """Blocks of equal length, each cut by itself: 3 for q, k and v in one matrix."""

    def cut(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Return a copy of a rank's part of a whole parameter."""
        parts = split_dim(split_dim(whole, self.dim, self.blocks), self.dim + 1, ranks).select(self.dim + 1, rank)
        return parts.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def join(self, parts: Tensor) -> Tensor:
        """Return the whole parameter, from the parts of all ranks [ranks, ...]."""
        blocks = split_dim(parts, self.dim + 1, self.blocks)
        return blocks.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)


def split_dim(tensor: Tensor, dim: int, parts: int) -> Tensor:
    """Return a tensor with a dimension split into equal parts and their length."""
    return tensor.reshape(*tensor.shape[:dim], parts, -1, *tensor.shape[dim + 1:])


Shards = Mapping[str, Shard]
"""Shards by the names of a layer's parameters; others are whole on each rank."""


def shards_of(module: nn.Module) -> Shards:
    """Return how ranks cut a layer's parameters, by its attribute `shards`. Empty if they do
    not."""
    shards: Shards = getattr(module, "shards", {})
    return shards


def cut_parameters(module: nn.Module, shards: Shards, group: WorkerGroup) -> None:
    """Replace whole parameters of a layer, in place, by this rank's parts, by `shards`."""
    for name, shard in shards.items():
        part = shard.cut(module.get_parameter(name).detach(), group.rank(), group.size())
        replace_tensor(module, name, nn.Parameter(part))


def cut_state(state: Mapping[str, Tensor], shards: Shards, group: WorkerGroup | None) -> dict[str, Tensor]:
    """Return this rank's part of a layer's whole state; the whole if `group` is None."""
    return dict(state) if group is None else cut_state_for_rank(state, shards, group.rank(), group.size())


def cut_state_for_rank(state: Mapping[str, Tensor], shards: Shards, rank: int, ranks: int) -> dict[str, Tensor]:
    """Return the part of a layer's whole state that one of `ranks` ranks has."""
    return {key: tensor if (shard := shard_of(key, tensor, shards)) is None
            else shard.cut(tensor, rank, ranks) for key, tensor in state.items()}


def gather_state(state: Mapping[str, Tensor], shards: Shards, group: WorkerGroup | None) -> dict[str, Tensor]:
    """Return a layer's whole state from the ranks' parts. As it is if `group` is None. All ranks
    must call this together."""
    if group is None:
        return dict(state)
    # Slots of an optimizer with a loaded state may be ordered differently on other ranks.
    return {key: tensor if (shard := shard_of(key, tensor, shards)) is None
            else shard.join(gather_tensors(tensor.detach(), group)) for key, tensor in sorted(state.items())}


def gather_layer(module: nn.Module, group: WorkerGroup | None) -> dict[str, Tensor]:
    """Return a layer's whole parameters and buffers; its own if `group` is None. All ranks must
    call this together."""
    tensors = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    return tensors if group is None else {
        name: tensor if (shard := shards_of(module).get(name)) is None else shard.join(gather_tensors(tensor, group))
        for name, tensor in tensors.items()}


def gather_tensors(tensor: Tensor, group: WorkerGroup) -> Tensor:
    """Return all ranks' tensors, stacked in order: [ranks, ...]. All must call this together."""
    all_parts = tensor.new_empty((group.size(), *tensor.shape))
    all_gather_single(all_parts, tensor.contiguous(), group)
    return all_parts


def shard_of(key: str, tensor: Tensor, shards: Shards) -> Shard | None:
    """Return how ranks cut a tensor's parameter, by its key in the state. Returns None if the
    parameter is not cut, or if the tensor lacks the dimension that is cut."""
    shard = shards.get(parameter_name(key))
    return None if shard is None or tensor.dim() <= shard.dim else shard


def replace_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer of this name in a module."""
    owner, _, own = name.rpartition(".")
    setattr(module.get_submodule(owner), own, tensor)


def parameter_name(key: str) -> str:
    """Return the parameter's name in a key: `model.NAME` or `optimizer.SLOT.NAME`."""
    kind, _, name = key.partition(".")
    return name if kind == "model" else name.partition(".")[2]
