"""Layers whose parameters are torch's DTensors, as torch.distributed.tensor.parallel.parallelize_module makes them.

The runtime holds, reduces, steps, moves and saves what this rank has of them, as plain parameters. A DTensor is made of
each while the layer is called, and gives its gradient back as it is cut: what is a sum over ranks is summed then.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from slipstream.runtime.model.layers.shards import Shard, shards_of
from slipstream.runtime.model.layers.sharing import put_tensor

Placed = Mapping[str, tuple[Any, tuple[Any, ...]]]
"""By the names of parameters and buffers, their device mesh and placements on it."""


def with_local_parameters(module: nn.Module) -> nn.Module:
    """A layer as the runtime holds it, which `as_called` calls. Raises ValueError where one is not cut evenly."""
    placed, shards = dict[str, tuple[Any, tuple[Any, ...]]](), dict(shards_of(module))
    for name, parameter in list(module.named_parameters()):
        found: Any = parameter
        if not hasattr(found, "placements"):
            continue
        placed[name] = found.device_mesh, found.placements
        ranks = found.device_mesh.size()
        for placement in found.placements:
            if placement.is_shard():
                if found.shape[placement.dim] % ranks:
                    raise ValueError(f"{name} is {list(found.shape)}, and cut over {ranks} ranks along dimension "
                                     f"{placement.dim}; expected equal parts")
                shards[name] = Shard(placement.dim)
        local = found.detach().to_local()
        put_tensor(module, name, nn.Parameter(local, requires_grad=found.requires_grad))
    for name, buffer in list(module.named_buffers()):
        found = buffer
        if hasattr(found, "placements"):
            placed[name] = found.device_mesh, found.placements
            put_tensor(module, name, found.to_local())
    if placed:
        module.shards, module.placed = shards, placed  # type: ignore[assignment]
    return module


def as_called(module: nn.Module, parameters: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """What to call a layer with in the place of its parameters, or of these; nothing where they are plain."""
    placed: Placed = getattr(module, "placed", {})
    if not placed:
        return {}
    from torch.distributed.tensor import DTensor  # takes a second

    own = {**dict(module.named_parameters()), **dict(module.named_buffers())} if parameters is None else parameters
    return {name: DTensor.from_local(own[name], mesh, placements, run_check=False)
            for name, (mesh, placements) in placed.items()}
