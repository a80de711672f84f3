"""Decide whether and when a worker is started again, and limit starts.

Most faults are transient: a flipped bit, a network link that was down, memory that other programs
had taken. A worker with broken code or a broken device would crash forever, and each return costs
the other workers a moment. So each pause before a restart is twice the one before. A worker with
too many faults in an hour stays out, and so do all workers of a node with too many.
"""

import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from slipstream.schedules.schedule import Worker

FAULTS_PER_HOUR = 6
"""Default of the faults that a worker may have in an hour and still return."""
HOUR_SECONDS = 3600.0
FIRST_PAUSE_SECONDS = 1.0
"""Time before the first restart; each further one is twice as long."""
LONGEST_PAUSE_SECONDS = 300.0
"""Longest time before a restart."""
SAME_FAULT_SECONDS = 10.0
"""Interval within which crashes of several workers of a node count as one fault."""
NODE_FAULT_FACTOR = 2
"""Faults that a node may have, as a multiple of those of a worker."""


class RestartDecision(NamedTuple):
    """Decision whether and when a crashed worker is started again."""

    pause_seconds: float | None
    """Time until the worker is started again. None: the worker stays out."""
    reason: str
    """Line about the decision for the user; empty if no worker is ever started again."""


CrashTimes = tuple[tuple[Worker, tuple[float, ...]], ...]
"""Times of each worker's crashes in the hour before its last, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class FaultHistory:
    """Times of each worker's faults (crashes) in the hour before its last, by `time.monotonic`.

    A worker is started again after each of its first `limit` faults in an hour, unless its node has
    had too many; if `limit` is 0, no fault is recorded, and no worker is started again.
    """

    limit: int
    of: Mapping[Worker, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def from_crashes(cls, limit: int, crashes: CrashTimes) -> "FaultHistory":
        """Return a history that begins with the crashes recorded by a previous node 0."""
        # Another process has another monotonic clock, so times are kept in seconds since 1970.
        epoch_offset = time.time() - time.monotonic()
        faults = {}
        for worker, times in crashes:
            faults[worker] = tuple(at - epoch_offset for at in times)
        return cls(limit, faults)

    @property
    def crash_times(self) -> CrashTimes:
        """Times of all crashes, in seconds since 1970, which a later node 0 begins with."""
        epoch_offset = time.time() - time.monotonic()
        crashes = []
        for worker, times in self.of.items():
            crashes.append((worker, tuple(round(at + epoch_offset, 3) for at in times)))
        return tuple(crashes)

    def with_fault(
        self, worker: Worker, mates: Collection[Worker], now: float
    ) -> tuple["FaultHistory", RestartDecision]:
        """Add a fault of `worker` at time `now`; return the new history and the decision.

        `mates` are the workers of the same node: `worker` also stays out if these have too many
        faults together.
        """
        # Count the faults of the worker and, as one if they come together, those of its node.
        since = now - HOUR_SECONDS
        own_faults = (*(at for at in self.of.get(worker, ()) if at > since), now)
        after = FaultHistory(self.limit, {**self.of, worker: own_faults})
        node_faults = sorted(
            at for mate in {worker, *mates} for at in after.of.get(mate, ()) if at > since
        )
        distinct = 1 + sum(later - at > SAME_FAULT_SECONDS for at, later in pairwise(node_faults))
        count_text = f"{len(own_faults)} fault{'s' if len(own_faults) > 1 else ''} within an hour"
        # Decide: too many of either, or a pause.
        if not self.limit:
            return self, RestartDecision(None, "")
        if len(own_faults) > self.limit:
            return after, RestartDecision(None, f"worker {worker} stays out: {count_text}")
        if distinct > NODE_FAULT_FACTOR * self.limit:
            return after, RestartDecision(
                None,
                f"worker {worker} stays out: its node has had {distinct} faults within an hour",
            )
        pause = min(FIRST_PAUSE_SECONDS * 2 ** (len(own_faults) - 1), LONGEST_PAUSE_SECONDS)
        return after, RestartDecision(
            pause, f"worker {worker} is started again in {pause:g} s: {count_text}"
        )


MAX_STARTS = 60
"""Starts of one worker that are allowed in `WINDOW_SECONDS`; each takes most of a second."""
WINDOW_SECONDS = 60.0


class StartLimitError(RuntimeError):
    """Error, in one line, for a start too many, or of another node's worker."""


class StartLimit:
    """Limit on how often node 0 may have a worker of this node started.

    The limit is `MAX_STARTS` of each worker in `WINDOW_SECONDS`.
    """

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers = frozenset(workers)
        self._starts: defaultdict[Worker, deque[float]] = defaultdict(
            lambda: deque(maxlen=MAX_STARTS)
        )

    def count_start(self, worker: Worker) -> None:
        """Count a start of a worker.

        Raises StartLimitError if it is one too many, or if the worker is not of this node.
        """
        if worker not in self._workers:
            raise StartLimitError(
                f"node 0 wants to start worker {worker}, which is not a worker of this node"
            )
        starts, now = self._starts[worker], time.monotonic()
        if len(starts) == MAX_STARTS and now - starts[0] < WINDOW_SECONDS:
            raise StartLimitError(
                f"node 0 wants to start worker {worker} more than {MAX_STARTS} times in "
                f"{WINDOW_SECONDS:.0f} s"
            )
        starts.append(now)
