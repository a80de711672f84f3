"""Limit the number of processes that a node starts at the request of node 0."""

import time
from collections import defaultdict, deque
from collections.abc import Iterable

from slipstream.schedules.schedule import Worker

MAX_STARTS = 60
"""Largest number of starts of one worker in `WINDOW_SECONDS`. A single start takes most of a second."""
WINDOW_SECONDS = 60.0


class StartLimitError(RuntimeError):
    """Error for a request of node 0 to start a worker too often, or one that is not of this node. The message is one
    line."""


class StartLimit:
    """Limit on the starts of each worker of this node: `MAX_STARTS` in `WINDOW_SECONDS`. A worker that is alive is not
    started a second time."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers = frozenset(workers)
        self._starts: defaultdict[Worker, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_STARTS))

    def count_start(self, worker: Worker) -> None:
        """Count a start of `worker`. Raises StartLimitError if it exceeds the limit, or the worker is not one of this
        node."""
        if worker not in self._workers:
            raise StartLimitError(f"node 0 wants to start worker {worker}, which is not a worker of this node")
        starts, now = self._starts[worker], time.monotonic()
        if len(starts) == MAX_STARTS and now - starts[0] < WINDOW_SECONDS:
            raise StartLimitError(f"node 0 wants to start worker {worker} more than {MAX_STARTS} times in "
                                  f"{WINDOW_SECONDS:.0f} s")
        starts.append(now)
