"""A small model whose experts are chosen with a bias.

A rule of each layer steps it by the tokens the experts were given.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.runtime.api import ModelConfig, derive_seed, leave_gradient, seeded

EXPERTS = 3
RATE = 0.02


def level(bias: Tensor, tokens: Tensor) -> None:
    """Raise the bias of experts with few tokens, and lower that of others.

    Few are less than the mean.
    """
    change = RATE * torch.sign(tokens.mean() - tokens)
    bias.add_(change - change.mean())


class Block(nn.Module):
    """One expert for each token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.width, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(EXPERTS))
        self.bias = nn.Parameter(torch.zeros(EXPERTS, dtype=torch.float32))
        self.dropout = nn.Dropout(config.dropout)
        self.step_rules = {"bias": level}
        self.counts: list[Tensor] = []
        """Of each forward, for `tests.runtime.test_step_rules`."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        chosen = functional.one_hot((scores.detach() + self.bias.detach()).argmax(-1), EXPERTS)
        self.counts.append(chosen.sum((0, 1)))
        weights = scores * chosen
        found = sum(
            weights[..., [index]] * expert(x).tanh() for index, expert in enumerate(self.experts)
        )
        return leave_gradient(x + self.dropout(found), self.bias, self.counts[-1])


class Model:
    def __init__(
        self, config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.seed, self.dtype, self.device, self.layers = (
            config,
            seed,
            dtype,
            device,
            config.blocks + 2,
        )

    def build(self, layer: int) -> nn.Module:
        width, words = self.config.width, self.config.vocabulary
        with seeded(derive_seed("parameters", self.seed, layer)):
            if layer == 0:
                module = nn.Embedding(words, width)
            elif layer < self.layers - 1:
                module = Block(self.config)
            else:
                module = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, words))
            for name, parameter in module.named_parameters():
                if name != "bias":
                    parameter.data = parameter.data.to(self.dtype)
        return module

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())
