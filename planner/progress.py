"""How the planner tells of its progress."""

from collections.abc import Callable

Report = Callable[[str], None]
"""Called with one line whenever a better plan is found."""

ProgressCallback = Callable[[int, int], None]
"""Called with (parts finished, parts in all) by work that is done in parts."""
