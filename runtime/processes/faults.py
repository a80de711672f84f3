"""Faults: whether, and when, a worker that has crashed is started again.

Most faults pass: a bit that has flipped, a link that was down, memory that others had taken. A worker whose code or
device is broken would crash for ever, and each return costs the others a moment. So each pause is twice the one before,
and who has too many faults in an hour stays out, as do all of a node that has.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from slipstream.schedules.schedule import Worker

FAULTS_PER_HOUR = 6
"""Of a worker, unless the user says otherwise."""
HOUR_SECONDS = 3600.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 300.0
TOGETHER_SECONDS = 10.0
"""Workers of a node that crash within so long have one fault: the node's."""
OF_A_NODE = 2
"""How many times as many faults a node may have as a worker."""


class Verdict(NamedTuple):
    """What follows from a fault."""

    pause_seconds: float | None
    """Until the worker is started again; None: it stays out."""
    reason: str


Crashes = tuple[tuple[Worker, tuple[float, ...]], ...]
"""When each worker has crashed in the last hour, in seconds since 1970: for a node 0 that is started anew."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Those of the last hour, by time.monotonic. `limit` is how many a worker may have; 0: nobody is started again."""

    limit: int
    of: Mapping[Worker, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def after(cls, limit: int, crashes: Crashes) -> "Faults":
        """With those that another node 0 has left."""
        since = time.time() - time.monotonic()
        return cls(limit, {worker: tuple(at - since for at in times) for worker, times in crashes})

    @property
    def crashes(self) -> Crashes:
        """What to leave for another node 0."""
        since = time.time() - time.monotonic()
        return tuple((worker, tuple(round(at + since, 3) for at in times)) for worker, times in self.of.items())

    def add(self, worker: Worker, mates: Collection[Worker], now: float) -> tuple["Faults", Verdict]:
        """With a fault of a worker at a time; `mates` are all workers of its node."""
        since = now - HOUR_SECONDS
        mine = (*(at for at in self.of.get(worker, ()) if at > since), now)
        after = Faults(self.limit, {**self.of, worker: mine})
        node = sorted(at for mate in {worker, *mates} for at in after.of.get(mate, ()) if at > since)
        apart = 1 + sum(later - at > TOGETHER_SECONDS for at, later in pairwise(node))
        count = f"{len(mine)} fault{'s' if len(mine) > 1 else ''} within an hour"
        if not self.limit:
            return self, Verdict(None, "")
        if len(mine) > self.limit:
            return after, Verdict(None, f"worker {worker} stays out: {count}")
        if apart > OF_A_NODE * self.limit:
            return after, Verdict(None, f"worker {worker} stays out: its node has had {apart} faults within an hour")
        pause = min(FIRST_PAUSE_SECONDS * 2 ** (len(mine) - 1), LONGEST_PAUSE_SECONDS)
        return after, Verdict(pause, f"worker {worker} is started again in {pause:g} s: {count}")
