"""The forms of what passes between layers, found on tensors without memory; and whether a model keeps its contract.

docs/own-model.md states the contract. A model that breaks it is refused in one line that names the layer, what it gave
and what was expected, before any worker is started.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.errors import first_line
from slipstream.runtime.model.data.data import batch_form
from slipstream.runtime.model.layers.calling import Batch, loss_call, takes_batch
from slipstream.runtime.model.layers.compiling import check_compilable
from slipstream.runtime.model.layers.distributed_tensors import as_called, with_local_parameters
from slipstream.runtime.model.layers.layered_model import LayeredModel, autocast
from slipstream.runtime.model.layers.recomputing import recomputed, seen_parts
from slipstream.runtime.model.layers.shards import shards_of
from slipstream.runtime.model.layers.sharing import sharing_of
from slipstream.runtime.model.passed import Form, Value, form_of, handed_on, has_gradient, made, tensors_of
from slipstream.runtime.torch_private import DATA_DEPENDENT, FakeTensorMode, unset_fake_temporarily, without_gpu_context


def forms(model: LayeredModel, config: RunConfig) -> list[Form]:
    """What goes into each layer, and then what comes out of the last.

    Raises ConfigError where a layer, or the loss, is not what the runtime can run.
    """
    given = batch_form(config)
    again = recomputed(config.training, model.layers)
    modules = [_without_memory(model, layer, config) for layer in range(model.layers)]
    _check_shared(model, modules, config)
    _check_shards(modules, config)
    if config.training.compile:
        check_compilable(config, model.device)
    with without_gpu_context(), FakeTensorMode(), model.device, torch.no_grad(), \
            autocast(config.training, model.device):
        batch = made(given, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
        assert isinstance(batch, tuple)
        value: Value = batch[0]
        seen = [form_of(value)]
        with seen_parts() as parts:
            for layer, module in enumerate(modules):
                value = _passed_on(layer, module, value, batch, config)
                seen.append(form_of(value))
        for name in sorted(again.parts - parts):
            raise ConfigError(f"training.recompute names {name!r}, and no layer has that part "
                              "(runtime.api.recomputable); expected layers' numbers, or 'full'")
        _check_loss(model, value, batch, config)
    return seen


def _without_memory(model: LayeredModel, layer: int, config: RunConfig) -> nn.Module:
    """A layer on no device: parameters of FakeTensorMode refuse `module.to(dtype)`."""
    try:
        with torch.device("meta"):
            module = model.build(layer)
        if isinstance(module, nn.Module):
            module = with_local_parameters(module)
    except Exception as error:  # whatever the user's code raises
        raise _refusal(config, f"layer {layer} cannot be built: {_told(error)}") from error
    if not isinstance(module, nn.Module):
        raise _refusal(config, f"layer {layer} is {_shown(module)}; expected a torch.nn.Module")
    return module


def _check_shared(model: LayeredModel, modules: Sequence[nn.Module], config: RunConfig) -> None:
    for group in sharing_of(model).groups:
        try:
            first, *others = [modules[place.layer].get_parameter(place.name) for place in group]
        except AttributeError as error:
            raise _refusal(config, f"layers share {', '.join(map(str, group))}, but {first_line(error)}") from None
        for place, other in zip(group[1:], others, strict=True):
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                raise _refusal(config, f"{place} is {_shown(other)}; expected {_shown(first)}, as {group[0]}, which is "
                                       "to be the same")


def _check_shards(modules: Sequence[nn.Module], config: RunConfig) -> None:
    """Where a worker is several processes, the layers must be cut over them."""
    ranks = config.training.tensor_parallel
    if ranks == 1:
        return
    if not any(map(shards_of, modules)):
        raise ConfigError(f"training.tensor_parallel is {ranks}, and no layer of the model has `shards`: all ranks "
                          "would do the same; expected 1")
    for layer, module in enumerate(modules):
        names = dict(module.named_parameters())
        for name in shards_of(module).keys() - names:
            raise _refusal(config, f"layer {layer} has shards of {name!r}; expected the name of a parameter of it")


def _passed_on(layer: int, module: nn.Module, value: Value, batch: Batch, config: RunConfig) -> Value:
    """What a layer gives, under FakeTensorMode. Raises ConfigError unless it can be passed on."""
    name = f"layer {layer} ({type(module).__name__})"
    more = {"batch": batch} if takes_batch(module.forward) else {}
    with unset_fake_temporarily():
        named = dict(chain(module.named_parameters(), module.named_buffers()))
    state = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in named.items()}
    try:
        given = functional_call(module, {**state, **as_called(module, state)}, (value,), more)
    except DATA_DEPENDENT as error:
        raise _refusal(config, f"{name} has shapes that depend on its data ({first_line(error)}); expected shapes that "
                               "are the same for all micro-batches") from error
    except Exception as error:
        raise _refusal(config, f"{name} fails on {_shown(value)}: {_told(error)}") from error
    if not isinstance(given, Tensor) and not (isinstance(given, tuple) and given and all(
            isinstance(one, Tensor) for one in given)):
        raise _refusal(config, f"{name} gives {_shown(given)}; expected a tensor, or a tuple of tensors")
    if not any(map(has_gradient, tensors_of(given))):
        raise _refusal(config, f"{name} gives {_shown(given)}; expected a tensor of floating "
                               "point, or a tuple with one")
    return given if isinstance(given, Tensor) else handed_on(given)


def _check_loss(model: LayeredModel, output: Value, batch: Batch, config: RunConfig) -> None:
    try:
        loss: object = loss_call(model.loss)(output, batch[1], batch)
    except DATA_DEPENDENT:  # nobody needs to know the shapes within
        return
    except Exception as error:
        raise _refusal(config, f"loss fails on {_shown(output)} and {_shown(batch[1])}: {_told(error)}") from error
    if not isinstance(loss, Tensor) or loss.dim():
        raise _refusal(config, f"loss gives {_shown(loss)}; expected a tensor of no dimensions, a micro-batch's "
                               "mean")


def _refusal(config: RunConfig, what: str) -> ConfigError:
    model = config.model
    named = {"hugging_face": model.hugging_face, "torchtitan": model.torchtitan, "name": model.name}
    key = next(key for key, name in named.items() if name is not None)
    return ConfigError(f"model.{key} is {str(named[key])!r}: {what}")


def _shown(value: object) -> str:
    """A value in few words: what kind it is, and the shapes of its tensors."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, tuple | list | Mapping):
        items: Any = value.values() if isinstance(value, Mapping) else value
        return f"a {type(value).__name__} of ({', '.join(map(_shown, items))})"
    return type(value).__name__


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


