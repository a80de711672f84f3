import pytest
import torch
from torch import nn

from runtime.config import TrainingConfig
from runtime.optimizer import build_optimizer


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1), False)]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_only_matrices_decay(name: str) -> None:
    matrix, vector, frozen = parameters()
    optimizer = build_optimizer([matrix, vector, frozen],
                                TrainingConfig(optimizer=name, learning_rate=0.1, weight_decay=0.5))
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    assert torch.equal(vector, torch.ones(2)) and torch.equal(frozen, torch.ones(1))


def test_configuration_reaches_the_optimizer() -> None:
    config = TrainingConfig(learning_rate=0.3, betas=(0.5, 0.6), epsilon=1e-3)
    adamw = build_optimizer(parameters(), config)
    assert isinstance(adamw, torch.optim.AdamW)
    assert (adamw.defaults["lr"], adamw.defaults["betas"], adamw.defaults["eps"]) == (0.3, (0.5, 0.6), 1e-3)
    sgd = build_optimizer(parameters(), TrainingConfig(optimizer="sgd", momentum=0.7))
    assert isinstance(sgd, torch.optim.SGD) and sgd.defaults["momentum"] == 0.7


def test_a_stage_without_vectors_or_without_parameters() -> None:
    build_optimizer(parameters()[:1], TrainingConfig()).step()
    build_optimizer([], TrainingConfig()).step()
