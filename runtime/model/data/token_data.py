"""Tokens cut into samples, which are read epoch by epoch: who asks, and when, does not matter.

A sample is `context` tokens and the one that follows; the next sample begins with that one. All samples that a run
reads are counted through: iteration by iteration, pipeline by pipeline, micro-batch by micro-batch. The number says
the epoch, and the place in the epoch's order (`runtime.model.data.sample_order`).
"""

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.runtime.config import ConfigError
from slipstream.runtime.model.data.sample_order import permuted
from slipstream.runtime.model.microbatch import FROM_THE_START, Microbatch, SamplesRead
from slipstream.runtime.model.seeds import derive_seed

BLOCKS, BLOCK = 64, 2**16
"""Parts of a file that its digest is of, spread evenly, and the tokens of each: a file may be too large to read."""
LOOKED_THROUGH = 2**25
"""Tokens that are looked through for one beyond the vocabulary before training; each sample is when it is read."""


class BadSampleError(ConfigError):
    """Samples that no worker can train on. Others would read the same: it ends the run."""


class BadTokenError(BadSampleError):
    """A token that the model does not have."""


class TokenData:
    """Micro-batches of mapped tokens; a `runtime.model.data.data.Data`.

    Parameters
    ----------
    source
        Names key and file in errors.
    tokens
        Of any integer dtype.
    microbatches
        Of each pipeline in an iteration.
    shuffle
        Whether each epoch has an order of its own; else samples are read as they lie.
    read
        The number from which samples are counted on.

    Raises ConfigError where there is not one sample, or a token beyond the vocabulary is found.
    """

    def __init__(self, source: str, tokens: NDArray[Any], *, vocabulary: int, context: int,
                 microbatches: Sequence[int], seed: int, shuffle: bool, read: SamplesRead = FROM_THE_START) -> None:
        if len(tokens) <= context:
            raise ConfigError(f"{source}, of {len(tokens)} tokens; expected at least {context + 1}, one more than "
                              "model.context")
        self._source = source
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._first = list(accumulate(microbatches, initial=0))
        self._seed = seed
        self._shuffle = shuffle
        self._read = read
        self.samples = (len(tokens) - 1) // context
        """Of an epoch."""
        info = np.iinfo(tokens.dtype)
        self._may_be_beyond = info.max >= vocabulary or info.min < 0
        for start in self._blocks(LOOKED_THROUGH):
            self._require_known(start, tokens[start:start + BLOCK])

    @property
    def digest(self) -> str:
        """SHA-256 of the number of tokens and of some of them."""
        found = hashlib.sha256(f"{self._tokens.dtype.str} {len(self._tokens)}".encode())
        for start in self._blocks(BLOCKS * BLOCK):
            found.update(np.ascontiguousarray(self._tokens[start:start + BLOCK]).data)
        return found.hexdigest()

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, ...]:
        """The tokens of a micro-batch and, for each, the one that follows: two int64 [batch, context] on the CPU.

        Raises BadTokenError.
        """
        first = self._read.before(microbatch.iteration, self._first[-1] * batch) \
            + (self._first[microbatch.pipeline] + microbatch.index) * batch
        window = torch.from_numpy(self._rows(range(first, first + batch), context))
        return window[:, :-1], window[:, 1:]

    def _rows(self, places: range, context: int) -> NDArray[np.int64]:
        """[samples, context + 1]: tokens of the samples at these places."""
        rows = np.empty((len(places), context + 1), np.int64)
        for row, number in enumerate(self._numbers(places)):
            sample = self._tokens[number * context:(number + 1) * context + 1]
            self._require_known(number * context, sample)
            rows[row] = sample
        return rows

    def _numbers(self, places: range) -> list[int]:
        """The samples at places that are counted through all epochs."""
        found: list[int] = []
        while places:
            epoch, place = divmod(places.start, self.samples)
            inside = np.arange(place, min(place + len(places), self.samples), dtype=np.uint64)
            if self._shuffle:
                inside = permuted(inside, self.samples, derive_seed("epoch", self._seed, epoch))
            found += inside.tolist()
            places = places[len(inside):]
        return found

    def _blocks(self, limit: int) -> list[int]:
        """Where the parts begin, of so many tokens together: all where that is enough, else some, first and last too.
        """
        count, end = limit // BLOCK, max(0, len(self._tokens) - BLOCK)
        starts = range(0, end + BLOCK, BLOCK)
        return [*starts] if len(starts) <= count else [end * one // (count - 1) for one in range(count)]

    def _require_known(self, start: int, tokens: NDArray[Any]) -> None:
        if not self._may_be_beyond or not len(tokens) or (tokens.max() < self._vocabulary and tokens.min() >= 0):
            return
        at = int(np.argmax((tokens >= self._vocabulary) | (tokens < 0)))
        raise BadTokenError(f"{self._source}: token {start + at} is {tokens[at]}; expected 0 to "
                            f"{self._vocabulary - 1}, as the model's vocabulary is {self._vocabulary}")
