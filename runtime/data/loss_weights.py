"""Weigh micro-batches' mean losses in an iteration's loss: equally, or by numbers of tokens.

If data ignore some tokens, a mean of micro-batches' means is not the mean over tokens. Hugging
Face's Trainer and torchtitan also divide by the number of tokens of the whole step.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from slipstream.runtime.config import ConfigError, TrainingConfig
from slipstream.runtime.data.data import Data, ending_data
from slipstream.runtime.replay.microbatch import Microbatch

Weights = np.ndarray[tuple[int], np.dtype[np.float64]]


class LossWeights:
    """Callable that returns the weight of a micro-batch's loss, equal or by its tokens.

    In training, where `rounds` is None, weights sum to 1 over an iteration. Every evaluation reads
    the same `rounds` iterations, over which weights sum to `rounds`. `microbatches` has the number
    of micro-batches of each pipeline.
    """

    def __init__(
        self,
        data: Data,
        training: TrainingConfig,
        microbatches: Sequence[int],
        rounds: int | None = None,
    ) -> None:
        self._data, self._rounds = data, rounds
        self._by_tokens = training.loss_weights == "tokens"
        self._first = list(accumulate(microbatches, initial=0))
        self._last: tuple[int, Weights] | None = None
        """Last iteration whose weights were computed, and these weights."""

    def __call__(self, microbatch: Microbatch) -> float:
        """Return the weight of a micro-batch's mean loss in the loss of its iteration.

        Raises ConfigError and DataEndedError as `count_loss_tokens` does, if weights depend on
        tokens.
        """
        if not self._by_tokens:
            return 1 / self._first[-1]
        # Evaluations have one set of weights, for all their rounds.
        iteration = microbatch.iteration if self._rounds is None else 0
        if self._last is None or self._last[0] != iteration:
            self._last = iteration, self._compute_weights(iteration)
        _, weights = self._last
        round_ = 0 if self._rounds is None else microbatch.iteration % self._rounds
        sample = self._first[microbatch.pipeline] + microbatch.index
        return float(weights[round_ * self._first[-1] + sample])

    def _compute_weights(self, iteration: int) -> Weights:
        rounds = range(iteration, iteration + 1) if self._rounds is None else range(self._rounds)
        counts = [count_loss_tokens(self._data, number, self._first[-1]) for number in rounds]
        tokens = np.concatenate(counts)
        # The shares of tokens sum to 1 over all rounds; each round is to have a mean of its own.
        weights: Weights = tokens / tokens.sum() * len(rounds)
        return weights


def count_loss_tokens(
    data: Data, iteration: int, samples: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return, for each sample of an iteration, the number of tokens in its mean loss.

    A sample of 0 tokens has no weight. Raises DataEndedError if the data have ended, and
    ConfigError if they do not return one number for each of `samples` samples, or if all are 0.
    Other errors of the data are passed on.
    """
    count = getattr(data, "tokens", None)
    if not callable(count):
        raise ConfigError(
            "training.loss_weights is 'tokens', and the data have no method tokens(iteration); "
            "expected one that gives how many tokens each sample's loss is a mean of, or "
            "'microbatches'"
        )
    # The user's code may return anything that numpy can read.
    with ending_data(iteration):
        tokens = np.asarray(count(iteration))
    if (
        tokens.shape != (samples,)
        or tokens.dtype.kind not in "iu"
        or (tokens < 0).any()
        or not tokens.any()
    ):
        raise ConfigError(
            f"the data's tokens of iteration {iteration} are {' '.join(str(tokens).split())[:60]}; "
            f"expected {samples} whole numbers of 0 or more, and not all 0"
        )
    return tokens.astype(np.int64)
