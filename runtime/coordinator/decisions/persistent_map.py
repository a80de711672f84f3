"""Persistent maps: immutable maps whose next version shares the entries of the former one."""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Self, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class PersistentMap(Mapping[K, V]):
    """Immutable mapping in the order of insertion, to which an entry is added quickly."""

    # All versions share one dict, which only grows. A version has its first `_size` entries.
    __slots__ = ("_entries", "_size")

    def __init__(self, entries: Iterable[tuple[K, V]] = ()) -> None:
        self._entries = {
            key: (number, value) for number, (key, value) in enumerate(dict(entries).items())
        }
        self._size = len(self._entries)

    def with_entry(self, key: K, value: V) -> Self:
        """Return a version with an entry added or replaced.

        Adding to the newest version takes constant time; all else copies the map.
        """
        # Another version has gone on, or an entry is replaced: the dict cannot be shared.
        if len(self._entries) != self._size or key in self._entries:
            return type(self)([*self.items(), (key, value)])
        new = type(self).__new__(type(self))
        new._entries, new._size = self._entries, self._size + 1
        self._entries[key] = self._size, value
        return new

    def without_keys(self, *keys: K) -> Self:
        """Return a version of the map without some keys; absent keys are ignored."""
        if not any(key in self for key in keys):
            return self
        return type(self)((key, value) for key, value in self.items() if key not in keys)

    def __getitem__(self, key: K) -> V:
        number, value = self._entries[key]
        if number >= self._size:
            raise KeyError(key)
        return value

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        return iter(tuple(islice(self._entries, self._size)))


class PersistentSeries(Mapping[int, float]):
    """Immutable mapping of consecutive numbers to floats, which takes 8 bytes an entry."""

    # All versions share one array, which only grows.
    __slots__ = ("_first", "_size", "_values")

    def __init__(self, values: Iterable[float] = (), first: int = 0) -> None:
        self._values, self._first = array("d", values), first
        self._size = len(self._values)

    def with_entry(self, key: int, value: float) -> "PersistentSeries":
        """Return a version with one more entry, whose key follows the last one, if any."""
        if not self._size:
            return PersistentSeries([value], key)
        assert key == self._first + self._size, "keys are consecutive"
        if len(self._values) != self._size:  # another version has gone on
            return PersistentSeries([*self.values(), value], self._first)
        new = PersistentSeries.__new__(PersistentSeries)
        self._values.append(value)
        new._values, new._first, new._size = self._values, self._first, self._size + 1
        return new

    def before(self, end: int) -> "PersistentSeries":
        """Return a version without the entries of the keys from `end` on."""
        return PersistentSeries(
            self._values[: min(self._size, max(0, end - self._first))], self._first
        )

    def __getitem__(self, key: int) -> float:
        if not self._first <= key < self._first + self._size:
            raise KeyError(key)
        return self._values[key - self._first]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._first, self._first + self._size))
