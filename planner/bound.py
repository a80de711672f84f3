"""A proven lower bound on the period, as a value that knows which question it answers."""

import msgspec

from slipstream.schedules.scope import Scope


class Bound(msgspec.Struct, frozen=True):
    """No schedule that the question allows has a shorter period."""

    ticks: int
    scope: Scope
    counts: str = ""
    """What it counts, in words."""

    def __or__(self, other: "Bound") -> "Bound":
        """The larger of two bounds, which answer the same question; the first of equals."""
        assert self.scope is other.scope, f"a bound for {self.scope} and one for {other.scope} are not comparable"
        return other if other.ticks > self.ticks else self

    def narrowed(self, scope: Scope) -> "Bound":
        """The same as a bound for a narrower question."""
        assert self.scope.holds_for(scope), f"a bound for {self.scope} proves nothing for {scope}"
        return Bound(self.ticks, scope, self.counts)
