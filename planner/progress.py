"""Callbacks for progress."""

from collections.abc import Callable

ProgressCallback = Callable[[str], None]
"""Called with one line: a better plan was found, or what takes long now."""

CountCallback = Callable[[int, int], None]
"""Called with (parts finished, parts in all) by work that is done in parts."""


def quiet(line: str) -> None:
    """A callback that does nothing."""
