"""Find the costs of samples from the lengths of their documents.

Costs are estimated from the share of attention, or computed with coefficients that are fitted to
measured times.
"""

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

    Blank lines are skipped. Raises CostError if the file cannot be read or has no sample; with the
    line's number, if a line has another form, or a sample more than `context` tokens (None: no
    limit).
    """
    try:
        lines = read_at_most(path, MAX_BYTES, CostError).decode().splitlines()
    except UnicodeDecodeError as error:
        raise CostError(f"{path}: cannot be read: {error}") from None
    samples = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        # A blank line is no sample: a sample has at least one document.
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
    """Return the estimated times of F, I and W of each sample, [samples, 3].

    Times are multiples of the mean. Each of `samples` is the lengths of its documents. Of the mean
    time of F and of I, a share `attention` grows with the squares of these lengths. The rest grows
    with the number of tokens, and so does W, which has matrix products only.
    """
    _, tokens, squares = sample_sizes(samples).T
    plain: npt.NDArray[np.float64] = tokens / tokens.mean()
    both = (1 - attention) * plain + attention * squares / squares.mean()
    return np.stack((both, both, plain), axis=1)


Coefficients = tuple[float, float, float]
"""Seconds of an op per sample, per token, and per square of a document's length."""

Rows = npt.NDArray[np.float64]


class CoefficientFit(NamedTuple):
    """Coefficients for the seconds of an op, none negative, fitted to measurements."""

    coefficients: Coefficients
    error: float
    """Root mean square of (fitted / measured - 1)."""


def fit_coefficients(
    tokens: Sequence[float], squares: Sequence[float], seconds: Sequence[float]
) -> CoefficientFit:
    """Fit the seconds of an op by a constant plus multiples of `tokens` and `squares`.

    For each measured sample, the arguments have its tokens, the sum of the squares of its
    documents' lengths, and the seconds of the op, above 0. The sum of squared relative errors is
    least, with no coefficient negative (Lawson and Hanson, Solving Least Squares Problems, 1974).
    """
    measured = np.asarray(seconds, np.float64)
    rows = np.stack(
        (np.ones_like(measured), np.asarray(tokens, np.float64), np.asarray(squares, np.float64)),
        axis=1,
    )
    # Rows divided by the measured seconds: absolute errors then are relative ones.
    coefficients, squared_error = _fit_nonnegative(rows / measured[:, None], np.ones_like(measured))
    return CoefficientFit(coefficients, math.sqrt(squared_error / len(measured)))


def _fit_nonnegative(rows: Rows, targets: Rows) -> tuple[Coefficients, float]:
    """Return the best non-negative solution of `rows @ x = targets`, and its squared error."""
    # Plain least squares for each subset of the three coefficients: of the solutions without a
    # negative one, the best is the exact solution (Lawson and Hanson, Solving Least Squares
    # Problems, 1974).
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
    """Return a row for each sample: 1, its tokens, its sum of squares, [samples, 3].

    Each of `samples` is the lengths of its documents, whose squares are summed.
    """
    sizes: Rows = np.array([_size_of(documents) for documents in samples], np.float64)
    return sizes


def _size_of(documents: Sequence[int]) -> tuple[int, int, int]:
    return 1, sum(documents), sum(length * length for length in documents)


def costs_by_stage(
    samples: Sequence[Sequence[int]], coefficients: npt.NDArray[np.float64]
) -> Costs:
    """Return the times of F, I and W by sample and stage, [samples, stages, 3].

    Times are multiples of the mean over `samples` at the same stage and op, or 1 if an op takes no
    time. Each of `samples` is the lengths of its documents. For each stage and op, `coefficients`,
    [stages, 3, 3], has the three numbers that `fit_coefficients` fits. All machines get the same
    result.
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
        # `math.fsum` rounds correctly, and all else is done number by number, so machines agree.
        mean = math.fsum(times.tolist()) / len(times)
        if mean > 0:
            relative[:, stage, kind] = times / mean
    return relative
