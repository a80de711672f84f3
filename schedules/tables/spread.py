"""Who plays which role, by where workers are: those that hold the same layers are apart, where that costs nothing.

Workers of one machine fail together. Where roles have moved, several that hold a stage may be on one, so that its
failure loses the stage, or both copies of a part of its optimizer state. Two workers may swap their roles as long as
no more layers have to be loaded and everybody is as fast and has as much room as the role was planned for; so the
period stays what it is.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from slipstream.schedules.memory import room
from slipstream.schedules.schedule import Schedule, Seat, Worker
from slipstream.schedules.tables.moves import layers_lacked

Nodes = Sequence[Sequence[Worker]]
"""The workers of each machine."""


def spread(schedule: Schedule, seats: Sequence[Seat], nodes: Nodes) -> list[Seat]:
    """The seats of a schedule with roles swapped so that fewer pairs of workers that hold the same layers share a
    machine, by worker.

    Each swap takes the most off that number, until none takes any. One of the two has always changed its column: where
    nobody has, nothing changes.
    """
    node = {worker: number for number, workers in enumerate(nodes) for worker in workers}
    places = _Places(schedule, list(seats), node)
    while node:
        swaps = [(places.gain(one, other), one, other) for one in places.movers() for other in range(len(seats))]
        gain, one, other = max(swaps, default=(0, 0, 0), key=lambda swap: swap[0])
        if gain <= 0:
            break
        places.swap(one, other)
    return sorted(places.seats, key=lambda seat: seat.worker)


class _Places:
    """Seats, and how many of those that hold the same layers are on each machine."""

    def __init__(self, schedule: Schedule, seats: list[Seat], node: Mapping[Worker, int]) -> None:
        self._schedule, self.seats, self._node = schedule, seats, node
        self._speed = schedule.times.per_mille_of
        self._count: Counter[tuple[Hashable, Hashable]] = Counter(
            (_layers(seat), self._at(seat.worker)) for seat in seats)

    def movers(self) -> list[int]:
        """The places of those whose role is of another column."""
        return [place for place, seat in enumerate(self.seats) if seat.worker.column != seat.role.column]

    def gain(self, one: int, other: int) -> int:
        """By how many pairs fewer hold the same layers on one machine once these two have swapped their roles."""
        a, b = self.seats[one], self.seats[other]
        here, there = self._at(a.worker), self._at(b.worker)
        mine, theirs = _layers(a), _layers(b)
        if here == there or mine == theirs or not self._may_swap(a, b):
            return 0
        count = self._count
        return (count[mine, here] - 1 - count[mine, there]) + (count[theirs, there] - 1 - count[theirs, here])

    def swap(self, one: int, other: int) -> None:
        """Let these two play each other's roles."""
        a, b = self.seats[one], self.seats[other]
        for seat, worker in ((a, b.worker), (b, a.worker)):
            self._count[_layers(seat), self._at(seat.worker)] -= 1
            self._count[_layers(seat), self._at(worker)] += 1
        self.seats[one] = Seat(b.worker, a.role, a.program, a.holds)
        self.seats[other] = Seat(a.worker, b.role, b.program, b.holds)

    def _may_swap(self, a: Seat, b: Seat) -> bool:
        speed = self._speed
        if speed.get(a.worker, 1000) != speed.get(b.worker, 1000):
            return False
        swapped = [Seat(worker, seat.role, seat.program, seat.holds) for seat, worker in ((a, b.worker), (b, a.worker))]
        if any((room(self._schedule, new) or 0) < (room(self._schedule, old) or 0)
               for new, old in zip(swapped, (a, b), strict=True)):
            return False
        before, after = (sum(len(layers_lacked(self._schedule, seat)) for seat in pair) for pair in ((a, b), swapped))
        return after <= before

    def _at(self, worker: Worker) -> Hashable:
        """The machine of a worker; one that is on none is by itself."""
        return self._node.get(worker, worker)


def _layers(seat: Seat) -> Hashable:
    """The same for all that hold the same layers."""
    return seat.role.column if seat.holds is None else seat.holds
