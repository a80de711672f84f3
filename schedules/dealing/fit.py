"""What samples cost by their tokens and by the squares of their documents' lengths, fitted to what was measured."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.schedules.dealing.deal import Costs

Coefficients = tuple[float, float, float]
"""Seconds: of themselves, by a token, by a pair of tokens of a document (its length squared)."""

Rows = npt.NDArray[np.float64]


class CoefficientFit(NamedTuple):
    """Coefficients, none of which is negative."""

    coefficients: Coefficients
    error: float
    """The root of the mean square of (fitted / measured - 1)."""


def fit(tokens: Sequence[float], squares: Sequence[float], seconds: Sequence[float]) -> CoefficientFit:
    """Coefficients with the least relative error (squares of it added up), of those that are not negative.

    With three of them, the best of all subsets that come out without a negative one is the exact answer of non-negative
    least squares (Lawson and Hanson, Solving Least Squares Problems, 1974).
    """
    measured = np.asarray(seconds, np.float64)
    rows = np.stack((np.ones_like(measured), np.asarray(tokens, np.float64), np.asarray(squares, np.float64)), axis=1)
    found, least = _not_negative(rows / measured[:, None], np.ones_like(measured))
    return CoefficientFit(found, math.sqrt(least / len(measured)))


def _not_negative(rows: Rows, targets: Rows) -> tuple[Coefficients, float]:
    """Coefficients by which rows come next to their targets, and the squares of what is left, added up."""
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(3), float((targets**2).sum())
    for count in (1, 2, 3):
        for some in map(list, combinations(range(3), count)):
            found, *_ = np.linalg.lstsq(rows[:, some] / scale[some], targets)
            error = float(((rows[:, some] / scale[some] @ found - targets) ** 2).sum())
            if (found >= 0).all() and error < least:
                least, best = error, np.zeros(3)
                best[some] = found
    a, b, c = (best / scale).tolist()
    return (a, b, c), least


def sizes_of(samples: Sequence[Sequence[int]]) -> Rows:
    """[samples, 3]: 1, tokens and squares, of samples by the lengths of their documents. All are whole numbers."""
    sizes: Rows = np.array([(1, sum(one), sum(length * length for length in one)) for one in samples], np.float64)
    return sizes


def costs_by_stage(samples: Sequence[Sequence[int]], coefficients: npt.NDArray[np.float64]) -> Costs:
    """[samples, stages, 3]: F, I and W of samples by the lengths of their documents, as multiples of the mean.

    `coefficients`: [stages, 3, 3], those of F, I and W; what takes no time costs 1. Sums are exact, and all else is
    done number by number, so that all machines find the same.
    """
    _, tokens, squares = sizes_of(samples).T[:, :, None, None]
    seconds = coefficients[None, :, :, 0] + coefficients[None, :, :, 1] * tokens + coefficients[None, :, :, 2] * squares
    found: Costs = np.ones_like(seconds)
    for stage, kind in np.ndindex(seconds.shape[1:]):
        own = seconds[:, stage, kind]
        mean = math.fsum(own.tolist()) / len(own)
        if mean > 0:
            found[:, stage, kind] = own / mean
    return found
