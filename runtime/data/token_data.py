"""Cut tokens into samples, the same on every worker and at any time.

Tokens are read epoch by epoch: an epoch is here one pass over the tokens. A sample is `context`
tokens and the one that follows; the next sample begins with that one. All samples that a run reads
are numbered: iteration by iteration, pipeline by pipeline, micro-batch by micro-batch. The number
determines the epoch, and the place in the epoch's order.

That order is a pseudorandom permutation that is computed and not stored: a Feistel network (Luby
and Rackoff, 1988) over the smallest square of a power of two that has room for all numbers. A
result that is out of range is permuted again (cycle walking: Black and Rogaway, 2002). So any
worker finds the sample at any place in constant time and memory.
"""

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.runtime.config import ConfigError
from slipstream.runtime.errors import describe_data_end
from slipstream.runtime.models.cross_entropy import IGNORED_TARGET
from slipstream.runtime.replay.microbatch import NOTHING_READ, Microbatch, SamplesRead
from slipstream.runtime.seeds import derive_seed

ROUNDS = 8
"""Rounds of the Feistel network: four suffice for many samples, but not for few."""
Numbers = NDArray[np.uint64]


def permute_places(places: Numbers, count: int, seed: int) -> Numbers:
    """Return the numbers of the samples at some places in an epoch's order.

    `seed` determines the order of the epoch's `count` samples.
    """
    # Numbers of twice `half` bits are the smallest such range that has all places.
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = [np.uint64(derive_seed("order", seed, round_)) for round_ in range(ROUNDS)]
    numbers, outside = places.astype(np.uint64), np.arange(len(places))
    # Cycle walking (Black and Rogaway, 2002).
    while len(outside):
        numbers[outside] = _apply_network(numbers[outside], half, keys)
        outside = outside[numbers[outside] >= count]
    return numbers


def _apply_network(numbers: Numbers, half: int, keys: list[np.uint64]) -> Numbers:
    """Return numbers of twice `half` bits, permuted in one round for each key."""
    # Luby and Rackoff, 1988.
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix_bits(right + key) & mask)
    return (left << bits) | right


def _mix_bits(numbers: Numbers) -> Numbers:
    # The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


DIGEST_BLOCKS = 64
"""Number of blocks that a digest covers, spread evenly, as files may be too large."""
BLOCK_TOKENS = 2**16
CHECKED_TOKENS = 2**25
"""Tokens compared with the vocabulary before training; others are when read."""


class BadSampleError(ConfigError):
    """Error for samples on which no worker can train, so that the run ends."""


class DataEndedError(BadSampleError):
    """Error for data that have no samples for `iteration`, nor for any later one."""

    def __init__(self, iteration: int) -> None:
        super().__init__(describe_data_end(iteration))
        self.iteration = iteration


class BadTokenError(BadSampleError):
    """Error for a token that is not in the model's vocabulary."""


class TokenData:
    """Training data of tokens in a mapped file, in samples (`runtime.data.data.Data`).

    Raises ConfigError if there are too few tokens for one sample, or if a token beyond the
    vocabulary is found.

    Parameters
    ----------
    source
        Key and file, for error messages.
    tokens
        Tokens of any integer dtype.
    microbatches
        Number of micro-batches of each pipeline in an iteration.
    shuffle
        Whether each epoch has an order of its own, other than the file's.
    read
        Number of samples that earlier runs have read, from which the count continues.
    """

    def __init__(
        self,
        source: str,
        tokens: NDArray[Any],
        *,
        vocabulary: int,
        context: int,
        microbatches: Sequence[int],
        seed: int,
        shuffle: bool,
        read: SamplesRead = NOTHING_READ,
    ) -> None:
        if len(tokens) <= context:
            raise ConfigError(
                f"{source}, of {len(tokens)} tokens; expected at least {context + 1}, one more "
                "than model.context"
            )
        self._source = source
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._first = list(accumulate(microbatches, initial=0))
        self._seed = seed
        self._shuffle = shuffle
        self._read = read
        self.samples = (len(tokens) - 1) // context
        """Number of samples in one epoch."""
        # A dtype of which all values are tokens needs no check.
        info = np.iinfo(tokens.dtype)
        self._may_be_beyond = info.max >= vocabulary or info.min < 0
        for start in self._block_starts(CHECKED_TOKENS):
            self._require_known(start, tokens[start : start + BLOCK_TOKENS])

    @property
    def digest(self) -> str:
        """SHA-256 of the dtype and number of the tokens, and of up to `DIGEST_BLOCKS` blocks."""
        hashed = hashlib.sha256(f"{self._tokens.dtype.str} {len(self._tokens)}".encode())
        for start in self._block_starts(DIGEST_BLOCKS * BLOCK_TOKENS):
            hashed.update(np.ascontiguousarray(self._tokens[start : start + BLOCK_TOKENS]).data)
        return hashed.hexdigest()

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, ...]:
        """Return a micro-batch of `batch` samples of `context` tokens, and the token after each.

        Tokens and following tokens are int64 [batch, context] on the CPU. Raises BadTokenError if a
        token is not in the vocabulary.
        """
        # The micro-batch's first sample, among all that this run and earlier ones read.
        first = self._read.count_before(microbatch.iteration, self._first[-1] * batch)
        first += (self._first[microbatch.pipeline] + microbatch.index) * batch
        window = torch.from_numpy(self._read_rows(range(first, first + batch), context))
        return window[:, :-1], window[:, 1:]

    def _read_rows(self, places: range, context: int) -> NDArray[np.int64]:
        """Return the samples at `places`, counted through epochs: int64 [samples, context + 1]."""
        rows = np.empty((len(places), context + 1), np.int64)
        for row, number in enumerate(self._sample_numbers(places)):
            sample = self._tokens[number * context : (number + 1) * context + 1]
            self._require_known(number * context, sample)
            rows[row] = sample
        return rows

    def _sample_numbers(self, places: range) -> list[int]:
        """Return the samples' numbers in the file, given places counted through epochs."""
        numbers: list[int] = []
        while places:
            # A micro-batch may lie in two epochs, or in more if the text is short.
            epoch, place = divmod(places.start, self.samples)
            inside = np.arange(place, min(place + len(places), self.samples), dtype=np.uint64)
            if self._shuffle:
                seed = derive_seed("epoch", self._seed, epoch)
                inside = permute_places(inside, self.samples, seed)
            numbers += inside.tolist()
            places = places[len(inside) :]
        return numbers

    def _block_starts(self, limit: int) -> list[int]:
        """Return the first token's index of each block to read, with `limit` tokens at most."""
        count, end = limit // BLOCK_TOKENS, max(0, len(self._tokens) - BLOCK_TOKENS)
        starts = range(0, end + BLOCK_TOKENS, BLOCK_TOKENS)
        if len(starts) <= count:
            return [*starts]
        # Some of them, spread evenly, with the first and the last.
        return [end * block // (count - 1) for block in range(count)]

    def _require_known(self, start: int, tokens: NDArray[Any]) -> None:
        # The usual case takes two passes over the tokens; the place is sought only in an error.
        if (
            not self._may_be_beyond
            or not len(tokens)
            or (tokens.max() < self._vocabulary and tokens.min() >= 0)
        ):
            return
        at = int(np.argmax((tokens >= self._vocabulary) | (tokens < 0)))
        raise BadTokenError(
            f"{self._source}: token {start + at} is {tokens[at]}; expected 0 to "
            f"{self._vocabulary - 1}, as the model's vocabulary is {self._vocabulary}"
        )


class PackedBatch(NamedTuple):
    """Micro-batch of B samples of T tokens in documents: int64 [B, T] on the CPU."""

    tokens: Tensor
    targets: Tensor
    """Token that follows each token; `IGNORED_TARGET` if that belongs to the next document."""
    position_ids: Tensor
    """Position of each token in its document, from 0."""


class DocumentData(TokenData):
    """Token data (`TokenData`) whose samples contain documents.

    Samples are cut at the same places as without documents. A document that crosses the end of a
    sample is split there, as in Megatron-LM (--reset-attention-mask) and torchtitan; its rest
    counts as a document of its own. Raises ConfigError as `TokenData` does, and if `document_end`
    is not in the vocabulary.

    Parameters
    ----------
    document_end
        Token that ends each document.
    batch
        Number of samples in a micro-batch.
    options
        The other arguments of `TokenData`.
    """

    def __init__(
        self,
        source: str,
        tokens: NDArray[Any],
        *,
        document_end: int,
        batch: int,
        vocabulary: int,
        context: int,
        **options: Any,
    ) -> None:
        super().__init__(source, tokens, vocabulary=vocabulary, context=context, **options)
        if document_end >= vocabulary:
            raise ConfigError(
                f"training.document_end is {document_end}; expected 0 to {vocabulary - 1}, as the "
                f"model's vocabulary is {vocabulary}"
            )
        self._end, self._batch, self._context = document_end, batch, context

    @property
    def digest(self) -> str:
        """Digest of the tokens, and of the token that ends documents."""
        return f"{super().digest} {self._end}"

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> PackedBatch:
        """Return a micro-batch with targets, and with positions within documents.

        It has `batch` samples of `context` tokens. If every token ends a document, no target
        counts. Raises BadTokenError.
        """
        tokens, targets = super().batch(microbatch, batch, context)
        ended = tokens == self._end
        places = torch.arange(context).expand(batch, context)
        # A document begins after each end; the last beginning counts for all that follow.
        begins = torch.zeros_like(tokens)
        begins[:, 1:] = places[:, 1:].where(ended[:, :-1], 0)
        positions = places - begins.cummax(1).values
        return PackedBatch(tokens, targets.masked_fill(ended, IGNORED_TARGET), positions)

    def lengths(self, iteration: int) -> list[list[int]]:
        """Return the lengths, in tokens, of the documents of each micro-batch of an iteration.

        Raises BadTokenError if a token is not in the vocabulary.
        """
        all_lengths = []
        for ended in self._document_ends(iteration):
            ended[:, -1] = True  # the end of a sample also ends its last document
            all_lengths.append(np.diff(np.flatnonzero(ended), prepend=-1).tolist())
        return all_lengths

    def tokens(self, iteration: int) -> list[int]:
        """Return how many tokens of each micro-batch count: all but ends of documents.

        Raises BadTokenError if a token is not in the vocabulary.
        """
        return [int(ended.size - ended.sum()) for ended in self._document_ends(iteration)]

    def _document_ends(self, iteration: int) -> NDArray[np.bool_]:
        count = self._first[-1] * self._batch
        first = self._read.count_before(iteration, count)
        rows = self._read_rows(range(first, first + count), self._context)
        ended: NDArray[np.bool_] = rows[:, :-1] == self._end
        return ended.reshape(-1, self._batch, self._context)
