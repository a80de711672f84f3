"""Hand parameters and optimizer state of a stage to a worker that returns."""

from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

GROUPS = "groups"
"""Name of the tensor with the options of the optimizer's groups, as bytes of JSON."""
_GROUPS = msgspec.json.Decoder(list[dict[str, Any]])
PLAIN = (bool, int, float, str, type(None))


def pack_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Return this rank's part of a stage's parameters, buffers and optimizer state, as bytes.

    Options of the optimizer's groups are added if of the types in `PLAIN`. Nothing is pickled.
    Raises ValueError if the optimizer keeps anything but tensors.
    """
    # The names of tensors say what each is: `module.NAME` or `optimizer.SLOT.NAME`.
    tensors = {f"module.{name}": local(tensor) for name, tensor in _tensors_of(module)}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the optimizer keeps {key!r}, a {type(value).__name__}, for "
                    f"{name}; expected tensors only, which can be handed to a worker "
                    "that returns"
                )
            tensors[f"optimizer.{key}.{name}"] = local(value)
    # Options such as the learning rate may have changed during the run.
    groups = []
    for group in optimizer.param_groups:
        groups.append({key: value for key, value in group.items() if isinstance(value, PLAIN)})
    text = torch.frombuffer(bytearray(msgspec.json.encode(groups)), dtype=torch.uint8)
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return save({GROUPS: text, **copies})


def unpack_state(data: bytes, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set the state of a stage to `data`, which `pack_state` has returned on another worker.

    Module and optimizer must have the same parameters and groups as there.
    """
    tensors = load(data)
    groups = _GROUPS.decode(tensors.pop(GROUPS).numpy().tobytes())
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update(options)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in _tensors_of(module):
            local(tensor).copy_(tensors.pop(f"module.{name}"))
    # Fused and capturable optimizers keep step counts on the device, others on the host.
    on_device = {
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if group.get("fused") or group.get("capturable")
    }
    for place, value in tensors.items():
        _, key, name = place.split(".", 2)
        parameter = parameters[name]
        optimizer.state[parameter][key] = _like(
            parameter, value, keeps_steps_on_device=parameter in on_device
        )


def require_all_parameters(modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimizer has parameters that belong to none of the modules."""
    parameters = {parameter for module in modules for parameter in module.parameters()}
    other_shapes = [
        tuple(parameter.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter not in parameters
    ]
    if other_shapes:
        raise ValueError(
            f"the optimizer has {len(other_shapes)} parameters that are not the modules', "
            f"the first of shape {other_shapes[0]}; expected those of the modules, as they "
            "are after ReroutedStage is made around each"
        )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors_of(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _like(parameter: Tensor, value: Tensor, *, keeps_steps_on_device: bool) -> Tensor:
    """Return the tensor `value` of an optimizer, with its parameter's device and sharding."""
    device = local(parameter).device
    if value.dim() == 0 and parameter.dim() > 0:  # a step count
        return value.to(device) if keeps_steps_on_device else value
    value = value.to(device)
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
        run_check=False,
    )
