"""A model of four small layers that waits in each forward.

A run takes no processor time from what starts beside it.
"""

import time

import torch
from torch import nn

from slipstream.runtime.api import ModelConfig, derive_seed, seeded

SECONDS = 0.01


class Paced(nn.Linear):
    def forward(self, x):
        time.sleep(SECONDS)
        return super().forward(x)


class Model:
    """Embedding, two layers that wait, head."""

    layers = 4

    def __init__(
        self, config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.seed, self.dtype, self.device = config, seed, dtype, device

    def build(self, layer: int) -> nn.Module:
        width, words = self.config.width, self.config.vocabulary
        with seeded(derive_seed("parameters", self.seed, layer)):
            make_layer = {
                0: lambda: nn.Embedding(words, width),
                3: lambda: nn.Linear(width, words),
            }.get(layer, lambda: Paced(width, width))()
        return make_layer.to(self.dtype)

    def loss(self, logits, tokens):
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def job(iterations: int, seed: int = 0) -> str:
    """Of two pipelines of two stages."""
    return f"""
        pipelines = 2
        stages = 2
        microbatches = 2
        [time]
        forward = {SECONDS}
        backward_input = {SECONDS / 5}
        backward_weight = {SECONDS / 5}
        [model]
        name = "tests.launchers.paced_model:Model"
        width = 16
        context = 16
        [training]
        batch = 1
        dtype = "float64"
        device = "cpu"
        iterations = {iterations}
        seed = {seed}
        """
