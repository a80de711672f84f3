"""Fit costs of samples to measurements, by tokens and squares of documents' lengths."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.schedules.dealing.deal import Costs

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
    """Return the non-negative x that best fit `rows @ x` to `targets`.

    Three numbers, and the sum of squared errors.
    """
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

    They are multiples of the mean. A sample is the lengths of its documents. The argument
    `coefficients`, [stages, 3, 3], has for F, I and W of each stage the three of
    `fit_coefficients`. An op that takes no time costs 1. Sums are correctly rounded (`math.fsum`)
    and all else is done number by number, so that all machines get the same result.
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
