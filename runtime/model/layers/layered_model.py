"""A model as a list of layers: a stage is a range of them, and any worker can build any layer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.runtime.config import ConfigError, ModelConfig, TrainingConfig
from slipstream.runtime.errors import first_line
from slipstream.runtime.model.layers.gpt import gpt
from slipstream.runtime.model.object_reference import is_reference, load_reference
from slipstream.runtime.model.seeds import derive_seed, seeded


class LayeredModel(Protocol):
    """What the runtime asks of a model. Layer 0 takes tokens, the last layer's output goes to `loss`.

    A layer's forward takes what the layer before it gave, a tensor or a tuple of tensors, and, where it has a parameter
    `batch`, what belongs to the micro-batch (`runtime.model.data.data.Data`). docs/own-model.md states the whole
    contract.
    """

    @property
    def layers(self) -> int:
        """How many layers there are."""

    @property
    def device(self) -> torch.device:
        """Where layers run."""

    # Where layers share parameters, it also has
    # shared: Sequence[Sequence[str]]
    #     Groups of parameters that are one, each as "LAYER.NAME", of different layers (`runtime.model.layers.sharing`).

    def build(self, layer: int) -> nn.Module:
        """Make one layer. Its parameters depend on the seed and `layer` alone; the global random state is left alone.

        It is built on torch's default device, so that every device gets the numbers that the CPU draws; the caller
        moves it to `device`. Any worker may build any layer, at any time and in any order.
        """

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """The mean loss of a micro-batch, a scalar, from the last layer's output and the target tokens [B, T].

        It may have a third parameter `batch`, as a layer's forward.
        """


Factory = Callable[[ModelConfig, int, torch.dtype, torch.device], LayeredModel]
MODELS: dict[str, Factory] = {"gpt": gpt}
"""Models by the name that `[model] name` gives; one of the user's own is named `module:function`, a `Factory`."""


def model_for(config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device) -> LayeredModel:
    """The model that a configuration names, its layers on `device`. Raises ConfigError when it cannot be had."""
    if config.hugging_face is not None:
        return _hugging_face(config, seed, dtype, device)
    if config.torchtitan is not None:
        from slipstream.runtime.model.layers.torchtitan.model import Torchtitan

        return Torchtitan(config, seed, dtype, device)
    if config.name in MODELS:
        return MODELS[config.name](config, seed, dtype, device)
    if not is_reference(config.name):
        raise ConfigError(f"model.name is {config.name!r}; expected one of {', '.join(map(repr, MODELS))}, or "
                          "'module:function'")
    factory: Factory = load_reference("model.name", config.name)
    try:
        return _checked(config.name, factory(config, seed, dtype, device))
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"model.name is {config.name!r}, which fails: {type(error).__name__}: {first_line(error)}"
                          ) from error


def _hugging_face(config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device) -> LayeredModel:
    try:
        from slipstream.runtime.model.layers.hugging_face.model import HuggingFace
    except ModuleNotFoundError as error:
        raise ConfigError(f"model.hugging_face needs the package {error.name}: pip install -e '.[hf]'"
                          ) from None
    return HuggingFace(config, seed, dtype, device)


def _checked(name: str, model: LayeredModel) -> LayeredModel:
    """A user's model. Raises ConfigError unless it has what the runtime asks for."""
    wanted: dict[str, tuple[Callable[[Any], bool], str]] = {
        "layers": (lambda found: isinstance(found, int) and found > 0, "a number above 0"),
        "device": (lambda found: isinstance(found, torch.device), "the torch.device that it was given"),
        "build": (callable, "a function of a layer's number"),
        "loss": (callable, "a function of the last layer's output and the target")}
    for attribute, (fits, expected) in wanted.items():
        found = getattr(model, attribute, None)
        if not fits(found):
            shown = f"its {attribute} is {found!r}" if hasattr(model, attribute) else f"it has no {attribute}"
            raise ConfigError(f"model.name is {name!r}: {shown}; expected {expected}")
    return model


def split_layers(layers: int, stages: int) -> list[tuple[int, int]]:
    """Cut layers into half-open ranges, one a stage, whose lengths differ by at most one; the middle gets the extra.

    The first and the last layer of a model (embedding, head) are seldom like the others, so the stages that hold them
    get no extra one. Raises ConfigError when there are more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise ConfigError(f"{layers} layers cannot be cut into {stages} stages; expected 1 to {layers} stages")
    short, extra = divmod(layers, stages)
    first = (stages - extra + 1) // 2
    ranges = []
    start = 0
    for stage in range(stages):
        end = start + short + (first <= stage < first + extra)
        ranges.append((start, end))
        start = end
    return ranges


def parameter_dtype(config: TrainingConfig) -> torch.dtype:
    """The dtype of parameters: bf16 autocast keeps them in float32, master weights are kept by the optimizer."""
    if config.master_weights:
        return torch.bfloat16
    return torch.float64 if config.dtype == "float64" else torch.float32


def autocast(config: TrainingConfig, device: torch.device) -> AbstractContextManager[object]:
    """The arithmetic a forward runs under: bfloat16 autocast for "bf16", else that of the parameters."""
    wanted = config.dtype == "bf16" and not config.master_weights
    return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()


def layer_seed(seed: int, iteration: int, pipeline: int, microbatch: int, layer: int) -> int:
    """What to seed the generators with for one layer's forward of one micro-batch: its dropout is the same on any
    worker."""
    return derive_seed("layer", seed, iteration, pipeline, microbatch, layer)


def layer_randomness(seed: int, iteration: int, pipeline: int, microbatch: int, layer: int,
                     device: torch.device) -> AbstractContextManager[None]:
    """Run one layer's forward of one micro-batch in here."""
    return seeded(layer_seed(seed, iteration, pipeline, microbatch, layer), device)
