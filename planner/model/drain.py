"""What memory lets a worker leave for the time after its last F."""

from typing import NamedTuple


class Room(NamedTuple):
    """Memory of a worker, in one unit."""

    activation: int
    """Held by a micro-batch from F to the end of I;"""
    stash: int
    """from there to the end of W."""
    capacity: int


def most_left(room: Room, most: int, count: int, gradient: int, weight: int) -> int:
    """At least the ticks of the I and W that can still be due when the last of `count` F starts.

    x of them wait for their I then, 1 <= x <= `most`, and y for their W only, with x + y <= count and
    x activation + y stash <= capacity: the maximum of x I + (x + y) W. With y not in whole numbers it is concave in x,
    so that it lies at an end, or at the whole numbers around the x from which on not all can wait for their W.
    """
    ends = {1, most}
    if room.activation != room.stash:
        corner = (room.capacity - count * room.stash) // (room.activation - room.stash)
        ends |= {min(max(1, corner + more), most) for more in (0, 1)}
    return max(waiting * gradient + _weights(room, waiting, count, weight) for waiting in ends)


def _weights(room: Room, waiting: int, count: int, weight: int) -> int:
    """Ticks of W that are due while so many micro-batches wait for their I; y need not be a whole number."""
    free = room.capacity - waiting * room.activation
    if not room.stash:
        return count * weight
    return min(count * weight, waiting * weight + free * weight // room.stash)
