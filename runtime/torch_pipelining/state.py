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
                raise ValueError(f"the optimizer keeps {key!r}, a {type(value).__name__}, for "
                                 f"{name}; expected tensors only, which can be handed to a worker "
                                 "that returns")
            tensors[f"optimizer.{key}.{name}"] = local(value)
    groups = [{key: value for key, value in group.items() if isinstance(value, PLAIN)}
              for group in optimizer.param_groups]
    text = torch.frombuffer(bytearray(msgspec.json.encode(groups)), dtype=torch.uint8)
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return save({GROUPS: text, **copies})


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
    on_device = {parameter for group in optimizer.param_groups for parameter in group["params"]
                 if group.get("fused") or group.get("capturable")}
    for place, value in tensors.items():
        _, key, name = place.split(".", 2)
        parameter = parameters[name]
        optimizer.state[parameter][key] = _like(parameter, value, keeps_steps_on_device=parameter in on_device)


def require_all_parameters(modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimizer has parameters that are not those of the modules."""
    known = {parameter for module in modules for parameter in module.parameters()}
    strange = [tuple(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]
               if parameter not in known]
    if strange:
        raise ValueError(f"the optimizer has {len(strange)} parameters that are not the modules', "
                         f"the first of shape {strange[0]}; expected those of the modules, as they "
                         "are after ReroutedStage is made around each")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors_of(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _like(parameter: Tensor, value: Tensor, *, keeps_steps_on_device: bool) -> Tensor:
    """Return a value of the optimizer as it keeps it for a parameter: in the same shards, or a number."""
    device = local(parameter).device
    if value.dim() == 0 and parameter.dim() > 0:  # a step count
        return value.to(device) if keeps_steps_on_device else value
    value = value.to(device)
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(value, parameter.device_mesh, parameter.placements, shape=parameter.shape,
                              stride=parameter.stride(), run_check=False)
