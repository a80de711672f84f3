"""Measure how long changes of members take, and find who causes empty orders.

Empty orders are those in which nothing is committed because workers cannot reach each other. A link
that never works makes every order fail whose members need it, and all other members stand still
meanwhile. Each member that fails names whom it could not reach. The worker that is named most often
is given up: at first only workers that have committed nothing since they joined, members only after
many orders, as a network may be down for a minute.
"""

from collections import Counter
from collections.abc import Collection, Mapping

import msgspec
from msgspec.structs import replace

from slipstream.schedules.schedule import Worker


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one change of members or layers: its causes and duration."""

    iteration: int
    """First iteration that ran after the change."""
    dead: tuple[Worker, ...]
    nodes: tuple[int, ...] = ()
    """Nodes (machines) of which the dead workers were the last live ones."""
    returned: tuple[Worker, ...]
    reasons: tuple[str, ...]
    """Reason for the loss of each worker in `dead`, in the same order."""
    live: int
    """Number of workers that take part after the change."""
    seconds: float
    """Seconds from the first death, or from when all had stopped, until the last first op."""
    broken: str | None = None
    """Cause other than a death, such as a broken connection, with its ends and reason."""
    meanwhile: int = 0
    """Number of iterations that were committed while layers were fetched for the change."""
    commit_gap_seconds: float | None = None
    """Seconds from the last commit before the change to the first after it, if both exist."""

    went_back_to: int | None = None
    """Iteration to which the run went back for lost layers or differing copies, if it did."""
    in_doubt: bool = False
    """True if the run went back because copies differed."""
    repeated: int = 0
    """Committed iterations that are run again because the run went back; numbers stay."""
    settled: bool = False
    """True if only layers have moved between members, to a better schedule."""

    def __str__(self) -> str:
        lost = [f"so that node {node} is lost" for node in self.nodes]
        back = [f"worker {worker} is back" for worker in self.returned]
        causes = ", ".join([*self.reasons, *lost, *back]) or self.broken or (
            "layers have moved" if self.settled else "a connection broke")
        again = ""
        if self.went_back_to is not None:
            why = "" if self.in_doubt else "no live worker had all layers, so "
            iterations = "1 iteration is" if self.repeated == 1 else f"{self.repeated} iterations are"
            again = (f": {why}the run went back to iteration {self.went_back_to}, and {iterations} run "
                     "again, with the same numbers")
        workers = "1 worker" if self.live == 1 else f"{self.live} workers"
        return f"{causes}{again}: iteration {self.iteration} runs on {workers}, {self.seconds:.2f} s later"


class RecoveryClock(msgspec.Struct, frozen=True, kw_only=True):
    """Clock that measures recoveries, each of which may take several orders. All times are of
    `time.monotonic`."""

    began: float | None = None
    ordered_at: float = 0.0
    deaths: tuple[tuple[Worker, str], ...] = ()
    """Members lost since the last recovery ended, each with the reason."""
    nodes: tuple[int, ...] = ()
    broken: str | None = None
    returned: frozenset[Worker] = frozenset()
    meanwhile: int = 0
    settled: bool = False
    back_to: int | None = None
    in_doubt: bool = False
    repeated: int = 0
    committed_at: float | None = None
    without_gap: int = 0
    """Latest recoveries whose `commit_gap_seconds` is unknown: nothing was committed since."""
    recoveries: tuple[Recovery, ...] = ()

    def with_loss(self, worker: Worker, reason: str, since: float) -> "RecoveryClock":
        """Return the clock after a member's loss, not before the last order."""
        since = max(since, self.ordered_at)
        return replace(self, began=since if self.began is None else min(self.began, since),
                       deaths=(*self.deaths, (worker, reason)), returned=self.returned - {worker})

    def with_node_loss(self, node: int) -> "RecoveryClock":
        """Return the clock after the loss of the last live worker of a node."""
        return replace(self, nodes=(*self.nodes, node))

    @property
    def dead_workers(self) -> tuple[Worker, ...]:
        """Members lost since the last recovery ended."""
        return tuple(worker for worker, _ in self.deaths)

    def with_begin(self, at: float) -> "RecoveryClock":
        """Return the clock with a recovery begun at time `at`, unless one is in progress."""
        return replace(self, began=at) if self.began is None else self

    def with_cause(self, why: str, at: float) -> "RecoveryClock":
        """Return the clock after a recovery has begun for another reason than a death. An example
        is a broken connection. Losses that follow belong to the same recovery."""
        return replace(self.with_begin(at), broken=self.broken or why)

    def with_order(self, returned: Collection[Worker], meanwhile: int, at: float, *, settled: bool = False
                   ) -> "RecoveryClock":
        """Return the clock after an order was given, with which the workers in `returned` join.

        `meanwhile` iterations were committed while layers were fetched for it. `settled` says that
        it only moves layers between members.
        """
        return replace(self, returned=self.returned.union(returned), settled=settled, meanwhile=meanwhile,
                       ordered_at=at)

    def with_rollback(self, iteration: int, repeated: int, *, in_doubt: bool) -> "RecoveryClock":
        """Return the clock after a return to the state before `iteration`. `repeated` committed
        iterations are run again. `in_doubt` says that copies of state differed."""
        before = iteration if self.back_to is None else min(self.back_to, iteration)
        return replace(self, back_to=before, repeated=self.repeated + repeated, in_doubt=self.in_doubt or in_doubt)

    def with_end(self, iteration: int, live: int, at: float) -> "RecoveryClock":
        """Return the clock after all `live` members have begun `iteration`, which ends a
        recovery."""
        if self.began is None:
            return self
        recovery = Recovery(
            iteration=iteration, dead=self.dead_workers, nodes=self.nodes, live=live,
            returned=tuple(sorted(self.returned)),
            reasons=tuple(reason for _, reason in self.deaths), seconds=at - self.began, broken=self.broken,
            meanwhile=self.meanwhile, went_back_to=self.back_to, in_doubt=self.in_doubt, repeated=self.repeated,
            settled=self.settled and not self.deaths and not self.returned)
        return RecoveryClock(ordered_at=self.ordered_at, meanwhile=self.meanwhile, settled=self.settled,
                             committed_at=self.committed_at, without_gap=self.without_gap + 1,
                             recoveries=(*self.recoveries, recovery))

    @property
    def last_recovery_seconds(self) -> float | None:
        """Seconds that the last recovery took; None if there was none."""
        return self.recoveries[-1].seconds if self.recoveries else None

    def with_commit(self, at: float) -> "RecoveryClock":
        """Return the clock after a commit, which gives the latest recoveries their commit gap."""
        recoveries = self.recoveries
        if self.without_gap and self.committed_at is not None:
            before, last = recoveries[:-self.without_gap], recoveries[-self.without_gap:]
            gap = at - self.committed_at
            recoveries = (*before, *(replace(recovery, commit_gap_seconds=gap) for recovery in last))
        return replace(self, committed_at=at, without_gap=0, recoveries=recoveries)


MAX_ORDERS_OF_JOINING = 2
"""Empty orders in a row after which a worker that has just joined is given up."""
MAX_ORDERS_OF_MEMBERS = 10
"""Empty orders in a row after which a member is given up, or the run ends: a minute at least."""
MAX_STALLED_ORDERS = 2
"""Consecutive orders that may end because all members waited for each other: each takes minutes."""


class EmptyOrders(msgspec.Struct, frozen=True, kw_only=True):
    """Record of the consecutive empty orders since the last commit, and who was named."""

    number: int = 0
    """Number of consecutive empty orders."""
    stalled: int = 0
    """Number of these orders that ended because all members waited for each other."""
    counts: Mapping[Worker, int] = {}
    """Number of times that each worker has been named in these orders."""
    alone: frozenset[Worker] = frozenset()
    """Workers that have failed without naming another, as with a wrong network interface."""
    joined: frozenset[Worker] = frozenset()
    """Workers that have become members since the last commit."""
    named: tuple[Worker, ...] = ()
    """Workers named in the current order, once for each report."""
    reason: str | None = None
    """Reason of the first report in the current order; None if there is none."""
    has_stalled: bool = False
    """True if the current order ended because all members waited for each other."""

    def with_report(self, named: Collection[Worker], reason: str, *, stalled: bool = False) -> "EmptyOrders":
        """Return the record after a report that the `named` workers end the current order."""
        return replace(self, named=(*self.named, *named), reason=self.reason or reason,
                       alone=self.alone.union(named) if len(named) == 1 else self.alone,
                       has_stalled=self.has_stalled or stalled)

    def with_order(self, joined: Collection[Worker]) -> "EmptyOrders":
        """Return the record at the start of an order, with which some have `joined`."""
        return replace(self.without_current(), joined=self.joined.union(joined))

    def without_current(self) -> "EmptyOrders":
        """Return the record without the reports of the current order, which a loss explains."""
        return replace(self, named=(), reason=None, has_stalled=False)

    def with_current_counted(self) -> "EmptyOrders":
        """Return the record after the current order has ended, counted as empty."""
        return replace(self.without_current(), number=self.number + 1, stalled=self.stalled + self.has_stalled,
                       counts=Counter(self.counts) + Counter(self.named))

    def without_workers(self, workers: Collection[Worker]) -> "EmptyOrders":
        """Return the record after a loss. The count begins anew if a lost worker had been named."""
        if not any(worker in self.counts for worker in workers):
            return replace(self.without_current(), joined=self.joined.difference(workers))
        return EmptyOrders(joined=self.joined.difference(workers))

    @property
    def has_ended_too_many(self) -> bool:
        """True if a member is to be given up, or the run is to end."""
        return self.number >= MAX_ORDERS_OF_MEMBERS or self.stalled >= MAX_STALLED_ORDERS

    def find_culprit(self, members: Collection[Worker]) -> Worker | None:
        """Return the member to give up, if any, after too many orders: the most named one.

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
