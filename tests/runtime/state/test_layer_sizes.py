"""How much an optimizer remembers: what planner and runtime say of it, each for itself, is what optimizers keep."""

import pytest
import torch
from torch import nn

from slipstream.runtime.config import parse_run_config
from slipstream.runtime.state import layer_sizes
from slipstream.runtime.state.held_layers import HeldLayers

SIZE = 6


def of_ones_own(groups, config):
    """An optimizer like AdamW."""
    return torch.optim.Adam(groups, lr=config.learning_rate)


@pytest.mark.parametrize("training", [
    {}, {"amsgrad": True}, {"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.9},
    {"optimizer": "muon", "parameter_groups": [{"parameters": "*", "optimizer": "muon"}]},
    {"optimizer": f"{__name__}:of_ones_own"}], ids=str)
def test_it_is_known_what_an_optimizer_remembers(training):
    """Of each element; a counter of steps is one number a tensor."""
    config = parse_run_config({}, {"learning_rate": 0.1, "device": "cpu", **training}).training
    layer = nn.Linear(SIZE, 1, bias=False)
    holding = HeldLayers({0: layer}, config)
    holding.optimizer.step(0)
    (part,) = holding.optimizer.own_states(0)
    kept = [tensor for key, tensor in part.tensors.items() if key.startswith("optimizer.")]
    assert layer_sizes.slots_per_element(config, by_muon=config.optimizer == "muon") == sum(
        tensor.numel() for tensor in kept if tensor.numel() == SIZE) / SIZE
