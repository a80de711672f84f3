"""Data and a model that do not keep the contract.

What they give depends on what was drawn before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.runtime.api import Microbatch, ModelConfig, RunConfig, derive_seed


class Drawn:
    """Samples from torch's global generator."""

    digest = "drawn"

    def __init__(self, config: RunConfig) -> None:
        self.vocabulary, self.context, self.rows = 256, config.model.context, config.training.batch

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(self.vocabulary, (batch, context + 1))
        return tokens[:, :-1], tokens[:, 1:]


class DrawnInOrder(Drawn):
    """Read iteration by iteration."""

    def samples(self, iteration: int, count: int) -> list[tuple[Tensor, Tensor]]:
        return [
            self.batch(Microbatch(iteration, 0, index), self.rows, self.context)
            for index in range(count)
        ]


class Seeded(Drawn):
    """As they should be."""

    digest = "seeded"

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(derive_seed("data", *microbatch))
        tokens = torch.randint(self.vocabulary, (batch, context + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


class Numbered(Seeded):
    """By the number of the sample in the iteration, on whichever grid."""

    digest = "numbered"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.per_pipeline = config.training.options["per_pipeline"]

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, Tensor]:
        number = microbatch.pipeline * self.per_pipeline + microbatch.index
        return super().batch(Microbatch(microbatch.iteration, 0, number), batch, context)


class Buffered(Seeded):
    """In memory that the next call overwrites."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.buffer = torch.zeros(
            config.training.batch, config.model.context + 1, dtype=torch.int64
        )

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, Tensor]:
        tokens, targets = super().batch(microbatch, batch, context)
        self.buffer[:, :-1], self.buffer[:, -1:] = tokens, targets[:, -1:]
        return self.buffer[:, :-1], self.buffer[:, 1:]


@dataclass
class Unseeded:
    """A model whose second layer is drawn from the global generator."""

    config: ModelConfig
    seed: int
    dtype: torch.dtype
    device: torch.device
    layers = 3

    def build(self, layer: int) -> nn.Module:
        width, words = self.config.width, self.config.vocabulary
        if layer == 1:
            return nn.Linear(width, width, dtype=self.dtype)
        module = nn.Embedding(words, width) if layer == 0 else nn.Linear(width, words)
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.1)
        return module.to(self.dtype)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
