"""How the planner tells of its progress."""

from collections.abc import Callable

ProgressCallback = Callable[[str], None]
"""Called with one line: a better plan was found, or what takes long now."""


def quiet(line: str) -> None:
    """A callback that tells nobody."""
