"""The optimizer of one stage. Elementwise, so that it matters to no parameter which stage it lies in."""

from collections.abc import Iterable

import torch
from torch import nn

from runtime.config import TrainingConfig


def build_optimizer(parameters: Iterable[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over these parameters; only matrices decay, vectors (norms, biases) do not.

    Every stage has its own, stepped right after its gradients are summed, whatever the other stages do.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon)
