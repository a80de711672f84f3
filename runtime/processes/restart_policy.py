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
"""Faults that a worker may have in an hour, unless the user sets another number."""
HOUR_SECONDS = 3600.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 300.0
SAME_FAULT_SECONDS = 10.0
"""Interval within which crashes of several workers of a node count as one fault."""
NODE_FAULT_FACTOR = 2
"""Faults that a node may have, as a multiple of those of a worker."""


class RestartDecision(NamedTuple):
    """Decision whether and when a crashed worker is started again."""

    pause_seconds: float | None
    """Time until the worker is started again. None: the worker stays out."""
    reason: str


CrashTimes = tuple[tuple[Worker, tuple[float, ...]], ...]
"""Times of each worker's crashes in the last hour, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class FaultHistory:
    """Times of all workers' faults (crashes) in the last hour, by `time.monotonic`.

    After a fault, the worker is started again when a pause has passed, unless it has had more than
    `limit` faults in the last hour, or its node too many. If `limit` is 0, no worker is started
    again.
    """

    limit: int
    of: Mapping[Worker, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def from_crashes(cls, limit: int, crashes: CrashTimes) -> "FaultHistory":
        """Return a history that begins with the crashes recorded by a previous node 0."""
        epoch_offset = time.time() - time.monotonic()
        return cls(limit, {worker: tuple(at - epoch_offset for at in times) for worker, times in crashes})

    @property
    def crash_times(self) -> CrashTimes:
        """Times of all crashes, in seconds since 1970, for a later node 0."""
        epoch_offset = time.time() - time.monotonic()
        return tuple((worker, tuple(round(at + epoch_offset, 3) for at in times)) for worker, times in self.of.items())

    def with_fault(self, worker: Worker, mates: Collection[Worker], now: float) -> tuple["FaultHistory",
                                                                                         RestartDecision]:
        """Return the history with a fault at time `now`, and when to start again.

        `now` is of `time.monotonic`. All workers of its node are in `mates`: if a node has too many
        faults, its workers stay out.
        """
        since = now - HOUR_SECONDS
        own_faults = (*(at for at in self.of.get(worker, ()) if at > since), now)
        after = FaultHistory(self.limit, {**self.of, worker: own_faults})
        node_faults = sorted(at for mate in {worker, *mates} for at in after.of.get(mate, ()) if at > since)
        distinct = 1 + sum(later - at > SAME_FAULT_SECONDS for at, later in pairwise(node_faults))
        count_text = f"{len(own_faults)} fault{'s' if len(own_faults) > 1 else ''} within an hour"
        if not self.limit:
            return self, RestartDecision(None, "")
        if len(own_faults) > self.limit:
            return after, RestartDecision(None, f"worker {worker} stays out: {count_text}")
        if distinct > NODE_FAULT_FACTOR * self.limit:
            return after, RestartDecision(None,
                                          f"worker {worker} stays out: its node has had {distinct} faults within an "
                                          f"hour")
        pause = min(FIRST_PAUSE_SECONDS * 2 ** (len(own_faults) - 1), LONGEST_PAUSE_SECONDS)
        return after, RestartDecision(pause, f"worker {worker} is started again in {pause:g} s: {count_text}")


MAX_STARTS = 60
"""Largest number of starts of one worker in `WINDOW_SECONDS`; one takes most of a second."""
WINDOW_SECONDS = 60.0


class StartLimitError(RuntimeError):
    """Error, in one line, for a request to start a foreign worker, or too often."""


class StartLimit:
    """Limit on the starts of each worker of this node: `MAX_STARTS` in `WINDOW_SECONDS`."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers = frozenset(workers)
        self._starts: defaultdict[Worker, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_STARTS))

    def count_start(self, worker: Worker) -> None:
        """Count a start. Raises StartLimitError if it is one too many, or not of this node."""
        if worker not in self._workers:
            raise StartLimitError(f"node 0 wants to start worker {worker}, which is not a worker of this node")
        starts, now = self._starts[worker], time.monotonic()
        if len(starts) == MAX_STARTS and now - starts[0] < WINDOW_SECONDS:
            raise StartLimitError(f"node 0 wants to start worker {worker} more than {MAX_STARTS} times in "
                                  f"{WINDOW_SECONDS:.0f} s")
        starts.append(now)
