"""What each micro-batch's mean loss counts in the loss of an iteration: all the same, or by the tokens it is a mean of.

Where data ignore some tokens, a mean of micro-batches' means is not the mean over tokens. Hugging Face's Trainer and
torchtitan divide by the tokens of the whole step, too.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from slipstream.runtime.config import ConfigError, TrainingConfig
from slipstream.runtime.model.data.data import Data
from slipstream.runtime.model.microbatch import Microbatch

Weights = np.ndarray[tuple[int], np.dtype[np.float64]]


class LossWeights:
    """Weights of micro-batches, whose sum is 1 in an iteration of training.

    `rounds`: of iterations that are weighed together, and numbered again and again, as evaluations are; the sum of
    their weights is `rounds`. None: each iteration by itself.
    """

    def __init__(self, data: Data, training: TrainingConfig, microbatches: Sequence[int],
                 rounds: int | None = None) -> None:
        self._data, self._rounds = data, rounds
        self._by_tokens = training.loss_weights == "tokens"
        self._first = list(accumulate(microbatches, initial=0))
        self._known: tuple[int, Weights] | None = None

    def __call__(self, microbatch: Microbatch) -> float:
        """Of one micro-batch. Raises ConfigError where data do not tell tokens as they are to."""
        if not self._by_tokens:
            return 1 / self._first[-1]
        iteration = microbatch.iteration if self._rounds is None else 0
        if self._known is None or self._known[0] != iteration:
            self._known = iteration, self._weights(iteration)
        round_ = 0 if self._rounds is None else microbatch.iteration % self._rounds
        return float(self._known[1][round_ * self._first[-1] + self._first[microbatch.pipeline] + microbatch.index])

    def _weights(self, iteration: int) -> Weights:
        rounds = range(iteration, iteration + 1) if self._rounds is None else range(self._rounds)
        tokens = np.concatenate([tokens_of(self._data, one, self._first[-1]) for one in rounds])
        weights: Weights = tokens / tokens.sum() * len(rounds)
        return weights


def tokens_of(data: Data, iteration: int, samples: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How many tokens the loss of each sample is a mean of. Raises ConfigError."""
    ask = getattr(data, "tokens", None)
    if not callable(ask):
        raise ConfigError("training.loss_weights is 'tokens', and the data have no method tokens(iteration); expected "
                          "one that gives how many tokens each sample's loss is a mean of, or 'microbatches'")
    found = np.asarray(ask(iteration))
    if found.shape != (samples,) or found.dtype.kind not in "iu" or (found < 1).any():
        raise ConfigError(f"the data's tokens of iteration {iteration} are {' '.join(str(found).split())[:60]}; "
                          f"expected {samples} whole numbers above 0")
    return found.astype(np.int64)
