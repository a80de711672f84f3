"""Recoveries: changes of members, and how long each took."""

from collections.abc import Collection

import msgspec
from msgspec.structs import replace

from slipstream.schedules.schedule import Worker


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the workers that take part."""

    iteration: int
    """The first one that ran with the new workers."""
    dead: tuple[Worker, ...]
    nodes: tuple[int, ...] = ()
    """Those (machines) all of whose workers are gone with the dead ones."""
    returned: tuple[Worker, ...]
    reasons: tuple[str, ...]
    """Of each death."""
    live: int
    """Workers that take part from then on."""
    seconds: float
    """The pause: from the first death, or from when all had stopped, until the last worker began its first op."""
    broken: str | None = None
    """Where it began with a connection that broke: who lost it, to whom, and why."""
    meanwhile: int = 0
    """Iterations that were committed while layers were fetched for it."""
    commit_gap_seconds: float | None = None
    """From the last commit before to the first one after: the pause, what was lost, and an iteration. None: there were
    not both in this run."""

    went_back_to: int | None = None
    """Where nobody held some layer any more, or copies of it differed: the iteration of the checkpoint that the run
    went back to, or its first."""
    in_doubt: bool = False
    """Whether it went back because copies differed."""
    repeated: int = 0
    """Committed iterations that are run again for that; their numbers are the same."""
    settled: bool = False
    """Whether layers have moved between members, and nothing else has changed."""

    def __str__(self) -> str:
        lost = [f"so that node {node} is lost" for node in self.nodes]
        back = [f"worker {worker} is back" for worker in self.returned]
        causes = ", ".join([*self.reasons, *lost, *back]) or self.broken or (
            "layers have moved" if self.settled else "a connection broke")
        again = "" if self.went_back_to is None else (
            f": {'' if self.in_doubt else 'no live worker had all layers, so '}the run went back to iteration "
            f"{self.went_back_to}, and "
            f"{self.repeated} iterations are run again, with the same numbers")
        return f"{causes}{again}: iteration {self.iteration} runs on {self.live} workers, {self.seconds:.2f} s later"


class RecoveryClock(msgspec.Struct, frozen=True, kw_only=True):
    """Measures recoveries, each of which may take several orders. All times are by time.monotonic."""

    began: float | None = None
    ordered_at: float = 0.0
    deaths: tuple[tuple[Worker, str], ...] = ()
    """Since the last recovery has ended."""
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
    """Recoveries, the last ones, after which nothing has been committed."""
    recoveries: tuple[Recovery, ...] = ()

    def lost(self, worker: Worker, reason: str, since: float) -> "RecoveryClock":
        """A member is gone, since a time. Time before the last order does not count."""
        since = max(since, self.ordered_at)
        return replace(self, began=since if self.began is None else min(self.began, since),
                       deaths=(*self.deaths, (worker, reason)), returned=self.returned - {worker})

    def node_lost(self, node: int) -> "RecoveryClock":
        """With the last one, all workers of a node are gone."""
        return replace(self, nodes=(*self.nodes, node))

    @property
    def dead(self) -> tuple[Worker, ...]:
        """Those lost since the last recovery has ended."""
        return tuple(worker for worker, _ in self.deaths)

    def begin(self, at: float) -> "RecoveryClock":
        """Members stop, unless they have before."""
        return replace(self, began=at) if self.began is None else self

    def broke(self, why: str, at: float) -> "RecoveryClock":
        """A connection has broken, or a coordinator was lost. What is then lost follows from it."""
        return replace(self.begin(at), broken=self.broken or why)

    def ordered(self, returned: Collection[Worker], meanwhile: int, at: float, *, settled: bool = False
                ) -> "RecoveryClock":
        """An order is given, with workers that come in, or with layers that have moved."""
        return replace(self, returned=self.returned.union(returned), settled=settled, meanwhile=meanwhile,
                       ordered_at=at)

    def went_back(self, iteration: int, repeated: int, *, in_doubt: bool) -> "RecoveryClock":
        """Layers were lost, or are in doubt: iterations from this one on are run again."""
        before = iteration if self.back_to is None else min(self.back_to, iteration)
        return replace(self, back_to=before, repeated=self.repeated + repeated, in_doubt=self.in_doubt or in_doubt)

    def end(self, iteration: int, live: int, at: float) -> "RecoveryClock":
        """All members have begun their first op: that ends the recovery, where there is one."""
        if self.began is None:
            return self
        recovery = Recovery(
            iteration=iteration, dead=self.dead, nodes=self.nodes, live=live, returned=tuple(sorted(self.returned)),
            reasons=tuple(reason for _, reason in self.deaths), seconds=at - self.began, broken=self.broken,
            meanwhile=self.meanwhile, went_back_to=self.back_to, in_doubt=self.in_doubt, repeated=self.repeated,
            settled=self.settled and not self.deaths and not self.returned)
        return RecoveryClock(ordered_at=self.ordered_at, meanwhile=self.meanwhile, settled=self.settled,
                             committed_at=self.committed_at, without_gap=self.without_gap + 1,
                             recoveries=(*self.recoveries, recovery))

    @property
    def last_seconds(self) -> float | None:
        """How long the last one took."""
        return self.recoveries[-1].seconds if self.recoveries else None

    def committed(self, at: float) -> "RecoveryClock":
        """An iteration was committed."""
        recoveries = self.recoveries
        if self.without_gap and self.committed_at is not None:
            before, last = recoveries[:-self.without_gap], recoveries[-self.without_gap:]
            gap = at - self.committed_at
            recoveries = (*before, *(replace(one, commit_gap_seconds=gap) for one in last))
        return replace(self, committed_at=at, without_gap=0, recoveries=recoveries)
