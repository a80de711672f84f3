"""What a worker hands to one that returns."""

import pytest
import torch
from torch import nn

from slipstream.runtime.torch_pipelining.state import (
    pack_state,
    require_all_parameters,
    unpack_state,
)


def make_stepped(module, **options):
    """Make an optimizer that has stepped once."""
    optimizer = torch.optim.AdamW(module.parameters(), **options)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_parameters_that_are_not_contiguous_are_handed_over():
    module, other = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    module.weight = nn.Parameter(torch.randn(3, 2).t())
    optimizer, target = make_stepped(module), torch.optim.AdamW(other.parameters())
    unpack_state(pack_state(module, optimizer), other, target)
    assert torch.equal(module.weight, other.weight)
    assert torch.equal(
        optimizer.state[module.weight]["exp_avg"], target.state[other.weight]["exp_avg"]
    )


@pytest.mark.parametrize(("option", "device"), [("fused", "meta"), ("foreach", "cpu")])
def test_fused_optimizers_count_steps_on_the_device_of_the_parameter(option, device):
    module, other = nn.Linear(3, 2), nn.Linear(3, 2, device="meta")
    target = torch.optim.AdamW(other.parameters())
    unpack_state(pack_state(module, make_stepped(module, **{option: True})), other, target)
    assert target.state[other.weight]["step"].device.type == device
    assert target.state[other.weight]["exp_avg"].device.type == "meta"


def test_an_optimizer_with_parameters_of_other_modules_is_refused():
    stages = [nn.Linear(3, 2), nn.Linear(2, 1)]
    optimizer = torch.optim.AdamW(
        [parameter for stage in stages for parameter in stage.parameters()]
    )
    require_all_parameters(stages, optimizer)
    with pytest.raises(
        ValueError,
        match=r"has 2 parameters that are not the modules', the first of shape \(1, 2\); ",
    ):
        require_all_parameters(stages[:1], optimizer)
