"""Data whose samples have other lengths in some micro-batches, or that end."""

import torch

from slipstream.runtime.api import Microbatch, RunConfig


class AtOnce:
    """From micro-batch to micro-batch."""

    digest = "growing"

    def __init__(self, config: RunConfig) -> None:
        self.vocabulary = config.model.vocabulary

    def length(self, microbatch: Microbatch) -> int:
        return 4 + microbatch.index

    def batch(self, microbatch: Microbatch, batch: int, context: int):
        tokens = torch.arange(self.length(microbatch) + 1).expand(batch, -1)
        return tokens[:, :-1], tokens[:, 1:]


class Exhausted(AtOnce):
    """None from iteration 3 on."""

    def length(self, microbatch: Microbatch) -> int:
        if microbatch.iteration >= 3:
            raise StopIteration
        return 4


class Later(AtOnce):
    """From iteration 3 on."""

    def length(self, microbatch: Microbatch) -> int:
        return 8 if microbatch.iteration >= 3 else 4
