"""Check that a user's own model builds the same layer whenever and wherever it is built."""

from collections.abc import Sequence

import torch

from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.models.distributed_tensors import with_local_parameters
from slipstream.runtime.models.layered_model import LayeredModel
from slipstream.runtime.object_reference import is_reference
from slipstream.runtime.seeds import restoring_generators
from slipstream.runtime.state.checksum import parameter_digest

MAX_ELEMENTS = 2**26
"""Number of elements up to which layers are built, since layers of large models take long to fill.
The smallest layer is always built."""


def require_repeatable_layers(model: LayeredModel, config: RunConfig,
                              elements: Sequence[int]) -> None:
    """Raise ConfigError if a layer of the user's own model is not the same when it is built again.

    The smallest layers are built, twice each, up to `MAX_ELEMENTS` elements together; `elements`
    has the number of each layer. Models of this package and of libraries repeat.
    """
    if config.model.hugging_face is not None or config.model.torchtitan is not None \
            or not is_reference(config.model.name):
        return
    total = 0
    filled = [layer for layer, count in enumerate(elements) if count]
    for layer in sorted(filled, key=lambda layer: elements[layer]):
        total += elements[layer]
        if total - elements[layer] > 0 and total > MAX_ELEMENTS:
            break
        if _digest_layer(model, layer, 1) != _digest_layer(model, layer, 2):
            raise ConfigError(
                f"model.name is {config.model.name!r}: layer {layer} has other initial parameters when it "
                "is built again; expected the same: draw them within `seeded(derive_seed(..., seed, "
                "layer))`")


def _digest_layer(model: LayeredModel, layer: int, state: int) -> str:
    """Build a layer while the global generators are seeded with `state`, and return its digest."""
    with restoring_generators() as seed_generators, torch.no_grad():
        seed_generators(state)
        module = with_local_parameters(model.build(layer))
        return parameter_digest({**dict(module.named_parameters()), **dict(module.named_buffers())})
