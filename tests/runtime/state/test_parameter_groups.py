"""Which options a parameter has, whoever holds it and under whichever of its names."""

import pytest
import torch
from torch import nn

from slipstream.runtime.config import ParameterGroup, TrainingConfig
from slipstream.runtime.models.sharing import LayerParameter, Sharing
from slipstream.runtime.state.held_layers import HeldLayers
from slipstream.runtime.state.parameter_groups import build_groups

TIED = Sharing(((LayerParameter(0, "weight"), LayerParameter(2, "weight")),))
"""An embedding, and the head that is tied to it."""
CONFIG = TrainingConfig(
    weight_decay=0.5,
    parameter_groups=(
        ParameterGroup(parameters="0.*", learning_rate=0.25, weight_decay=0.0),
        ParameterGroup(parameters="?.weight", betas=(0.5, 0.75)),
        ParameterGroup(parameters="*", epsilon=0.125),
    ),
)


def layers() -> dict[int, nn.Module]:
    return {0: nn.Embedding(4, 3), 1: nn.Linear(3, 3), 2: nn.Linear(3, 4)}


def test_the_first_pattern_that_matches_says_what_differs() -> None:
    named = {
        f"{layer}.{name}": parameter
        for layer, module in layers().items()
        for name, parameter in module.named_parameters()
    }
    found = {}
    for group in build_groups(named, CONFIG, 2):
        options = {key: value for key, value in group.items() if key != "params"}
        for name, parameter in named.items():
            if any(parameter is member for member in group["params"]):
                found[name] = options
    assert found == {
        "0.weight": {"lr": 0.25, "weight_decay": 0.0},
        "1.weight": {"weight_decay": 0.5, "betas": (0.5, 0.75)},
        "2.weight": {"weight_decay": 0.5, "betas": (0.5, 0.75)},
        "1.bias": {"weight_decay": 0.0, "eps": 0.125},
        "2.bias": {"weight_decay": 0.0, "eps": 0.125},
    }


@pytest.mark.parametrize("layers_held", [(0, 1, 2), (2,), (0,)])
def test_what_layers_share_has_one_name_and_counts_once(layers_held: tuple[int, ...]) -> None:
    # A head alone steps its copy by the options of the embedding, which may be elsewhere.
    torch.manual_seed(0)
    holding = HeldLayers(
        {layer: module for layer, module in layers().items() if layer in layers_held}, CONFIG, TIED
    )
    before = {
        name: parameter.detach().clone() for name, parameter in holding.parameters_by_name().items()
    }
    for flat in holding.flat_gradients():
        flat.copy_(torch.randn(flat.shape))
    squares = {
        name: parameter.grad.double().square().sum().item()
        for name, parameter in holding.parameters_by_name().items()
    }
    assert holding.sum_squares() == pytest.approx(
        sum(square for name, square in squares.items() if name != "0.weight" or 0 in layers_held),
        rel=1e-6,
    )
    holding.optimizer.step(0)
    moved = (holding.parameters_by_name()["0.weight"] - before["0.weight"]).abs()
    # AdamW's first step is the learning rate.
    torch.testing.assert_close(moved.detach(), torch.full((4, 3), 0.25))
