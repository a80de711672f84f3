"""Measure how long changes of members take, and find who causes empty orders.

Empty orders end with an error before any commit, mostly as workers cannot reach each other. A link
that never works makes every order fail whose members need it, and all other members stand still
meanwhile. Each member that fails names whom it could not reach. The worker that is named most often
is given up: at first only if it has committed nothing since it joined, any other member only after
many orders, as a network may be down for a minute.
"""

from collections import Counter
from collections.abc import Collection, Mapping

import msgspec
from msgspec.structs import replace

from slipstream.schedules.schedule import Worker


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """Record for users of one change of members or layers: its causes and duration."""

    iteration: int
    """First iteration that ran after the change."""
    dead: tuple[Worker, ...]
    """Members that were lost."""
    nodes: tuple[int, ...] = ()
    """Machines that lost their last live worker, by `FailureDomains.domain_of`."""
    returned: tuple[Worker, ...]
    """Workers that joined with the change."""
    reasons: tuple[str, ...]
    """Reason for the loss of each worker in `dead`, in the same order."""
    live: int
    """Number of workers that take part after the change."""
    seconds: float
    """Seconds from the first cause (without one: when all paused) until all had begun."""
    broken: str | None = None
    """Cause other than a death, such as a broken connection; None: there was none."""
    meanwhile: int = 0
    """Number of iterations that were committed while layers were fetched for the change."""
    commit_gap_seconds: float | None = None
    """Seconds from the last commit before the change to the next; None: one is missing."""
    went_back_to: int | None = None
    """Iteration to which the run went back; None: it did not."""
    in_doubt: bool = False
    """True if the run went back because its state could not be trusted."""
    repeated: int = 0
    """Number of committed iterations that are run again because the run went back."""
    rebalanced: bool = False
    """True if only layers have moved between members, to a better schedule."""

    def __str__(self) -> str:
        # Why: losses and returns, else a broken connection or moved layers.
        lost = [f"so that machine {machine} is lost" for machine in self.nodes]
        back = [f"worker {worker} is back" for worker in self.returned]
        causes = (
            ", ".join([*self.reasons, *lost, *back])
            or self.broken
            or ("layers have moved" if self.rebalanced else "a connection broke")
        )
        # What is run again, and then what follows.
        again = ""
        if self.went_back_to is not None:
            why = "" if self.in_doubt else "no live worker had all layers, so "
            iterations = (
                "1 iteration is" if self.repeated == 1 else f"{self.repeated} iterations are"
            )
            again = (
                f": {why}the run went back to iteration {self.went_back_to}, and {iterations} run "
                "again, with the same numbers"
            )
        workers = "1 worker" if self.live == 1 else f"{self.live} workers"
        return (
            f"{causes}{again}: iteration {self.iteration} runs on {workers}, "
            f"{self.seconds:.2f} s later"
        )


class RecoveryClock(msgspec.Struct, frozen=True, kw_only=True):
    """Clock that measures recoveries, each over one or several orders, by `time.monotonic`."""

    began: float | None = None
    """Time at which the present recovery began; None: there is none."""
    ordered_at: float = 0.0
    """Time of the last order to train."""
    deaths: tuple[tuple[Worker, str], ...] = ()
    """Members lost since the last recovery ended, each with the reason."""
    # Fields of the next `Recovery`.
    nodes: tuple[int, ...] = ()
    broken: str | None = None
    returned: frozenset[Worker] = frozenset()
    meanwhile: int = 0
    rebalanced: bool = False
    back_to: int | None = None
    in_doubt: bool = False
    repeated: int = 0
    committed_at: float | None = None
    """Time of the last commit; None before the first."""
    without_gap: int = 0
    """Number of recoveries that have ended since the last commit."""
    recoveries: tuple[Recovery, ...] = ()
    """All recoveries so far, in order."""

    def with_loss(self, worker: Worker, reason: str, since: float) -> "RecoveryClock":
        """Return the clock after the loss of a member, which did not respond since `since`.

        The recovery counts from then, but not from before the last order.
        """
        # Until the last order, nobody waited for this member.
        since = max(since, self.ordered_at)
        return replace(
            self,
            began=since if self.began is None else min(self.began, since),
            deaths=(*self.deaths, (worker, reason)),
            returned=self.returned - {worker},
        )

    def with_node_loss(self, machine: int) -> "RecoveryClock":
        """Return the clock after the loss of the last live worker of a machine."""
        return replace(self, nodes=(*self.nodes, machine))

    @property
    def dead_workers(self) -> tuple[Worker, ...]:
        """Members lost since the last recovery ended."""
        return tuple(worker for worker, _ in self.deaths)

    def with_begin(self, at: float) -> "RecoveryClock":
        """Return the clock with a recovery begun at time `at`, unless one is in progress."""
        return replace(self, began=at) if self.began is None else self

    def with_cause(self, why: str, at: float) -> "RecoveryClock":
        """Return the clock with a recovery begun for another reason than a death.

        A recovery in progress keeps its begin, and its reason if it has one; else these are `at`
        and `why`.
        """
        return replace(self.with_begin(at), broken=self.broken or why)

    def with_order(
        self, returned: Collection[Worker], meanwhile: int, at: float, *, rebalanced: bool = False
    ) -> "RecoveryClock":
        """Return the clock after an order at time `at`, with which the workers `returned` join.

        `meanwhile` is the number of iterations that were committed while layers were fetched for
        the order. `rebalanced` says that the order moves layers to a better schedule.
        """
        return replace(
            self,
            returned=self.returned.union(returned),
            rebalanced=rebalanced,
            meanwhile=meanwhile,
            ordered_at=at,
        )

    def with_rollback(self, iteration: int, repeated: int, *, in_doubt: bool) -> "RecoveryClock":
        """Return the clock after the run went back to `iteration`.

        `repeated` is the number of committed iterations that are run again; `in_doubt` says whether
        the state could not be trusted.
        """
        # The run may go back several times before all train again.
        before = iteration if self.back_to is None else min(self.back_to, iteration)
        return replace(
            self,
            back_to=before,
            repeated=self.repeated + repeated,
            in_doubt=self.in_doubt or in_doubt,
        )

    def with_end(self, iteration: int, live: int, at: float) -> "RecoveryClock":
        """Return the clock after a recovery, if one ends as `live` members begin `iteration`."""
        # Orders that begin a run, or only follow from changes of speed, end no recovery.
        if self.began is None:
            return self
        recovery = Recovery(
            iteration=iteration,
            dead=self.dead_workers,
            nodes=self.nodes,
            live=live,
            returned=tuple(sorted(self.returned)),
            reasons=tuple(reason for _, reason in self.deaths),
            seconds=at - self.began,
            broken=self.broken,
            meanwhile=self.meanwhile,
            went_back_to=self.back_to,
            in_doubt=self.in_doubt,
            repeated=self.repeated,
            rebalanced=self.rebalanced and not self.deaths and not self.returned,
        )
        # What led to this recovery is forgotten; orders and commits go on.
        return RecoveryClock(
            ordered_at=self.ordered_at,
            meanwhile=self.meanwhile,
            rebalanced=self.rebalanced,
            committed_at=self.committed_at,
            without_gap=self.without_gap + 1,
            recoveries=(*self.recoveries, recovery),
        )

    @property
    def last_recovery_seconds(self) -> float | None:
        """Seconds of the last recovery; None if there was none."""
        return self.recoveries[-1].seconds if self.recoveries else None

    def with_commit(self, at: float) -> "RecoveryClock":
        """Return the clock after a commit, which ends the commit gap of the last recoveries."""
        recoveries = self.recoveries
        if self.without_gap and self.committed_at is not None:
            before, last = recoveries[: -self.without_gap], recoveries[-self.without_gap :]
            gap = at - self.committed_at
            recoveries = (
                *before,
                *(replace(recovery, commit_gap_seconds=gap) for recovery in last),
            )
        return replace(self, committed_at=at, without_gap=0, recoveries=recoveries)


MAX_ORDERS_OF_JOINING = 2
"""Empty orders in a row after which a worker that just joined is given up."""
MAX_ORDERS_OF_MEMBERS = 10
"""Empty orders in a row after which a member or the run is given up."""
MAX_STALLED_ORDERS = 2
"""Stalled orders (`EmptyOrders.stalled`) after which a member or the run is given up."""


class EmptyOrders(msgspec.Struct, frozen=True, kw_only=True):
    """Record of empty orders in a row, and of the workers named as their cause."""

    number: int = 0
    """Number of empty orders in a row."""
    stalled: int = 0
    """Number of empty orders that ended because all members waited for each other."""
    counts: Mapping[Worker, int] = {}
    """Number of times that each worker has been named in empty orders."""
    alone: frozenset[Worker] = frozenset()
    """Workers that failed without naming another, as with a wrong network interface."""
    joined: frozenset[Worker] = frozenset()
    """Workers that have become members since the last commit."""
    named: tuple[Worker, ...] = ()
    """Workers named in the current order, once for each report."""
    reason: str | None = None
    """Reason of the first report in the current order; None if there is none."""
    has_stalled: bool = False
    """True if the current order ended because all members waited for each other."""

    def with_report(
        self, named: Collection[Worker], reason: str, *, stalled: bool = False
    ) -> "EmptyOrders":
        """Return the record after a report that names workers as causes of the order's end.

        `reason` says in words why it ended, and `stalled` that the members waited for each other.
        """
        return replace(
            self,
            named=(*self.named, *named),
            reason=self.reason or reason,
            alone=self.alone.union(named) if len(named) == 1 else self.alone,
            has_stalled=self.has_stalled or stalled,
        )

    def with_order(self, joined: Collection[Worker]) -> "EmptyOrders":
        """Return the record at the start of an order, with which `joined` become members."""
        return replace(self.without_current(), joined=self.joined.union(joined))

    def without_current(self) -> "EmptyOrders":
        """Return the record without the reports of the current order."""
        return replace(self, named=(), reason=None, has_stalled=False)

    def with_current_counted(self) -> "EmptyOrders":
        """Return the record after the current order has ended empty."""
        return replace(
            self.without_current(),
            number=self.number + 1,
            stalled=self.stalled + self.has_stalled,
            counts=Counter(self.counts) + Counter(self.named),
        )

    def without_workers(self, workers: Collection[Worker]) -> "EmptyOrders":
        """Return the record after the loss of `workers`.

        If one of them was named as the cause of an earlier empty order, counting begins anew;
        otherwise only the reports of the current order are dropped.
        """
        # A loss explains why the order ended, and a named worker why earlier ones did.
        if not any(worker in self.counts for worker in workers):
            return replace(self.without_current(), joined=self.joined.difference(workers))
        return EmptyOrders(joined=self.joined.difference(workers))

    @property
    def has_ended_too_many(self) -> bool:
        """True after so many empty orders that a member or the run is given up."""
        return self.number >= MAX_ORDERS_OF_MEMBERS or self.stalled >= MAX_STALLED_ORDERS

    def find_culprit(self, members: Collection[Worker]) -> Worker | None:
        """Return the member to give up after too many empty orders; None without one.

        The member that was named most often is given up (the last of several), after fewer orders
        if it has joined since the last commit. Of the others, none is if all members have been
        named equally often, or most have failed alone: then no single one is likely at fault.
        """
        counts = {worker: self.counts.get(worker, 0) for worker in sorted(members)}
        highest = max(counts.values(), default=0)
        joined = [
            worker
            for worker, count in counts.items()
            if worker in self.joined and count == highest > 0
        ]
        # A worker that has just joined is less of a loss than a member.
        if joined and (self.number >= MAX_ORDERS_OF_JOINING or self.stalled):
            return joined[-1]
        # If the network as a whole is at fault, no single member stands out.
        if (
            not self.has_ended_too_many
            or len(set(counts.values())) < 2
            or 2 * len(self.alone.intersection(counts)) > len(counts)
        ):
            return None
        return max(worker for worker, count in counts.items() if count == highest)


NO_EMPTY_ORDERS = EmptyOrders()
