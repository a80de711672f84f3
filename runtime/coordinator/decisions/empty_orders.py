"""Empty orders: orders in which nothing is committed because workers cannot reach each other.

A link that never works makes every order fail whose members need it, and all other members stand
still meanwhile. Each member that fails names whom it could not reach. The worker that is named most
often is given up: at first only workers that have committed nothing since they joined, members only
after many orders, as a network may be down for a minute.
"""

from collections import Counter
from collections.abc import Collection, Mapping

import msgspec
from msgspec.structs import replace

from slipstream.schedules.schedule import Worker

MAX_ORDERS_OF_JOINING = 2
"""Number of consecutive empty orders after which a worker is given up that has joined since the
last commit."""
MAX_ORDERS_OF_MEMBERS = 10
"""Number of consecutive empty orders after which a member is given up, or the run ends. With the
pauses between such orders, this takes a minute at least."""
MAX_STALLED_ORDERS = 2
"""Number of consecutive orders that may end because all members waited for each other: each
takes minutes."""


class EmptyOrders(msgspec.Struct, frozen=True, kw_only=True):
    """Record of the consecutive empty orders since the last commit, and of whom the members have
    named."""

    number: int = 0
    """Number of consecutive empty orders."""
    stalled: int = 0
    """Number of these orders that ended because all members waited for each other."""
    counts: Mapping[Worker, int] = {}
    """Number of times that each worker has been named in these orders."""
    alone: frozenset[Worker] = frozenset()
    """Workers that have failed in these orders without naming another one, as with a wrong
    network interface."""
    joined: frozenset[Worker] = frozenset()
    """Workers that have become members since the last commit."""
    named: tuple[Worker, ...] = ()
    """Workers named in the current order, once for each report."""
    reason: str | None = None
    """Reason of the first report in the current order; None if there is none."""
    has_stalled: bool = False
    """True if the current order ended because all members waited for each other."""

    def with_report(self, named: Collection[Worker], reason: str, *, stalled: bool = False) -> "EmptyOrders":
        """Return the record after a report that the current order cannot continue because of the
        `named` workers."""
        return replace(self, named=(*self.named, *named), reason=self.reason or reason,
                       alone=self.alone.union(named) if len(named) == 1 else self.alone,
                       has_stalled=self.has_stalled or stalled)

    def with_order(self, joined: Collection[Worker]) -> "EmptyOrders":
        """Return the record at the start of an order, with which the workers in `joined` become
        members."""
        return replace(self.without_current(), joined=self.joined.union(joined))

    def without_current(self) -> "EmptyOrders":
        """Return the record without the reports of the current order, which a loss explains."""
        return replace(self, named=(), reason=None, has_stalled=False)

    def with_current_counted(self) -> "EmptyOrders":
        """Return the record after the current order has ended, counted as empty."""
        return replace(self.without_current(), number=self.number + 1, stalled=self.stalled + self.has_stalled,
                       counts=Counter(self.counts) + Counter(self.named))

    def without_workers(self, workers: Collection[Worker]) -> "EmptyOrders":
        """Return the record after the loss of workers; the count begins anew if any of them had
        been named."""
        if not any(worker in self.counts for worker in workers):
            return replace(self.without_current(), joined=self.joined.difference(workers))
        return EmptyOrders(joined=self.joined.difference(workers))

    @property
    def has_ended_too_many(self) -> bool:
        """True if a member is to be given up, or the run is to end."""
        return self.number >= MAX_ORDERS_OF_MEMBERS or self.stalled >= MAX_STALLED_ORDERS

    def find_culprit(self, members: Collection[Worker]) -> Worker | None:
        """Return the member to give up, if any: after too many orders, the one that has been named
        most often.

        It is given up earlier if it has joined since the last commit. The result is None if all
        members have been named equally often, or most have failed alone: then none of them is more
        likely at fault than the others.
        """
        counts = {worker: self.counts.get(worker, 0) for worker in sorted(members)}
        most = max(counts.values(), default=0)
        joined = [worker for worker, count in counts.items() if worker in self.joined and count == most > 0]
        if joined and (self.number >= MAX_ORDERS_OF_JOINING or self.stalled):
            return joined[-1]
        if not self.has_ended_too_many or len(set(counts.values())) < 2 \
                or 2 * len(self.alone.intersection(counts)) > len(counts):
            return None
        return max(worker for worker, count in counts.items() if count == most)


NO_EMPTY_ORDERS = EmptyOrders()
