"""How many processes a node starts because another one says so."""

import time
from collections import defaultdict, deque
from collections.abc import Iterable

from slipstream.schedules.schedule import Worker

STARTS = 60
"""Of one worker in `SECONDS`; one that starts takes most of a second."""
SECONDS = 60.0


class StartLimitError(RuntimeError):
    """Node 0 wants more processes than this node starts. The message is one line."""


class StartLimit:
    """Counts the starts of each of this node's workers. Each of them has one process at a time."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers = frozenset(workers)
        self._starts: defaultdict[Worker, deque[float]] = defaultdict(lambda: deque(maxlen=STARTS))

    def require(self, worker: Worker) -> None:
        """Count a start. Raises StartLimitError where it is one too many."""
        if worker not in self._workers:
            raise StartLimitError(f"node 0 wants to start worker {worker}, which is not one of this node")
        starts, now = self._starts[worker], time.monotonic()
        if len(starts) == STARTS and now - starts[0] < SECONDS:
            raise StartLimitError(f"node 0 wants to start worker {worker} more than {STARTS} times in "
                                  f"{SECONDS:.0f} s")
        starts.append(now)
