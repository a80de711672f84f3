"""Parameters and optimizer state of a stage, as a peer hands them to a worker that returns."""

from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

GROUPS = "groups"
"""Name of the options of the optimizer's groups: JSON, as bytes."""
_GROUPS = msgspec.json.Decoder(list[dict[str, Any]])
PLAIN = (bool, int, float, str, type(None))


def pack_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Return this rank's part of a stage's parameters, buffers and optimizer state. Nothing is
    pickled."""
    tensors = {f"module.{name}": local(tensor) for name, tensor in _tensors_of(module)}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise ValueError(f"the optimizer keeps {key!r}, a {type(value).__name__}, for {name}; expected tensors "
                                 "only, which can be handed to a worker that returns")
            tensors[f"optimizer.{key}.{name}"] = local(value)
    groups = [{key: value for key, value in group.items() if isinstance(value, PLAIN)}
              for group in optimizer.param_groups]
    text = torch.frombuffer(bytearray(msgspec.json.encode(groups)), dtype=torch.uint8)
    return save({GROUPS: text, **{name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}})


def unpack_state(data: bytes, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set what `pack_state` has packed on another worker."""
    tensors = load(data)
    groups = _GROUPS.decode(tensors.pop(GROUPS).numpy().tobytes())
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update(options)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in _tensors_of(module):
            local(tensor).copy_(tensors.pop(f"module.{name}"))
    for place, value in tensors.items():
        _, key, name = place.split(".", 2)
        optimizer.state[parameters[name]][key] = _like(parameters[name], value)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors_of(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a value of the optimizer as it keeps it for a parameter: in the same shards, or a number."""
    if value.dim() == 0 and parameter.dim() > 0:
        return value  # a step count: on the host, unless the optimizer is fused
    value = value.to(local(parameter).device)
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(value, parameter.device_mesh, parameter.placements, shape=parameter.shape,
                              stride=parameter.stride(), run_check=False)
