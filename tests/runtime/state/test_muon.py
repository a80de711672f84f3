"""Muon beside torch's.

In bfloat16 the bits are the same; in float32, and of stacks of matrices, results are what that must
come to.
"""

import pytest
import torch
from torch import nn

from slipstream.runtime.config import ConfigError, MuonConfig, TrainingConfig, parse_run_config
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.models.sharing import LayerParameter, Sharing
from slipstream.runtime.state.layer_sizes import estimate_layer_bytes
from slipstream.runtime.state.parameter_groups import is_stepped_by_muon
from slipstream.runtime.state.undoable_steps import OptimizerSteps, optimizer_factory, orthogonalize

SHAPES = [(6, 4), (4, 6), (5, 5), (1, 7)]


def stepped(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer, steps: int = 3
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()
    return parameter.detach()


def ours(parameter: nn.Parameter, config: TrainingConfig) -> torch.Tensor:
    groups = [
        {"params": []},
        {
            "params": [parameter],
            "muon": True,
            "momentum": config.muon.momentum,
            "weight_decay": config.weight_decay,
        },
    ]
    return stepped(parameter, optimizer_factory(config)(groups, config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.8},
        {"adjust": "match_rms_adamw"},
        {"steps": 2, "coefficients": (2.0, -1.5, 0.5)},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_torchs_to_the_bit(shape, options, dtype) -> None:
    config = TrainingConfig(
        optimizer="muon", learning_rate=0.05, weight_decay=0.2, muon=MuonConfig(**options)
    )
    first = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    theirs = nn.Parameter(first.clone())
    names = {"adjust": "adjust_lr_fn", "steps": "ns_steps", "coefficients": "ns_coefficients"}
    judge = torch.optim.Muon(
        [theirs],
        lr=0.05,
        weight_decay=0.2,
        **{names.get(name, name): value for name, value in options.items()},
    )
    assert torch.equal(ours(nn.Parameter(first.clone()), config), stepped(theirs, judge))


def test_each_matrix_of_a_stack_is_stepped_by_itself() -> None:
    # Torch would step it so; a product of many matrices may round otherwise than one of two.
    config = TrainingConfig(optimizer="muon", learning_rate=0.05, muon=MuonConfig(dtype="float32"))
    stack = torch.randn((3, 6, 4), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    together = orthogonalize(stack, config.muon)
    assert together.shape == stack.shape
    for matrix, alone in zip(together, stack, strict=True):
        torch.testing.assert_close(matrix, orthogonalize(alone, config.muon), rtol=0, atol=1e-5)
        singular = torch.linalg.svdvals(matrix)
        assert singular.min() > 0.5 and singular.max() < 1.5


def test_float32_is_closer_to_what_the_polynomial_gives() -> None:
    """As computed in float64, with the same coefficients."""
    matrix = torch.randn((6, 9), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options = MuonConfig()
    a, b, c = options.coefficients
    x = matrix / matrix.norm()
    for _ in range(options.steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    off = {
        dtype: (orthogonalize(matrix, MuonConfig(dtype=dtype)).double() - x).abs().max().item()
        for dtype in ("float32", "bf16")
    }
    assert off["float32"] < 1e-5 < 1e-3 < off["bf16"]


def test_what_it_steps() -> None:
    """Matrices of all but the first and the last layer, and what a pattern says."""
    config = parse_run_config(
        {},
        {
            "optimizer": "muon",
            "parameter_groups": [
                {"parameters": "1.gate", "optimizer": "adamw"},
                {"parameters": "0.patches", "optimizer": "muon"},
                {"parameters": "*.bias", "learning_rate": 0.5},
            ],
        },
    ).training
    matrix, vector, stack, by_channel = (
        nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,), (2, 2, 2), (2, 1, 2))
    )
    found = [
        name
        for name, parameter in {
            "0.tokens": matrix,
            "0.patches": matrix,
            "1.up": matrix,
            "1.gate": matrix,
            "1.experts": stack,
            "1.norm": vector,
            "1.convolution": by_channel,
            "1.bias": vector,
            "2.logits": matrix,
        }.items()
        if is_stepped_by_muon(name, parameter, config, 2)
    ]
    assert found == ["0.patches", "1.up", "1.experts"]
    with pytest.raises(
        ConfigError,
        match=r"groups\[1\].optimizer is 'muon', and 0.patches has 1 dim.*; expected matr",
    ):
        is_stepped_by_muon("0.patches", vector, config, 2)


def test_a_tied_head_is_an_embedding() -> None:
    sharing = Sharing(((LayerParameter(0, "weight"), LayerParameter(2, "weight")),), 2)
    assert not is_stepped_by_muon(
        str(sharing.first_of_group(2, "weight")),
        nn.Parameter(torch.zeros(2, 2)),
        TrainingConfig(optimizer="muon"),
        sharing.last,
    )


def test_a_learning_rate_of_its_own_follows_the_schedule() -> None:
    config = parse_run_config(
        {},
        {
            "optimizer": "muon",
            "learning_rate": 0.1,
            "muon": {"learning_rate": 0.4},
            "learning_rate_schedule": "linear",
            "iterations": 4,
        },
    ).training
    steps = OptimizerSteps(
        [
            {"params": []},
            {"params": [nn.Parameter(torch.zeros(2, 2))], "muon": True, "lr": 0.4, "momentum": 0.9},
        ],
        config,
    )
    steps._set_rates(2)
    assert [group["lr"] for group in steps._optimizer.param_groups] == pytest.approx([0.05, 0.2])


def test_what_would_cut_matrices_is_refused() -> None:
    for more, message in (
        ({"shard_optimizer": True}, "shard_optimizer true, which cuts them; expected false"),
        ({"tensor_parallel": 2}, "tensor_parallel 2, which cuts them; expected 1"),
    ):
        with pytest.raises(
            ConfigError,
            match=f"is 'muon', which needs whole parameters, and training.{message}, or",
        ):
            optimizer_factory(TrainingConfig(optimizer="muon", **more))
    for more in (
        {"muon": {"steps": 3}},
        {"parameter_groups": [{"parameters": "*", "optimizer": "adamw"}]},
    ):
        with pytest.raises(
            ConfigError,
            match="optimizer is 'adamw', and options of Muon are given; expected 'muon'",
        ):
            parse_run_config({}, more)


def test_a_layer_that_muon_steps_is_smaller_to_move() -> None:
    """By one of AdamW's two numbers of each element of a matrix."""
    model = {"blocks": 1, "width": 8, "heads": 2, "context": 8}
    sizes = [
        estimate_layer_bytes(
            build_model(config.model, 0, torch.float32, torch.device("cpu")), config.training
        )
        for name in ("adamw", "muon")
        for config in [parse_run_config(model, {"optimizer": name})]
    ]
    (embedding, block, head), (same_embedding, smaller, same_head) = sizes
    matrices = 8 * 8 * (3 + 1 + 4 + 4)
    assert (embedding, block - 4 * matrices, head) == (same_embedding, smaller, same_head)
