"""Which machines of a fleet are alive, over time.

A fleet has numbered *places*; at any time a machine stands in a place or none does. A trace says who is there at the
beginning and what changes when. Times are seconds from the beginning.
"""

import random
from collections.abc import Iterator
from itertools import pairwise

import msgspec


class Change(msgspec.Struct, frozen=True):
    """At one instant, these places lost their machine and those got one; ascending, no place in both."""

    seconds: float
    removed: tuple[int, ...] = ()
    added: tuple[int, ...] = ()


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The life of a fleet; changes in the order of time, at most one an instant."""

    name: str
    places: int
    live: tuple[int, ...]
    """Places with a machine at the beginning, ascending."""
    changes: tuple[Change, ...]
    length_seconds: float
    notes: tuple[str, ...] = ()
    """What had to be mended or assumed, one line each, for the reader of a result."""

    def counts(self) -> Iterator[tuple[float, int]]:
        """(seconds, machines alive from then on), beginning at 0."""
        alive = len(self.live)
        yield 0.0, alive
        for change in self.changes:
            alive += len(change.added) - len(change.removed)
            yield change.seconds, alive

    @property
    def removals(self) -> int:
        """Machines lost."""
        return sum(len(change.removed) for change in self.changes)

    @property
    def mean_live(self) -> float:
        """Machines alive, averaged over time."""
        points = [*self.counts(), (self.length_seconds, 0)]
        area = sum(alive * (after - start) for (start, alive), (after, _) in pairwise(points))
        return area / self.length_seconds

    @property
    def seconds_between_failures(self) -> float:
        """Mean time from one instant with removals to the next; the whole length when there is at most one."""
        return self.length_seconds / max(1, sum(bool(change.removed) for change in self.changes))


def fit(trace: Trace, workers: int, seed: int = 0) -> Trace:
    """The trace as it meets a job of so many workers, whose places it then numbers 0 to workers - 1.

    A job smaller than the fleet runs on places drawn at random from it, so that it sees the fleet's rate of failures
    a machine and its share of machines alive. In a job larger than the fleet each place of the trace stands for
    several workers next to each other, which fail together. Raises ValueError for a trace without places.
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
