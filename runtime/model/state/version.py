"""Versions: which iteration some state is that after, and whether all of it is.

Parameters, optimizer states, copies of others' parts, and what is on its way between workers each have one. Whoever
uses state says which version it needs, so that parts of two iterations never meet.
"""

from typing import NamedTuple


class VersionError(RuntimeError):
    """State is not that which is needed. The message is one line."""


class Version(NamedTuple):
    """That of some state."""

    after: int
    """The iteration that it is the state after; -1: as it is before the first one."""
    whole: bool = True
    """Whether all of it is; else it is on its way there, and parts of it may be anything."""

    def require(self, after: int, what: str) -> None:
        """Raise VersionError unless it is whole, and the state after this iteration."""
        if self != Version(after):
            found = f"is that after iteration {self.after}" if self.whole else \
                f"is on its way to that after iteration {self.after}"
            raise VersionError(f"{what} {found}; needed is that after iteration {after}")
