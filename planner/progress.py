"""Callbacks for progress."""

import math
from collections.abc import Callable

ProgressCallback = Callable[[str], None]
"""Called with one line: a better plan was found, or what takes long now."""

CountCallback = Callable[[int, int], None]
"""Called with (parts finished, parts in all) by work that is done in parts."""


def quiet(line: str) -> None:
    """A callback that does nothing."""


class SearchProgress:
    """What one search tells: plans that are better than all that it told of before, whichever step found them."""

    def __init__(self, line: ProgressCallback = quiet) -> None:
        self.line = line
        """Tells anything else."""
        self._least = math.inf

    def found(self, method: str, period: float, bound: float) -> None:
        """A plan with this period, in seconds, and its proven bound."""
        if period < self._least * (1 - 1e-9):  # the same in other ticks is no news
            self._least = period
            self.line(f"{method}: period {period:g} s, bound {bound:g} s")
