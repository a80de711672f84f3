"""torchtitan's layers over the ranks of a worker: cut by torchtitan's own declarations, as DTensors."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torchtitan.distributed import ParallelDims

from slipstream.runtime.models.distributed_tensors import Placements
from slipstream.runtime.ranks.shards import replace_tensor
from slipstream.runtime.ranks.worker_group import worker_group


def cut_over_ranks(layer: nn.Module, parts: Any, device: torch.device) -> nn.Module:
    """Return this rank's part of a layer: `parts`, the same layer on the meta device, cut over the ranks in place and
    filled from `layer`.

    All ranks build the same layer, so nothing is sent. If `device` is the meta device, nothing is filled. Raises
    ConfigError if the layer cannot be cut.
    """
    group = worker_group()
    assert group is not None
    mesh = init_device_mesh("cpu" if device.type == "meta" else device.type, (group.size(),), mesh_dim_names=("tp",))
    parts.parallelize(ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=group.size(), pp=1, ep=1,
                                   world_size=group.size(), spmd_backend="partial_dtensor",
                                   _single_axis_meshes={"tp": mesh}))
    if device.type == "meta":
        return cast(nn.Module, parts)
    parts.to_empty(device=device)
    full_tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    with torch.no_grad():
        for name, part in (*parts.named_parameters(), *parts.named_buffers()):
            _local_part(part).copy_(_local_part(distribute_tensor(full_tensors[name], mesh, part.placements,
                                                                  src_data_rank=None)
                                                if isinstance(part, DTensor) else full_tensors[name]))
    return cast(nn.Module, parts)


def as_replicated(given: Tensor, module: nn.Module) -> Tensor:
    """Wrap features that are equal on all ranks in a replicated DTensor if `module`, which takes them, is cut over the
    ranks; otherwise return them as they are."""
    placed: Placements = getattr(module, "placed", {})
    if not placed or not given.is_floating_point():
        return given
    mesh, _ = next(iter(placed.values()))
    return DTensor.from_local(given, mesh, [Replicate()], run_check=False)


def as_plain_tensor(found: Tensor) -> Tensor:
    """Return a DTensor as a plain tensor that is whole on all ranks; a plain tensor is returned as it is."""
    if not isinstance(found, DTensor):
        return found
    return found.full_tensor()


def copy_to_twin(layer: nn.Module, twin: nn.Module) -> nn.Module:
    """Give `twin`, the same layer on the meta device, the parameters and buffers of a layer, and return it.

    A deep copy would not do: torchtitan gives each module a forward that is bound to that module, not to its copy.
    """
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        replace_tensor(twin, name, tensor)
    twin.placed, twin.shards = layer.placed, layer.shards
    return twin


def _local_part(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
