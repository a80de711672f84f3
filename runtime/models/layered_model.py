"""Define models as lists of layers, each of which any worker can build."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.runtime.config import ConfigError, ModelConfig, TrainingConfig
from slipstream.runtime.errors import first_line
from slipstream.runtime.models.gpt import build_gpt
from slipstream.runtime.object_reference import is_reference, load_reference
from slipstream.runtime.seeds import derive_seed, seeded


class LayeredModel(Protocol):
    """Interface of a model: layer 0 takes tokens, `loss` the last layer's output.

    A layer's forward takes the output of the layer before, a tensor or a tuple of tensors, and the
    micro-batch's data as `batch` if it has such a parameter. docs/own-model.md states the whole
    contract.
    """

    @property
    def layers(self) -> int:
        """Number of the model's layers."""

    @property
    def device(self) -> torch.device:
        """Device on which layers run."""

    # If layers share parameters, the model also has `shared: Sequence[Sequence[str]]`, groups of
    # parameters of different layers that are one, each as "LAYER.NAME" (`runtime.models.sharing`).

    def build(self, layer: int) -> nn.Module:
        """Build one layer, whose parameters depend on the seed and `layer` alone.

        The global random state is unchanged. The layer is built on torch's default device, so that
        its numbers do not depend on `device`; the caller moves the layer there. Any worker may
        build any layer, at any time and in any order.
        """

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the mean loss of a micro-batch, a scalar, from output and targets [B, T].

        The function may have a third parameter `batch`, as a forward may.
        """


ModelFactory = Callable[[ModelConfig, int, torch.dtype, torch.device], LayeredModel]
MODELS: dict[str, ModelFactory] = {"gpt": build_gpt}
"""Factories of models by `[model] name`; a user's own is named `module:function` there."""


def build_model(
    config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device
) -> LayeredModel:
    """Build the model that a configuration names, with layers on `device`.

    Raises ConfigError if the name is unknown, or if the model cannot be built.
    """
    # Imported where needed: transformers and torchtitan may not be installed.
    if config.hugging_face is not None:
        return _build_hugging_face(config, seed, dtype, device)
    if config.torchtitan is not None:
        from slipstream.runtime.models.torchtitan.model import TorchtitanModel

        return TorchtitanModel(config, seed, dtype, device)
    if config.name in MODELS:
        return MODELS[config.name](config, seed, dtype, device)
    # Any other name is a user's own function.
    if not is_reference(config.name):
        raise ConfigError(
            f"model.name is {config.name!r}; expected one of {', '.join(map(repr, MODELS))}, or "
            "'module:function'"
        )
    factory: ModelFactory = load_reference("model.name", config.name)
    try:
        return _check_model(config.name, factory(config, seed, dtype, device))
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"model.name is {config.name!r}, which fails: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error


def _build_hugging_face(
    config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device
) -> LayeredModel:
    try:
        from slipstream.runtime.models.hugging_face.model import HuggingFaceModel
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.hugging_face needs the package {error.name}: pip install -e '.[hf]'"
        ) from None
    return HuggingFaceModel(config, seed, dtype, device)


def _check_model(name: str, model: LayeredModel) -> LayeredModel:
    # What each attribute must be, and how to say so.
    wanted: dict[str, tuple[Callable[[Any], bool], str]] = {
        "layers": (lambda value: isinstance(value, int) and value > 0, "a number above 0"),
        "device": (
            lambda value: isinstance(value, torch.device),
            "the torch.device that it was given",
        ),
        "build": (callable, "a function of a layer's number"),
        "loss": (callable, "a function of the last layer's output and the target"),
    }
    for attribute, (fits, expected) in wanted.items():
        value = getattr(model, attribute, None)
        if not fits(value):
            problem = f"it has no {attribute}"
            if hasattr(model, attribute):
                problem = f"its {attribute} is {value!r}"
            raise ConfigError(f"model.name is {name!r}: {problem}; expected {expected}")
    return model


def parameter_dtype(config: TrainingConfig) -> torch.dtype:
    """Return the dtype in which layers hold their parameters."""
    # bf16 autocast casts float32 parameters.
    if config.master_weights:
        return torch.bfloat16
    return torch.float64 if config.dtype == "float64" else torch.float32


def autocast_context(
    config: TrainingConfig, device: torch.device
) -> AbstractContextManager[object]:
    """Return a forward's context: autocast for "bf16" without master weights, else no change."""
    is_cast = config.dtype == "bf16" and not config.master_weights
    return torch.autocast(device.type, torch.bfloat16) if is_cast else nullcontext()


def layer_seed(seed: int, iteration: int, pipeline: int, microbatch: int, layer: int) -> int:
    """Return the seed of a layer's forward of one micro-batch, the same on any worker."""
    return derive_seed("layer", seed, iteration, pipeline, microbatch, layer)


def seeded_for_layer(
    seed: int, iteration: int, pipeline: int, microbatch: int, layer: int, device: torch.device
) -> AbstractContextManager[None]:
    """Return a context for a layer's forward, which seeds torch's generators by `layer_seed`."""
    return seeded(layer_seed(seed, iteration, pipeline, microbatch, layer), device)
