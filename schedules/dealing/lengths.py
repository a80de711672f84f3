"""Read the lengths of samples' documents from a file, and estimate costs from them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream.schedules.dealing.deal import CostError, Costs
from slipstream.schedules.dealing.fit import sample_sizes
from slipstream.schedules.files import read_at_most

MAX_BYTES = 2**28


def read_lengths(path: Path, context: int | None = None) -> list[list[int]]:
    """Read the lengths of each sample's documents, in tokens, a line per sample.

    Raises CostError, whose message names the line, also if a sample has more than `context` tokens
    (None: no limit).
    """
    try:
        lines = read_at_most(path, MAX_BYTES, CostError).decode().splitlines()
    except UnicodeDecodeError as error:
        raise CostError(f"{path}: cannot be read: {error}") from None
    samples = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        if not all(word.isascii() and word.isdecimal() and 0 < int(word) < 2**31 for word in words):
            raise CostError(
                f"{path}: line {number} is {line[:60]!r}; expected the lengths of a sample's "
                "documents, whole numbers above 0"
            )
        lengths = [int(word) for word in words]
        if context is not None and max(lengths) > context:
            raise CostError(
                f"{path}: line {number}: a document has {max(lengths)} tokens; expected at most "
                f"{context}, the length of a sample"
            )
        if context is not None and sum(lengths) > context:
            raise CostError(
                f"{path}: line {number}: documents have {sum(lengths)} tokens together; expected "
                f"at most {context}, the length of a sample"
            )
        samples.append(lengths)
    if not samples:
        raise CostError(
            f"{path}: no sample; expected a line each, with the lengths of its documents"
        )
    return samples


def costs_of(samples: Sequence[Sequence[int]], attention: float) -> Costs:
    """Return the times of F, I and W of each sample, [samples, 3].

    They are multiples of the mean. A sample is the lengths of its documents. On average, a share
    `attention` of F and of I grows with the squares of these lengths. The rest grows with tokens,
    and so does W, which has matrix products only.
    """
    _, tokens, squares = sample_sizes(samples).T
    plain: npt.NDArray[np.float64] = tokens / tokens.mean()
    both = (1 - attention) * plain + attention * squares / squares.mean()
    return np.stack((both, both, plain), axis=1)
