"""A small model whose layers do all that layers may.

Its data are packed sequences with positions of their own.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.runtime.api import (
    Microbatch,
    ModelConfig,
    RunConfig,
    add_to_loss,
    derive_seed,
    seeded,
)

EXPERTS = 3


class Packed(NamedTuple):
    """Sequences of one micro-batch, packed end to end: B rows of T tokens."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    """[B, T]: counted anew in each sequence."""


class Data:
    digest = "packed, version 1"

    def __init__(self, config: RunConfig) -> None:
        self.seed, self.vocabulary = config.training.seed, config.model.vocabulary

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> Packed:
        generator = torch.Generator().manual_seed(derive_seed("packed", self.seed, *microbatch))
        row = torch.randint(self.vocabulary, (batch, context + 1), generator=generator)
        begins = torch.rand((batch, context), generator=generator) < 0.3
        begins[:, 0] = True
        places = torch.arange(context).expand(batch, -1)
        return Packed(row[:, :-1], row[:, 1:], places - places.where(begins, 0).cummax(1).values)


class Passed(NamedTuple):
    """What goes from layer to layer."""

    x: Tensor
    chosen: Tensor
    """int64 [E]: tokens by expert, over the layers so far."""
    wanted: Tensor
    """[E]: the sum of their probabilities."""


class Embedding(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)

    def forward(self, tokens: Tensor, batch: Packed) -> Passed:
        x = self.tokens(tokens) + self.positions(batch.positions)
        return Passed(x, torch.zeros(EXPERTS, dtype=torch.int64), x.new_zeros(EXPERTS))


class Block(nn.Module):
    """Attention within each sequence, then experts; the routers' losses are added here."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.router = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, given: Passed, batch: Packed) -> Passed:
        sequence = (batch.positions == 0).cumsum(1)
        q, k, v = self.qkv(self.norm(given.x)).chunk(3, -1)
        causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        x = given.x + self.dropout(
            functional.scaled_dot_product_attention(
                q, k, v, attn_mask=causal & (sequence[:, :, None] == sequence[:, None, :])
            )
        )
        probabilities = self.router(x).softmax(-1)
        add_to_loss(0.01 * probabilities.square().mean())
        x = x + sum(
            probabilities[..., [index]] * expert(x) for index, expert in enumerate(self.experts)
        )
        best = functional.one_hot(probabilities.argmax(-1), EXPERTS).sum((0, 1))
        return Passed(x, given.chosen + best, given.wanted + probabilities.sum((0, 1)))


class Head(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, given: Passed) -> tuple[Tensor, Tensor]:
        balance = (given.chosen * given.wanted).sum() / given.chosen.sum() ** 2
        return self.logits(self.norm(given.x)), balance


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
        self.shared = (("0.tokens.weight", f"{self.layers - 1}.logits.weight"),)

    def build(self, layer: int) -> nn.Module:
        kind = Head if layer == self.layers - 1 else Block
        if layer == 0:
            kind = Embedding
        with seeded(derive_seed("parameters", self.seed, layer)):
            return kind(self.config).to(self.dtype)

    def loss(self, output: tuple[Tensor, Tensor], target: Tensor, batch: Packed) -> Tensor:
        logits, balance = output
        first = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        return first[batch.positions.flatten() > 0].mean() + 0.1 * balance
