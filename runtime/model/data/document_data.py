"""Tokens in which documents follow each other: samples that hold several, told apart by the token that ends each."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.runtime.config import ConfigError
from slipstream.runtime.model.data.token_data import BadTokenError, TokenData
from slipstream.runtime.model.layers.cross_entropy import IGNORED
from slipstream.runtime.model.microbatch import Microbatch


class Packed(NamedTuple):
    """A micro-batch of samples that hold documents: three int64 [B, T] on the CPU."""

    tokens: Tensor
    targets: Tensor
    """The token that follows; `IGNORED` where that is another document's."""
    position_ids: Tensor
    """From 0 in each document."""


class DocumentData(TokenData):
    """`TokenData` whose samples hold documents.

    Samples lie as without documents. One that passes the end of a sample is cut there, as Megatron-LM
    (--reset-attention-mask) and torchtitan cut it; what follows is a document of its own.

    Parameters
    ----------
    document_end
        The token that ends each.
    batch
        Samples of a micro-batch.
    """

    def __init__(self, source: str, tokens: NDArray[Any], *, document_end: int, batch: int, vocabulary: int,
                 context: int, **given: Any) -> None:
        super().__init__(source, tokens, vocabulary=vocabulary, context=context, **given)
        if document_end >= vocabulary:
            raise ConfigError(f"training.document_end is {document_end}; expected 0 to {vocabulary - 1}, as the "
                              f"model's vocabulary is {vocabulary}")
        self._end, self._batch, self._context = document_end, batch, context

    @property
    def digest(self) -> str:
        """Of the tokens, and of what ends documents."""
        return f"{super().digest} {self._end}"

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> Packed:
        """Raises BadTokenError, also where no target is left."""
        tokens, targets = super().batch(microbatch, batch, context)
        ended = tokens == self._end
        if ended.all():
            raise BadTokenError(f"{self._source}: a micro-batch has nothing but token {self._end}, which ends "
                                "documents (training.document_end)")
        places = torch.arange(context).expand(batch, context)
        begins = torch.zeros_like(tokens)
        begins[:, 1:] = places[:, 1:].where(ended[:, :-1], 0)
        return Packed(tokens, targets.masked_fill(ended, IGNORED), places - begins.cummax(1).values)

    def lengths(self, iteration: int) -> list[list[int]]:
        """Of the documents of each micro-batch of an iteration, in tokens."""
        found = []
        for ended in self._ended(iteration):
            ended[:, -1] = True  # a sample cuts what it does not end
            found.append(np.diff(np.flatnonzero(ended), prepend=-1).tolist())
        return found

    def tokens(self, iteration: int) -> list[int]:
        """How many targets each micro-batch of an iteration has."""
        return [int(ended.size - ended.sum()) for ended in self._ended(iteration)]

    def _ended(self, iteration: int) -> NDArray[np.bool_]:
        """[micro-batches, B, T]: which tokens end a document."""
        count = self._first[-1] * self._batch
        first = self._read.before(iteration, count)
        rows = self._rows(range(first, first + count), self._context)
        ended: NDArray[np.bool_] = (rows[:, :-1] == self._end).reshape(-1, self._batch, self._context)
        return ended
