"""Availability traces: which machines of a fleet are alive, over time.

A fleet has numbered *places*. At any time a place holds one machine or none. A trace says which places hold a machine
at the beginning, and what changes when. Times are seconds from the beginning.
"""

import random
from collections.abc import Iterator
from itertools import pairwise

import msgspec


class Change(msgspec.Struct, frozen=True):
    """What changes at one instant. Both lists are ascending, and no place is in both."""

    seconds: float
    removed: tuple[int, ...] = ()
    """Places that lost their machine."""
    added: tuple[int, ...] = ()
    """Places that got one."""


class AvailabilityTrace(msgspec.Struct, frozen=True, kw_only=True):
    """When the machines of a fleet come and go. Changes are in the order of time, at most one an instant."""

    name: str
    places: int
    live: tuple[int, ...]
    """Places with a machine at the beginning, ascending."""
    changes: tuple[Change, ...]
    length_seconds: float
    notes: tuple[str, ...] = ()
    """What was corrected or assumed when the trace was made, one line each."""

    def counts(self) -> Iterator[tuple[float, int]]:
        """Pairs (seconds, machines alive from then on). The first is at 0."""
        alive = len(self.live)
        yield 0.0, alive
        for change in self.changes:
            alive += len(change.added) - len(change.removed)
            yield change.seconds, alive

    @property
    def removals(self) -> int:
        """How many machines are lost in all."""
        return sum(len(change.removed) for change in self.changes)

    @property
    def mean_live(self) -> float:
        """Machines alive, averaged over time."""
        points = [*self.counts(), (self.length_seconds, 0)]
        area = sum(alive * (after - start) for (start, alive), (after, _) in pairwise(points))
        return area / self.length_seconds

    @property
    def seconds_between_failures(self) -> float:
        """Mean time between instants with removals; the length of the trace where there is at most one."""
        return self.length_seconds / max(1, sum(bool(change.removed) for change in self.changes))


def fit_to_job(trace: AvailabilityTrace, workers: int, seed: int = 0) -> AvailabilityTrace:
    """The trace for a job of so many workers, with places 0 to workers - 1.

    A job smaller than the fleet gets places drawn at random. So it sees the fleet's failure rate per machine, and the
    same share of machines alive. For a job larger than the fleet, each place of the trace stands for several
    neighbouring workers, which fail together. Raises ValueError for a trace without places.
    """
    if trace.places < 1 or workers < 1:
        raise ValueError(f"a trace of {trace.places} places cannot be fitted to {workers} workers")
    if workers == trace.places:
        return trace
    if workers < trace.places:
        chosen = sorted(random.Random(seed).sample(range(trace.places), workers))
        members: dict[int, tuple[int, ...]] = {place: (index,) for index, place in enumerate(chosen)}
        note = f"the job's {workers} workers are drawn at random from the trace's {trace.places} places"
    else:
        edges = [workers * place // trace.places for place in range(trace.places + 1)]
        members = {place: tuple(range(edges[place], edges[place + 1])) for place in range(trace.places)}
        note = f"each of the trace's {trace.places} places stands for {workers / trace.places:.3g} workers"

    def renamed(places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(index for place in places for index in members.get(place, ())))

    changes = (Change(change.seconds, renamed(change.removed), renamed(change.added)) for change in trace.changes)
    return msgspec.structs.replace(trace, places=workers, live=renamed(trace.live), notes=(*trace.notes, note),
                                   changes=tuple(change for change in changes if change.removed or change.added))
