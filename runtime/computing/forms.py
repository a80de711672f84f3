"""Find the forms of values between layers, and check that a model keeps its contract.

Forms (shapes and dtypes) are found without memory. docs/own-model.md states the contract. A model
that breaks it is refused before any worker is started, in one line that names the layer, what it
returned and what was expected.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.data.data import batch_form
from slipstream.runtime.errors import first_line
from slipstream.runtime.models.calling import Batch, adapt_loss, has_batch_parameter
from slipstream.runtime.models.compiling import require_compilable
from slipstream.runtime.models.distributed_tensors import build_dtensors, with_local_parameters
from slipstream.runtime.models.layered_model import LayeredModel, autocast_context
from slipstream.runtime.models.recomputing import collecting_parts, parse_recompute
from slipstream.runtime.models.sharing import sharing_of
from slipstream.runtime.ranks.shards import shards_of
from slipstream.runtime.replay.layer_values import (
    Form,
    Value,
    allocate_value,
    as_layer_input,
    form_of,
    has_gradient,
    tensors_of,
)
from slipstream.runtime.torch_private import (
    DATA_DEPENDENT,
    FakeTensorMode,
    unset_fake_temporarily,
    without_gpu_context,
)


def find_forms(model: LayeredModel, config: RunConfig) -> list[Form]:
    """Return the forms of each layer's input, and then of the last layer's output.

    A form is shapes and dtypes. Raises ConfigError if the runtime cannot run the model as `config`
    says. Errors of the user's data, from which a micro-batch is read, are passed on.
    """
    # What needs no run of a layer is checked first.
    form_of_batch = batch_form(config)
    recompute = parse_recompute(config.training, model.layers)
    modules = [_build_on_meta(model, layer, config) for layer in range(model.layers)]
    _check_shared(model, modules, config)
    _check_shards(modules, config)
    if config.training.compile:
        require_compilable(config, model.device)
    with (
        without_gpu_context(),
        FakeTensorMode(),
        model.device,
        torch.no_grad(),
        autocast_context(config.training, model.device),
    ):
        # From the tokens on, each layer takes what the layer before gave.
        batch = allocate_value(form_of_batch, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
        assert isinstance(batch, tuple)
        value: Value = batch[0]
        forms = [form_of(value)]
        with collecting_parts() as parts:
            for layer, module in enumerate(modules):
                value = _run_layer(layer, module, value, batch, config)
                forms.append(form_of(value))
        for name in sorted(recompute.parts - parts):
            raise ConfigError(
                f"training.recompute names {name!r}, but no layer has that part "
                "(runtime.api.recomputable); expected layers' numbers, or 'full'"
            )
        _check_loss(model, value, batch, config)
    return forms


def _build_on_meta(model: LayeredModel, layer: int, config: RunConfig) -> nn.Module:
    """Build a layer, a module, on the meta device; raise ConfigError if that fails."""
    # On the meta device, since FakeTensorMode refuses `module.to(dtype)` for its parameters.
    try:
        with torch.device("meta"):
            module = model.build(layer)
        if isinstance(module, nn.Module):
            module = with_local_parameters(module)
    except Exception as error:  # the user's code may raise anything
        raise _model_error(
            config, f"layer {layer} cannot be built: {_describe_error(error)}"
        ) from error
    if not isinstance(module, nn.Module):
        raise _model_error(
            config, f"layer {layer} is {_describe(module)}; expected a torch.nn.Module"
        )
    return module


def _check_shared(model: LayeredModel, modules: Sequence[nn.Module], config: RunConfig) -> None:
    for group in sharing_of(model).groups:
        try:
            first, *others = [modules[place.layer].get_parameter(place.name) for place in group]
        except AttributeError as error:
            raise _model_error(
                config, f"layers share {', '.join(map(str, group))}, but {first_line(error)}"
            ) from None
        # Shared parameters are one tensor, so they must be alike.
        for place, other in zip(group[1:], others, strict=True):
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                raise _model_error(
                    config,
                    f"{place} is {_describe(other)}; expected {_describe(first)}, as {group[0]}, "
                    "with which it is shared",
                )


def _check_shards(modules: Sequence[nn.Module], config: RunConfig) -> None:
    ranks = config.training.tensor_parallel
    if ranks == 1:
        return
    if not any(map(shards_of, modules)):
        raise ConfigError(
            f"training.tensor_parallel is {ranks}, and no layer of the model has `shards`: all "
            "ranks would do the same; expected 1"
        )
    # A wrong name would leave a parameter whole without a word.
    for layer, module in enumerate(modules):
        names = dict(module.named_parameters())
        for name in shards_of(module).keys() - names:
            raise _model_error(
                config,
                f"layer {layer} has shards of {name!r}; expected the name of one of its parameters",
            )


def _run_layer(
    layer: int, module: nn.Module, value: Value, batch: Batch, config: RunConfig
) -> Value:
    name = f"layer {layer} ({type(module).__name__})"
    more = {"batch": batch} if has_batch_parameter(module.forward) else {}
    with unset_fake_temporarily():
        tensors = dict(chain(module.named_parameters(), module.named_buffers()))
    # A forward may ask for gradients of parameters.
    state = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
        for name, tensor in tensors.items()
    }
    # Parameters are replaced by fake tensors, so that nothing takes memory.
    try:
        output = functional_call(module, {**state, **build_dtensors(module, state)}, (value,), more)
    except DATA_DEPENDENT as error:
        raise _model_error(
            config,
            f"{name} has shapes that depend on its data ({first_line(error)}); expected shapes "
            "that are the same for all micro-batches",
        ) from error
    except Exception as error:
        raise _model_error(
            config, f"{name} fails on {_describe(value)}: {_describe_error(error)}"
        ) from error
    # The output is a tensor or tuple, with at least one tensor for which there is a gradient.
    if not isinstance(output, Tensor) and not (
        isinstance(output, tuple)
        and output
        and all(isinstance(element, Tensor) for element in output)
    ):
        raise _model_error(
            config, f"{name} gives {_describe(output)}; expected a tensor, or a tuple of tensors"
        )
    if not any(map(has_gradient, tensors_of(output))):
        raise _model_error(
            config,
            f"{name} gives {_describe(output)}; expected a tensor of floating "
            "point, or a tuple with one",
        )
    return output if isinstance(output, Tensor) else as_layer_input(output)


def _check_loss(model: LayeredModel, output: Value, batch: Batch, config: RunConfig) -> None:
    try:
        loss: object = adapt_loss(model.loss)(output, batch[1], batch)
    except DATA_DEPENDENT:  # only the loss itself is needed, not the shapes within it
        return
    except Exception as error:
        raise _model_error(
            config,
            f"loss fails on {_describe(output)} and {_describe(batch[1])}: "
            f"{_describe_error(error)}",
        ) from error
    if not isinstance(loss, Tensor) or loss.dim():
        raise _model_error(
            config,
            f"loss gives {_describe(loss)}; expected a tensor of no dimensions, a micro-batch's "
            "mean",
        )


def _model_error(config: RunConfig, what: str) -> ConfigError:
    model = config.model
    values = {
        "hugging_face": model.hugging_face,
        "torchtitan": model.torchtitan,
        "name": model.name,
    }
    key = next(key for key, name in values.items() if name is not None)
    return ConfigError(f"model.{key} is {str(values[key])!r}: {what}")


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, tuple | list | Mapping):
        items: Any = value.values() if isinstance(value, Mapping) else value
        return f"a {type(value).__name__} of ({', '.join(map(_describe, items))})"
    return type(value).__name__


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
