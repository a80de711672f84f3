"""Recoveries: changes of members, and how long each took."""

import time
from collections.abc import Collection

import msgspec

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
    """The pause: from the first death, or from when all had stopped, until the first worker began its first op."""
    broken: str | None = None
    """Where it began with a connection that broke: who lost it, to whom, and why."""
    meanwhile: int = 0
    """Iterations that were committed while layers were fetched for it."""
    commit_gap_seconds: float | None = None
    """From the last commit before to the first one after: the pause, what was lost, and an iteration. None: there were
    not both in this run."""

    went_back_to: int | None = None
    """Where nobody held some layer any more: the iteration of the checkpoint that the run went back to, or its first.
    """
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
            f": no live worker had all layers, so the run went back to iteration {self.went_back_to}, and "
            f"{self.repeated} iterations are run again, with the same numbers")
        return f"{causes}{again}: iteration {self.iteration} runs on {self.live} workers, {self.seconds:.2f} s later"


class RecoveryClock:
    """Measures recoveries, each of which may take several orders."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._ordered = 0.0
        self._dead: list[tuple[Worker, str]] = []
        self._nodes: list[int] = []
        self._broken: str | None = None
        self._returned: set[Worker] = set()
        self._meanwhile = 0
        self._settled = False
        self._back: tuple[int | None, int] = None, 0
        self._committed: float | None = None
        self._without_gap = 0
        """Recoveries, the last ones, after which nothing has been committed."""
        self.recoveries: list[Recovery] = []

    def lost(self, worker: Worker, reason: str, since: float) -> None:
        """A member is gone, since a time by time.monotonic. Time before the last order does not count."""
        since = max(since, self._ordered)
        self._began = since if self._began is None else min(self._began, since)
        self._dead.append((worker, reason))
        self._returned.discard(worker)

    def node_lost(self, node: int) -> None:
        """With the last one, all workers of a node are gone."""
        self._nodes.append(node)

    @property
    def dead(self) -> list[Worker]:
        """Those lost since the last recovery has ended."""
        return [worker for worker, _ in self._dead]

    def begin(self) -> None:
        """Members stop, unless they have before."""
        if self._began is None:
            self._began = time.monotonic()

    def broke(self, worker: Worker, reason: str) -> None:
        """A member has lost a connection. What others then lose follows from it."""
        self.begin()
        self._broken = self._broken or f"worker {worker} lost a connection, {reason}"

    def took_over(self, found: int) -> None:
        """Another coordinator was lost, and this one has found so many workers."""
        self.begin()
        self._broken = f"node 0 was started anew, and has found {found} workers"

    def ordered(self, returned: Collection[Worker], meanwhile: int, *, settled: bool = False) -> None:
        """An order is given, with workers that come in, or with layers that have moved."""
        self._returned.update(returned)
        self._settled = settled
        self._meanwhile, self._ordered = meanwhile, time.monotonic()

    def went_back(self, iteration: int, repeated: int) -> None:
        """Layers were lost: iterations from this one on are run again."""
        before, already = self._back
        self._back = iteration if before is None else min(before, iteration), already + repeated

    def end(self, iteration: int, live: int) -> Recovery | None:
        """A member runs its first op; None where that ends no recovery."""
        if self._began is None:
            return None
        recovery = Recovery(
            iteration=iteration, dead=tuple(self.dead), nodes=tuple(self._nodes), live=live,
            returned=tuple(sorted(self._returned)), reasons=tuple(reason for _, reason in self._dead),
            seconds=time.monotonic() - self._began, broken=self._broken, meanwhile=self._meanwhile,
            went_back_to=self._back[0], repeated=self._back[1],
            settled=self._settled and not self._dead and not self._returned)
        self._began, self._dead, self._nodes, self._broken = None, [], [], None
        self._returned, self._back = set(), (None, 0)
        self.recoveries.append(recovery)
        self._without_gap += 1
        return recovery

    @property
    def last_seconds(self) -> float | None:
        """How long the last one took."""
        return self.recoveries[-1].seconds if self.recoveries else None

    def committed(self) -> None:
        """An iteration was committed."""
        now = time.monotonic()
        if self._without_gap and self._committed is not None:
            gap = now - self._committed
            self.recoveries[-self._without_gap:] = [msgspec.structs.replace(one, commit_gap_seconds=gap)
                                                 for one in self.recoveries[-self._without_gap:]]
        self._committed, self._without_gap = now, 0
