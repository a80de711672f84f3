"""Taking over: a coordinator that is started anew finds the workers of one that has died, and what they know.

Whoever lives holds still, and looks for a coordinator at the same address. Each worker says how far it has come, and
what it holds (`runtime.protocol.to_coordinator.Known`). The losses that the dead coordinator has written say what it
had committed. Then all that were found are as if they had paused, and the next order goes on from there; whoever was
not found counts as lost.

No worker steps an iteration before the one before it is committed, so that what all can go back to is one of the last
two: the last iteration that any has stepped, where it was committed, else the one before. A worker may have begun the
step of an iteration of which it reports nothing any more: then the one before it was committed, whatever was written,
and it cannot be undone there (`Known.begun`).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap
from slipstream.runtime.errors import NobodyLeftError
from slipstream.runtime.protocol.to_coordinator import NOTHING_KEPT, Kept, Known
from slipstream.runtime.protocol.to_worker import Factor
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

    order: int
    """The last."""
    committed: int
    """The last iteration that is committed."""
    losses: tuple[float, ...]
    """Of all committed ones of the run; nan where nobody knows one."""
    unwritten: range
    """Those that the dead coordinator has not written."""
    factor: Factor | None
    """Of the last one, where anybody knows one."""
    kept: Mapping[Worker, Kept]
    """What each member holds that was found; nothing of one that cannot go back to `committed`. Who was about to take
    part is none."""
    missing: tuple[Worker, ...]
    """Members that were not found."""
    doubted: bool
    """Whether the last order has ended as copies of what its members hold differ: the run is to go back."""


class Rejoining(msgspec.Struct, frozen=True, kw_only=True):
    """The phase in which workers are looked for; what they know. All times are by time.monotonic."""

    losses: Sequence[float] | None
    """Those that were written; None: they are not known."""
    first: int
    """Where the run began."""
    gone: frozenset[Worker] = frozenset()
    """Workers that have died with the last coordinator."""
    expected: frozenset[Worker]
    """Those that are waited for where no order has been given."""
    grid: frozenset[Worker]
    """All workers of the job."""
    began: float
    known: PersistentMap[Worker, Known] = PersistentMap()
    came: frozenset[Worker] = frozenset()
    """All that have, also those lost again: who comes and goes holds up nobody."""
    came_last: float | None = None
    """When the last of them came."""

    def ready(self, worker: Worker, known: Known | None, at: float) -> "Rejoining":
        """A worker has come. Before the first commit, one that has just started is as good as any."""
        if known is None:
            if self.losses:
                return self
            known = Known(0, (), self.first - 1, NOTHING_KEPT, None, pending=False)
        new = replace(self, known=self.known.adding(worker, known))
        return new if worker in self.came else replace(new, came=self.came | {worker}, came_last=at)

    def lost(self, workers: Collection[Worker]) -> "Rejoining":
        """They are gone again."""
        return replace(self, known=self.known.without(*workers))

    @property
    def missing(self) -> frozenset[Worker]:
        """Members of the last order that have not come."""
        last_order = self._order
        if not last_order:
            return self.expected.difference(self.known)
        failed = next(known.failed for known in self.known.values() if known.order == last_order)
        return self.grid.difference(failed, self.known)

    @property
    def _order(self) -> int:
        return max((known.order for known in self.known.values()), default=0)

    def over(self, at: float) -> bool:
        """Whether all have come that can, or will. Raises NobodyLeftError where nobody has, and nobody will."""
        if not self.known and at - self.began > FIND_SECONDS:
            raise NobodyLeftError("nobody is left of the run that another node 0 has led here")
        if not self.known or self.came_last is None:
            return False
        patience = REJOIN_SECONDS if self._order else START_SECONDS
        return self.missing <= self.gone or at - self.came_last > patience

    def found(self) -> Found:
        """What to go on from."""
        last = None if self.losses is None else self.first + len(self.losses) - 1
        everyone, last_order = self.known.values(), self._order
        holders = [known for known in everyone if known.kept.layers and known.order == last_order]
        before = max((max(known.iteration - 1, known.begun) for known in holders), default=self.first - 1)
        # A file may end with lines that were given up, where node 0 died before it had removed them.
        stepped = min((known.iteration - known.behind for known in holders), default=before if last is None else last)
        committed = before if last is None else min(max(last, before), stepped)
        factors = {one.validated.iteration: one.validated for one in everyone if one.validated is not None}
        pending = any(known.pending and known.iteration == committed for known in everyone)
        if pending and committed not in factors:
            committed -= 1  # nobody knows how it was stepped: all undo it
        told = {iteration: loss for known in everyone for iteration, loss in known.losses.items()}
        written = tuple(self.losses or ())[:committed + 1 - self.first]
        unwritten = range(self.first + len(written), committed + 1)
        return Found(order=last_order, committed=committed, factor=factors.get(committed), unwritten=unwritten,
                     losses=(*written, *(told.get(iteration, math.nan) for iteration in unwritten)),
                     missing=tuple(sorted(self.missing)) if last_order else (),
                     doubted=any(known.doubted and known.order == last_order for known in everyone),
                     kept={worker: known.kept if _fits(known, committed) else NOTHING_KEPT
                           for worker, known in self.known.items() if known.order or not last_order})


def _fits(known: Known, committed: int) -> bool:
    return known.begun <= committed <= known.iteration <= committed + 1
