"""Persistent map: an immutable map whose next version shares the entries of the former one."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Self, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class PersistentMap(Mapping[K, V]):
    """Immutable mapping in the order of insertion.

    Adding an entry to the newest version takes constant time; every other change copies the map. All versions share one
    dict, which only grows. A version consists of the first `_size` entries of it.
    """

    __slots__ = ("_entries", "_size")

    def __init__(self, entries: Iterable[tuple[K, V]] = ()) -> None:
        self._entries = {key: (number, value) for number, (key, value) in enumerate(dict(entries).items())}
        self._size = len(self._entries)

    def with_entry(self, key: K, value: V) -> Self:
        """Return a version of the map with an entry added or replaced."""
        if len(self._entries) != self._size or key in self._entries:
            return type(self)([*self.items(), (key, value)])
        new = type(self).__new__(type(self))
        new._entries, new._size = self._entries, self._size + 1
        self._entries[key] = self._size, value
        return new

    def without_keys(self, *keys: K) -> Self:
        """Return a version of the map without some keys; keys that are absent are ignored."""
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
