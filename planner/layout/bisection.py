"""The least longest load that can be had, where a larger one is always possible, too."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def least_limit(attempt: Callable[[int], T | None], low: int, high: int, best: T, within: float = 0.0) -> tuple[int, T]:
    """The least limit from `low` + 1 to `high` for which an attempt gives something, and what it gives.

    `best` is what it gives for `high`. `within`: how far from the least the answer may be, as a share of it.
    """
    while high - low > max(1, within * high):
        middle = (low + high) // 2
        found = attempt(middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return high, best
