"""A model whose layers torch's parallelize_module cuts over the ranks of a worker."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from slipstream.runtime.api import derive_seed, seeded, worker_group


class Block(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up, self.down = (
            nn.Linear(width, 2 * width, dtype=dtype),
            nn.Linear(2 * width, width, dtype=dtype),
        )

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Parallelized:
    """Embedding, blocks and head; of the blocks each rank has a part."""

    def __init__(self, config, seed, dtype, device):
        self.config, self.seed, self.dtype, self.device = config, seed, dtype, device
        self.layers = config.blocks + 2

    def build(self, layer):
        config = self.config
        with seeded(derive_seed("parameters", self.seed, layer)):
            if layer == 0:
                return nn.Embedding(config.vocabulary, config.width, dtype=self.dtype)
            if layer == self.layers - 1:
                return nn.Linear(config.width, config.vocabulary, dtype=self.dtype)
            return self.cut(Block(config.width, self.dtype))

    def cut(self, block):
        if worker_group() is None:
            return block
        return parallelize_module(
            block,
            init_device_mesh(self.device.type, (worker_group().size(),)),
            {"up": ColwiseParallel(), "down": RowwiseParallel()},
            src_data_rank=None,
        )

    def loss(self, output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Whole(Parallelized):
    """Each rank has all of it."""

    def cut(self, block):
        return block
