"""Find costs of samples by the lengths of their documents: read, estimated, or fitted."""

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.schedules.dealing.deal import CostError, Costs
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


Coefficients = tuple[float, float, float]
"""Seconds of an op per sample, per token, and per square of a document's length."""

Rows = npt.NDArray[np.float64]


class CoefficientFit(NamedTuple):
    """Non-negative coefficients of an op's seconds, fitted to measurements, and the error."""

    coefficients: Coefficients
    error: float
    """Root mean square of (fitted / measured - 1)."""


def fit_coefficients(
    tokens: Sequence[float], squares: Sequence[float], seconds: Sequence[float]
) -> CoefficientFit:
    """Fit an op's seconds by a constant plus multiples of `tokens` and `squares`.

    No coefficient is negative, and the sum of squared relative errors is least. The arguments have
    the tokens, the sum of squares of documents' lengths, and the seconds of each measured sample.
    Plain least squares is solved for each subset of the three coefficients. Of the solutions
    without a negative coefficient, the best is the exact one (Lawson and Hanson, Solving Least
    Squares Problems, 1974).
    """
    measured = np.asarray(seconds, np.float64)
    rows = np.stack(
        (np.ones_like(measured), np.asarray(tokens, np.float64), np.asarray(squares, np.float64)),
        axis=1,
    )
    coefficients, squared_error = _fit_nonnegative(rows / measured[:, None], np.ones_like(measured))
    return CoefficientFit(coefficients, math.sqrt(squared_error / len(measured)))


def _fit_nonnegative(rows: Rows, targets: Rows) -> tuple[Coefficients, float]:
    """Return three x >= 0 that best fit `rows @ x`, and the squared error."""
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(3), float((targets**2).sum())
    for count in (1, 2, 3):
        for subset in map(list, combinations(range(3), count)):
            solution, *_ = np.linalg.lstsq(rows[:, subset] / scale[subset], targets)
            error = float(((rows[:, subset] / scale[subset] @ solution - targets) ** 2).sum())
            if (solution >= 0).all() and error < least:
                least, best = error, np.zeros(3)
                best[subset] = solution
    a, b, c = (best / scale).tolist()
    return (a, b, c), least


def sample_sizes(samples: Sequence[Sequence[int]]) -> Rows:
    """Return 1, the tokens and the sum of squares for each sample, [samples, 3].

    The squares are of its documents' lengths. A sample is given as the lengths of its documents.
    """
    sizes: Rows = np.array([_size_of(documents) for documents in samples], np.float64)
    return sizes


def _size_of(documents: Sequence[int]) -> tuple[int, int, int]:
    return 1, sum(documents), sum(length * length for length in documents)


def costs_by_stage(
    samples: Sequence[Sequence[int]], coefficients: npt.NDArray[np.float64]
) -> Costs:
    """Return the times of F, I and W of each sample, [samples, stages, 3].

    They are multiples of the mean. A sample is the lengths of its documents. By stage and op,
    `coefficients`, [stages, 3, 3], has the three of `fit_coefficients`. An op that takes no time
    costs 1. Sums are correctly rounded (`math.fsum`) and all else is done number by number, so that
    all machines get the same result.
    """
    _, tokens, squares = sample_sizes(samples).T[:, :, None, None]
    seconds = (
        coefficients[None, :, :, 0]
        + coefficients[None, :, :, 1] * tokens
        + coefficients[None, :, :, 2] * squares
    )
    relative: Costs = np.ones_like(seconds)
    for stage, kind in np.ndindex(seconds.shape[1:]):
        times = seconds[:, stage, kind]
        mean = math.fsum(times.tolist()) / len(times)
        if mean > 0:
            relative[:, stage, kind] = times / mean
    return relative
