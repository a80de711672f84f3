"""Weigh micro-batches' mean losses in an iteration's: equally, or by numbers of tokens.

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
    """Callable that returns the weight of a micro-batch's loss, by its tokens or equal.

    Weights sum to 1 over an iteration of training, where `rounds` is None. Evaluations read the
    same `rounds` iterations again and again; their weights sum to `rounds` over all of these
    together. `microbatches` has the number of micro-batches of each pipeline.
    """

    def __init__(self, data: Data, training: TrainingConfig, microbatches: Sequence[int],
                 rounds: int | None = None) -> None:
        self._data, self._rounds = data, rounds
        self._by_tokens = training.loss_weights == "tokens"
        self._first = list(accumulate(microbatches, initial=0))
        self._known: tuple[int, Weights] | None = None

    def __call__(self, microbatch: Microbatch) -> float:
        """Return the weight of a micro-batch's mean loss in the loss of its iteration.

        Raises ConfigError if weights depend on tokens and `count_loss_tokens` refuses the data's
        token counts.
        """
        if not self._by_tokens:
            return 1 / self._first[-1]
        iteration = microbatch.iteration if self._rounds is None else 0
        if self._known is None or self._known[0] != iteration:
            self._known = iteration, self._compute_weights(iteration)
        round_ = 0 if self._rounds is None else microbatch.iteration % self._rounds
        return float(self._known[1][round_ * self._first[-1] + self._first[microbatch.pipeline] + microbatch.index])

    def _compute_weights(self, iteration: int) -> Weights:
        rounds = range(iteration, iteration + 1) if self._rounds is None else range(self._rounds)
        tokens = np.concatenate([count_loss_tokens(self._data, round_iteration, self._first[-1])
                                 for round_iteration in rounds])
        weights: Weights = tokens / tokens.sum() * len(rounds)
        return weights


def count_loss_tokens(data: Data, iteration: int, samples: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return, for each sample of an iteration, the number of tokens of its mean loss.

    A sample of 0 tokens counts nothing. Raises DataEndedError if the data have ended, and
    ConfigError if they do not return one number for each of `samples` samples, or if no token of
    the iteration counts.
    """
    count = getattr(data, "tokens", None)
    if not callable(count):
        raise ConfigError("training.loss_weights is 'tokens', and the data have no method tokens(iteration); expected "
                          "one that gives how many tokens each sample's loss is a mean of, or 'microbatches'")
    with ending_data(iteration):
        tokens = np.asarray(count(iteration))
    if tokens.shape != (samples,) or tokens.dtype.kind not in "iu" or (tokens < 0).any() or not tokens.any():
        raise ConfigError(f"the data's tokens of iteration {iteration} are {' '.join(str(tokens).split())[:60]}; "
                          f"expected {samples} whole numbers of 0 or more, and not all 0")
    return tokens.astype(np.int64)
