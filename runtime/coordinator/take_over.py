"""Taking over: a coordinator that is started anew finds the workers of one that has died, and what they know.

Whoever lives holds still, and looks for a coordinator at the same address. Each worker says how far it has come, and
what it holds (`runtime.protocol.to_coordinator.Known`). The losses that the dead coordinator has written say what it
had committed. Then all that were found are as if they had paused, and the next order goes on from there; whoever was
not found counts as lost.

No worker steps an iteration before the one before it is committed, so that what all can go back to is one of the last
two: the last iteration that any has stepped, where it was committed, else the one before.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from slipstream.runtime.protocol.to_coordinator import Kept, Known
from slipstream.runtime.protocol.to_worker import Factor
from slipstream.schedules.layers import layers_in
from slipstream.schedules.schedule import Worker

FIND_SECONDS = 10.0
"""Whoever lives looks for a coordinator several times a second: when none has come for so long, none lives."""
REJOIN_SECONDS = 10.0
"""From one that comes to the next: a stuck worker takes a second to hold still, and thousands do not come at once."""
START_SECONDS = 60.0
"""The same where no order has been given yet: workers may be about to start."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a new coordinator goes on from."""

    number: int
    """Of the last order."""
    committed: int
    """The last iteration that is committed."""
    factor: Factor | None
    """Of that iteration, where anybody knows one."""
    loss: float | None
    """Of that iteration, where anybody knows a finite one."""
    holds: Mapping[Worker, frozenset[int]]
    """The layers of each member that was found; nothing of one that cannot go back to `committed`. Who was about
    to take part is none."""
    kept: Mapping[Worker, Kept]
    """And what they keep of optimizer states, where workers keep parts."""
    missing: tuple[Worker, ...]
    """Members that were not found."""


class TakeOver:
    """Collects what the workers know.

    Parameters
    ----------
    last
        The last iteration whose loss was written; None: that is not known.
    first
        Where the run began.
    gone
        Workers that have died with the last coordinator.
    expected
        Those that are waited for where no order has been given.
    grid
        All workers of the job.
    """

    def __init__(self, last: int | None, first: int, gone: Collection[Worker], expected: Collection[Worker],
                 grid: Collection[Worker]) -> None:
        self._last = last
        self._first = first
        self._gone = frozenset(gone)
        self._expected = frozenset(expected)
        self._grid = frozenset(grid)
        self._known: dict[Worker, Known] = {}
        self._began = time.monotonic()
        self._came: set[Worker] = set()
        """All that have, also those lost again: who comes and goes holds up nobody."""
        self._found: float | None = None
        """When the last of them came."""

    def ready(self, worker: Worker, known: Known) -> None:
        """A worker has come."""
        if worker not in self._came:
            self._came.add(worker)
            self._found = time.monotonic()
        self._known[worker] = known

    def lost(self, worker: Worker) -> None:
        """It is gone again."""
        self._known.pop(worker, None)

    @property
    def missing(self) -> frozenset[Worker]:
        """Members of the last order that have not come."""
        number = self._number
        if not number:
            return self._expected - self._known.keys()
        failed = next(known.failed for known in self._known.values() if known.order == number)
        return self._grid.difference(failed, self._known)

    @property
    def _number(self) -> int:
        return max((known.order for known in self._known.values()), default=0)

    def over(self) -> bool:
        """Whether all have come that can, or will."""
        if not self._known or self._found is None:
            return False
        patience = REJOIN_SECONDS if self._number else START_SECONDS
        return self.missing <= self._gone or time.monotonic() - self._found > patience

    def nobody(self) -> bool:
        """Whether nobody has come, and nobody will."""
        return not self._known and time.monotonic() - self._began > FIND_SECONDS

    def found(self) -> Found:
        """What to go on from."""
        holders = [known for known in self._known.values() if known.layers and known.order == self._number]
        before = max((max(known.iteration - 1, known.begun) for known in holders), default=self._first - 1)
        committed = before if self._last is None else max(self._last, before)
        everyone = self._known.values()
        factors = {one.validated.iteration: one.validated for one in everyone if one.validated is not None}
        pending = any(known.pending and known.iteration == committed for known in everyone)
        if pending and committed not in factors:
            committed -= 1  # nobody knows how it was stepped: all undo it
        return Found(number=self._number, committed=committed, factor=factors.get(committed),
                     loss=next((one.losses[committed] for one in everyone if committed in one.losses), None),
                     missing=tuple(sorted(self.missing)) if self._number else (),
                     holds={worker: layers_in(known.layers) if _fits(known, committed) else frozenset()
                            for worker, known in self._known.items() if known.order or not self._number},
                     kept={worker: known.kept for worker, known in self._known.items()
                           if known.kept is not None and _fits(known, committed)})


def _fits(known: Known, committed: int) -> bool:
    return known.begun <= committed <= known.iteration <= committed + 1
