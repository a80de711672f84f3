"""A model for workers of several ranks that computes in float64.

Its parameters may have any dtype, and numbers hardly depend on how it is cut: products of the
blocks are, embedding and head are not.
"""

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from slipstream.runtime.api import (
    Shard,
    cut_parameters,
    derive_seed,
    for_all_ranks,
    seeded,
    sum_ranks,
    worker_group,
)


class Embedding(nn.Module):
    def __init__(self, config, dtype):
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width, dtype=dtype)

    def forward(self, tokens):
        return functional.embedding(tokens, self.tokens.weight.double())


class Block(nn.Module):
    shards: ClassVar = {"up.weight": Shard(0), "down.weight": Shard(1)}

    def __init__(self, config, dtype):
        super().__init__()
        self.up = nn.Linear(config.width, 2 * config.width, bias=False, dtype=dtype)
        self.down = nn.Linear(2 * config.width, config.width, bias=False, dtype=dtype)

    def forward(self, x):
        group = worker_group()
        (whole,) = for_all_ranks(group, x)
        y = torch.tanh(whole @ self.up.weight.double().T) @ self.down.weight.double().T
        return x + sum_ranks(y, group)


class Head(nn.Module):
    def __init__(self, config, dtype):
        super().__init__()
        self.logits = nn.Linear(config.width, config.vocabulary, bias=False, dtype=dtype)

    def forward(self, x):
        return x @ self.logits.weight.double().T


class Exact:
    def __init__(self, config, seed, dtype, device):
        self.config, self.seed, self.dtype, self.device = config, seed, dtype, device
        self.layers = config.blocks + 2

    def build(self, layer):
        kind = Head if layer == self.layers - 1 else Block
        if layer == 0:
            kind = Embedding
        with seeded(derive_seed("parameters", self.seed, layer)):
            module = kind(self.config, self.dtype)
        if kind is Block and worker_group() is not None:
            cut_parameters(module, Block.shards, worker_group())
        return module

    def loss(self, output, target):
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Tied(Exact):
    """The head is the embedding."""

    def __init__(self, *args):
        super().__init__(*args)
        self.shared = (("0.tokens.weight", f"{self.layers - 1}.logits.weight"),)


class Frozen(Exact):
    """Nothing of its first block is trained."""

    def build(self, layer):
        return super().build(layer).requires_grad_(layer != 1)


class SeldomBlock(Block):
    """A block with a matrix that no micro-batch uses, and one that only some use."""

    shards: ClassVar = {}

    def __init__(self, config, dtype):
        super().__init__(config, dtype)
        self.never = nn.Linear(config.width, config.width, bias=False, dtype=dtype)
        self.seldom = nn.Linear(config.width, config.width, bias=False, dtype=dtype)

    def forward(self, x):
        x = super().forward(x)
        if type(x) is torch.Tensor and x.detach().sum() > 3:  # not while shapes are found
            x = x + torch.tanh(x @ self.seldom.weight.double().T)
        return x


class Seldom(Exact):
    """Not all of it gets a gradient in each iteration."""

    def build(self, layer):
        if layer in (0, self.layers - 1):
            return super().build(layer)
        with seeded(derive_seed("parameters", self.seed, layer)):
            return SeldomBlock(self.config, self.dtype)
