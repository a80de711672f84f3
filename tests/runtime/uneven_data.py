"""Data whose samples are not alike.

They know what each costs, and how many of its tokens count.
"""

import numpy as np
import torch
from torch import Tensor

from slipstream.runtime.config import RunConfig
from slipstream.runtime.replay.microbatch import Microbatch
from slipstream.runtime.seeds import derive_seed

IGNORED = -100


class Uneven:
    """Samples of random tokens, of which the last ones are ignored.

    A sample's name and iteration say how many.
    """

    digest = "uneven"

    def __init__(self, config: RunConfig) -> None:
        self.seed, self.vocabulary = config.training.seed, config.model.vocabulary
        self.context = config.model.context
        self.microbatches = tuple(config.training.options.get("microbatches", (2, 2)))
        self.wrong = config.training.options.get("wrong")

    def _counted(self, microbatch: Microbatch) -> int:
        return 1 + derive_seed("counted", self.seed, *microbatch) % self.context

    def _names(self, iteration: int) -> list[Microbatch]:
        return [
            Microbatch(iteration, pipeline, index)
            for pipeline, count in enumerate(self.microbatches)
            for index in range(count)
        ]

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(derive_seed("data", self.seed, *microbatch))
        tokens = torch.randint(self.vocabulary, (batch, context + 1), generator=generator)
        target = tokens[:, 1:].clone()
        target[:, self._counted(microbatch) :] = IGNORED
        return tokens[:, :-1], target

    def tokens(self, iteration: int) -> list[int]:
        return [self._counted(name) for name in self._names(iteration)]

    def costs(self, iteration: int) -> np.ndarray:
        if self.wrong == "negative":
            return -np.ones((len(self._names(iteration)), 3))
        if self.wrong == "fewer":
            return np.ones((1, 3))
        work = np.array(self.tokens(iteration), float) ** 2
        return np.repeat(work[:, None] / work.mean(), 3, axis=1)


class UnevenInOrder:
    """The same samples, read iteration by iteration."""

    digest = "uneven, in order"

    def __init__(self, config: RunConfig) -> None:
        self._data, self._batch, self._context = (
            Uneven(config),
            config.training.batch,
            config.model.context,
        )
        self.costs = self._data.costs

    def samples(self, iteration: int, count: int) -> list[tuple[Tensor, Tensor]]:
        return [
            self._data.batch(name, self._batch, self._context)
            for name in self._data._names(iteration)[:count]
        ]

    def lengths(self, iteration: int) -> list[list[int]]:
        return [[count] for count in self._data.tokens(iteration)]

    def tokens(self, sample: tuple[Tensor, Tensor]) -> int:
        return int((sample[1][0] != IGNORED).sum())
