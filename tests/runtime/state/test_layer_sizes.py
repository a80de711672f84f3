"""How much an optimizer remembers.

Planner and runtime, each for itself, say what optimizers keep.
"""

import pytest
import torch
from torch import nn

from slipstream.runtime.config import parse_run_config
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.state import layer_sizes
from slipstream.runtime.state.held_layers import HeldLayers, build_holding

SIZE = 6


def of_ones_own(groups, config):
    """An optimizer like AdamW."""
    return torch.optim.Adam(groups, lr=config.learning_rate)


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"amsgrad": True},
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "muon", "parameter_groups": [{"parameters": "*", "optimizer": "muon"}]},
        {"optimizer": f"{__name__}:of_ones_own"},
    ],
    ids=str,
)
def test_it_is_known_what_an_optimizer_remembers(training):
    """Of each element; a counter of steps is one number a tensor."""
    config = parse_run_config({}, {"learning_rate": 0.1, "device": "cpu", **training}).training
    layer = nn.Linear(SIZE, 1, bias=False)
    holding = HeldLayers({0: layer}, config)
    holding.optimizer.step(0)
    (part,) = holding.optimizer.own_states(0)
    kept = [tensor for key, tensor in part.tensors.items() if key.startswith("optimizer.")]
    assert (
        layer_sizes.slots_per_element(config, by_muon=config.optimizer == "muon")
        == sum(tensor.numel() for tensor in kept if tensor.numel() == SIZE) / SIZE
    )


@pytest.mark.parametrize("masters", [False, True], ids=["no-masters", "masters"])
def test_a_layer_is_as_large_as_what_is_sent_of_it(masters):
    """Master weights travel in place of the parameters, which are made of them."""
    options = {"dtype": "bf16", "master_weights": True} if masters else {}
    config = parse_run_config({"blocks": 1, "width": 8, "heads": 2, "context": 8}, options)
    dtype = torch.bfloat16 if masters else torch.float32
    model = build_model(config.model, 0, dtype, torch.device("cpu"))
    holding = build_holding(model, range(model.layers), config.training)
    holding.optimizer.step(0)
    sent = []
    for layer in range(model.layers):
        (part,) = holding.optimizer.own_states(layer)
        # Scalars, such as a counter of steps, are not estimated.
        sent.append(sum(tensor.nbytes for tensor in part.tensors.values() if tensor.ndim))
    assert layer_sizes.estimate_layer_bytes(model, config.training) == sent
