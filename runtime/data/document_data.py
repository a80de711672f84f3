"""Samples that contain several documents, separated by a token that ends each document."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.runtime.config import ConfigError
from slipstream.runtime.data.token_data import TokenData
from slipstream.runtime.models.cross_entropy import IGNORED_TARGET
from slipstream.runtime.replay.microbatch import Microbatch


class PackedBatch(NamedTuple):
    """Micro-batch of B samples of T tokens that contain documents: tokens, targets and positions, each int64 [B, T] on
    the CPU."""

    tokens: Tensor
    targets: Tensor
    """Token that follows each token; `IGNORED_TARGET` if it belongs to the next document."""
    position_ids: Tensor
    """Position of each token in its document, from 0."""


class DocumentData(TokenData):
    """Token data (`TokenData`) whose samples contain documents.

    Samples are cut at the same places as without documents. A document that crosses the end of a sample is split there,
    as in Megatron-LM (--reset-attention-mask) and torchtitan, and its rest counts as a document of its own.

    Parameters
    ----------
    document_end
        Token that ends each document.
    batch
        Number of samples in a micro-batch.
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
        """Digest of the tokens, and of the token that ends documents."""
        return f"{super().digest} {self._end}"

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> PackedBatch:
        """Return a micro-batch of `batch` samples of `context` tokens, with targets, and with positions within
        documents.

        No target counts if every token of the micro-batch ends a document. Raises BadTokenError for a token beyond the
        vocabulary.
        """
        tokens, targets = super().batch(microbatch, batch, context)
        ended = tokens == self._end
        places = torch.arange(context).expand(batch, context)
        begins = torch.zeros_like(tokens)
        begins[:, 1:] = places[:, 1:].where(ended[:, :-1], 0)
        return PackedBatch(tokens, targets.masked_fill(ended, IGNORED_TARGET), places - begins.cummax(1).values)

    def lengths(self, iteration: int) -> list[list[int]]:
        """Return the lengths, in tokens, of the documents of each micro-batch of an iteration."""
        all_lengths = []
        for ended in self._document_ends(iteration):
            ended[:, -1] = True  # the end of a sample also ends its last document
            all_lengths.append(np.diff(np.flatnonzero(ended), prepend=-1).tolist())
        return all_lengths

    def tokens(self, iteration: int) -> list[int]:
        """Return, for each micro-batch of an iteration, the number of tokens that count in its loss: all but document
        ends."""
        return [int(ended.size - ended.sum()) for ended in self._document_ends(iteration)]

    def _document_ends(self, iteration: int) -> NDArray[np.bool_]:
        """Return the mask of an iteration's tokens that end a document: bool [micro-batches, B, T]."""
        count = self._first[-1] * self._batch
        first = self._read.count_before(iteration, count)
        rows = self._read_rows(range(first, first + count), self._context)
        ended: NDArray[np.bool_] = (rows[:, :-1] == self._end).reshape(-1, self._batch, self._context)
        return ended
