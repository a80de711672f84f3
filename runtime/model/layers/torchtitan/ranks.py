"""Layers of torchtitan over the ranks of a worker: cut by torchtitan's own declarations, as DTensors."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torchtitan.distributed import ParallelDims

from slipstream.runtime.model.layers.distributed_tensors import Placed
from slipstream.runtime.model.layers.sharing import put_tensor
from slipstream.runtime.model.layers.worker_group import worker_group


def cut_over_ranks(layer: nn.Module, parts: Any, device: torch.device) -> nn.Module:
    """A layer as this rank of the worker has it: `parts` is the same layer on the meta device.

    All ranks build the same layer, so that nothing is sent. Raises ConfigError where it cannot be cut.
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
    theirs = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    with torch.no_grad():
        for name, part in (*parts.named_parameters(), *parts.named_buffers()):
            _local(part).copy_(_local(distribute_tensor(theirs[name], mesh, part.placements, src_data_rank=None)
                                      if isinstance(part, DTensor) else theirs[name]))
    return cast(nn.Module, parts)


def on_ranks(given: Tensor, module: nn.Module) -> Tensor:
    """What all ranks have alike, as torchtitan's layers want it."""
    placed: Placed = getattr(module, "placed", {})
    if not placed or not given.is_floating_point():
        return given
    mesh, _ = next(iter(placed.values()))
    return DTensor.from_local(given, mesh, [Replicate()], run_check=False)


def whole(found: Tensor) -> Tensor:
    """What all ranks have alike, plain."""
    if not isinstance(found, DTensor):
        return found
    return found.full_tensor()


def copied(layer: nn.Module, twin: nn.Module) -> nn.Module:
    """`twin`, the same layer on the meta device, with the parameters and buffers of a layer: torchtitan has given each
    module a forward that is a function of that module, and not of one that is copied from it.
    """
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        put_tensor(twin, name, tensor)
    twin.placed, twin.shards = layer.placed, layer.shards
    return twin


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
