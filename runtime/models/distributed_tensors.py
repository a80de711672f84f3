"""Run layers whose parameters are torch's DTensors, as parallelize_module makes them.

The runtime holds, reduces, steps, moves and saves this rank's local shards as plain parameters.
While the layer is called, a DTensor is made of each shard. The gradients of the DTensors come back
sharded in the same way; gradients that are sums over ranks are summed at that time.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from slipstream.runtime.ranks.shards import Shard, replace_tensor, shards_of

Placements = Mapping[str, tuple[Any, tuple[Any, ...]]]
"""Device mesh and placements of parameters and buffers, by their names."""


def with_local_parameters(module: nn.Module) -> nn.Module:
    """Replace a layer's DTensors in place by their local shards, and return the layer.

    The layer's attributes `shards` and `placed` record the cuts, for `build_dtensors`. Raises
    ValueError if a DTensor is not cut into equal parts.
    """
    placed, shards = dict[str, tuple[Any, tuple[Any, ...]]](), dict(shards_of(module))
    for name, parameter in list(module.named_parameters()):
        tensor: Any = parameter
        if not hasattr(tensor, "placements"):
            continue
        placed[name] = tensor.device_mesh, tensor.placements
        ranks = tensor.device_mesh.size()
        for placement in tensor.placements:
            if placement.is_shard():
                # Parts of unequal length would not be saved and moved like other shards.
                if tensor.shape[placement.dim] % ranks:
                    raise ValueError(
                        f"{name} is {list(tensor.shape)}, and cut over {ranks} ranks along "
                        f"dimension {placement.dim}; expected equal parts"
                    )
                shards[name] = Shard(placement.dim)
        local = tensor.detach().to_local()
        replace_tensor(module, name, nn.Parameter(local, requires_grad=tensor.requires_grad))
    # Buffers, such as tables of positions, may be cut, too.
    for name, buffer in list(module.named_buffers()):
        tensor = buffer
        if hasattr(tensor, "placements"):
            placed[name] = tensor.device_mesh, tensor.placements
            replace_tensor(module, name, tensor.to_local())
    if placed:
        module.shards, module.placed = shards, placed  # type: ignore[assignment]
    return module


def build_dtensors(
    module: nn.Module, parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return, by name, the DTensors with which a layer has to be called.

    They are made of the shards in `parameters`, by default the layer's own. The dict is empty if
    torch has not cut the layer.
    """
    placed: Placements = getattr(module, "placed", {})
    if not placed:
        return {}
    from torch.distributed.tensor import DTensor  # the import takes a second

    shards = parameters
    if shards is None:
        shards = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: DTensor.from_local(shards[name], mesh, placements, run_check=False)
        for name, (mesh, placements) in placed.items()
    }
