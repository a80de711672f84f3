"""How the planner tells of its progress."""

from collections.abc import Callable

Report = Callable[[str], None]
"""Called with one line whenever a better plan is found."""
