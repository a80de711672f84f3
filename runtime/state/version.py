"""Versions: the iteration that some state is the result of, and whether all of it is.

Each of these has a version: parameters, optimizer states, copies of others' parts, and state sent between workers. Code
that uses state names the version that it needs, so parts of two iterations are never mixed.
"""

from typing import NamedTuple


class VersionError(RuntimeError):
    """Error for state that is not that after the expected iteration. The message is one line."""


class Version(NamedTuple):
    """Version of some state: the iteration that it results from, and whether all of it does."""

    after: int
    """Iteration after which the state has these values; -1 for the state before the first iteration."""
    whole: bool = True
    """True if all of the state has this version; False while it is being changed, when any part of it may have any
    value."""

    def require(self, after: int, what: str) -> None:
        """Raise VersionError, in which `what` names the state, unless all of it is that after iteration `after`."""
        if self != Version(after):
            found = f"is the state after iteration {self.after}" if self.whole else \
                f"is being changed to the state after iteration {self.after}"
            raise VersionError(f"{what} {found}; expected the state after iteration {after}")
