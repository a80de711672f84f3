"""Whether a worker that has lost a rank could go on as half its processes: whether a model's layers allow that."""

from collections.abc import Sequence

from torch import nn

from slipstream.runtime.config import STANDS_FOR, ConfigError, RunConfig
from slipstream.runtime.model.computing.forms import forms
from slipstream.runtime.model.layers.layered_model import LayeredModel, model_for, parameter_dtype
from slipstream.runtime.model.layers.shards import in_parts, shards_of
from slipstream.runtime.model.layers.worker_group import standing_in
from slipstream.runtime.model.passed import Form
from slipstream.runtime.model.ranks.own_ranks import cut_dims
from slipstream.runtime.model.state.holding import without_memory


def require_degradable(model: LayeredModel, config: RunConfig, at_layer: Sequence[Form]) -> None:
    """Raise ConfigError where `[training] degraded_ranks` asks for what the layers do not allow.

    They do where twice as many equal parts of what half the ranks have are what all ranks have: shards, and what passes
    between layers. `model` and `at_layer`, its forms, are those of all ranks; to be called as one of them.
    """
    training = config.training
    if not training.degraded_ranks:
        return
    fewer = training.tensor_parallel // STANDS_FOR
    whole = [without_memory(model, layer) for layer in range(model.layers)]
    for layer, module in enumerate(whole):
        if getattr(module, "placed", None):
            raise ConfigError(f"training.degraded_ranks is true, and layer {layer} is cut by torch's "
                              "parallelize_module; expected layers that have `shards`")
    with standing_in(fewer, stands_for=STANDS_FOR):
        halved = model_for(config.model, training.seed, parameter_dtype(training), model.device)
        passed = forms(halved, config)
        modules = [without_memory(halved, layer) for layer in range(halved.layers)]
    for layer, (module, other) in enumerate(zip(whole, modules, strict=True)):
        try:
            _require_parts(other, module)
            cut_dims(passed[layer + 1], at_layer[layer + 1], STANDS_FOR)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"training.degraded_ranks is true, and what layer {layer} has at {fewer} ranks cannot be "
                              f"cut into what it has at {training.tensor_parallel}: {error}") from None


def _require_parts(whole: nn.Module, part: nn.Module) -> None:
    """Raise ValueError or RuntimeError unless parameters are the equal parts of others that their shards say."""
    shards = shards_of(part)
    if shards != shards_of(whole):
        raise ValueError("the shards are others")
    parameters = dict(part.named_parameters())
    for name, parameter in whole.named_parameters():
        expected = list(parameter.shape)
        if name in shards:
            in_parts(in_parts(parameter, shards[name].dim, shards[name].blocks), shards[name].dim + 1, STANDS_FOR)
            expected[shards[name].dim] //= STANDS_FOR
        if name not in parameters or list(parameters[name].shape) != expected:
            raise ValueError(f"{name} is {list(parameter.shape)} there")
