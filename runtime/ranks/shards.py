"""Cut a layer's parameters into shards, one for each rank, and join them.

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
    """How a parameter is divided among the ranks of a worker."""

    dim: int
    """Dimension that is cut."""
    blocks: int = 1
    """Blocks of equal length, each cut by itself: 3 for joined q, k and v."""

    def cut(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Return a copy of a rank's part of a whole parameter; there are `ranks` ranks."""
        # Each block is cut by itself, so that a rank gets its part of q, of k and of v.
        parts = split_dim(split_dim(whole, self.dim, self.blocks), self.dim + 1, ranks).select(
            self.dim + 1, rank
        )
        return parts.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def join(self, parts: Tensor) -> Tensor:
        """Return the whole parameter from the parts of all ranks, stacked: [ranks, ...]."""
        # The reverse: ranks behind blocks, then both and the length become one dimension.
        blocks = split_dim(parts, self.dim + 1, self.blocks)
        return blocks.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)


def split_dim(tensor: Tensor, dim: int, parts: int) -> Tensor:
    """Divide a dimension of a tensor into two: the number of parts, and their length."""
    return tensor.reshape(*tensor.shape[:dim], parts, -1, *tensor.shape[dim + 1 :])


Shards = Mapping[str, Shard]
"""Shards by the names of a layer's parameters; others are whole on each rank."""


def shards_of(module: nn.Module) -> Shards:
    """Return how ranks cut a layer's parameters, its attribute `shards`; empty without it."""
    shards: Shards = getattr(module, "shards", {})
    return shards


def cut_parameters(module: nn.Module, shards: Shards, group: WorkerGroup) -> None:
    """Replace a layer's whole parameters, in place, by the parts of this rank.

    Parts of frozen parameters are frozen.
    """
    for name, shard in shards.items():
        whole = module.get_parameter(name)
        part = shard.cut(whole.detach(), group.rank(), group.size())
        replace_tensor(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))


def cut_state(
    state: Mapping[str, Tensor], shards: Shards, group: WorkerGroup | None
) -> dict[str, Tensor]:
    """Return this rank's part of a layer's whole state; all of it without a group."""
    if group is None:
        return dict(state)
    return cut_state_for_rank(state, shards, group.rank(), group.size())


def cut_state_for_rank(
    state: Mapping[str, Tensor], shards: Shards, rank: int, ranks: int
) -> dict[str, Tensor]:
    """Return the part of a layer's whole state that one of `ranks` ranks has."""
    part = dict(state)
    for key, tensor in state.items():
        shard = shard_of(key, tensor, shards)
        if shard is not None:
            part[key] = shard.cut(tensor, rank, ranks)
    return part


def gather_state(
    state: Mapping[str, Tensor], shards: Shards, group: WorkerGroup | None
) -> dict[str, Tensor]:
    """Return a layer's whole state, joined from the ranks' parts; all ranks call this together."""
    if group is None:
        return dict(state)
    # Slots of an optimizer with a loaded state may be ordered differently on other ranks.
    whole = dict(sorted(state.items()))
    for key, tensor in sorted(state.items()):
        shard = shard_of(key, tensor, shards)
        if shard is not None:
            whole[key] = shard.join(gather_tensors(tensor.detach(), group))
    return whole


def gather_layer(module: nn.Module, group: WorkerGroup | None) -> dict[str, Tensor]:
    """Return a layer's whole parameters and buffers by name; all ranks call this together.

    `group` is None for a worker of one rank, which has them whole.
    """
    tensors = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    if group is None:
        return tensors
    shards, whole = shards_of(module), dict(tensors)
    # In the order of the module's state, which is the same on all ranks.
    for name, tensor in tensors.items():
        if name in shards:
            whole[name] = shards[name].join(gather_tensors(tensor, group))
    return whole


def gather_tensors(tensor: Tensor, group: WorkerGroup) -> Tensor:
    """Return all ranks' tensors, stacked in order: [ranks, ...]. All ranks call this together."""
    all_parts = tensor.new_empty((group.size(), *tensor.shape))
    all_gather_single(all_parts, tensor.contiguous(), group)
    return all_parts


def shard_of(key: str, tensor: Tensor, shards: Shards) -> Shard | None:
    """Return how ranks cut the tensor of a state's key; None if they do not.

    None if its parameter is not cut, or if the tensor lacks the dimension along which that is cut.
    """
    shard = shards.get(parameter_name(key))
    return None if shard is None or tensor.dim() <= shard.dim else shard


def replace_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a module's parameter or buffer of this name, also that of a submodule."""
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, tensor)


def parameter_name(key: str) -> str:
    """Return the name of the parameter to which a key of a layer's state belongs.

    Keys are `model.NAME` or `optimizer.SLOT.NAME`.
    """
    kind, _, name = key.partition(".")
    return name if kind == "model" else name.partition(".")[2]
