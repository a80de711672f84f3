"""Where the members of a process group leave their addresses: keys of the store, over a connection that exists.

Torch would open a connection of its own for each group, and each would ask the name server for the name of the other
end (`::ffff:127.0.0.1` is in no hosts file), on both ends, before a byte is sent. Where a packet to the name server is
lost, that takes 5 seconds, in the middle of a recovery. Besides, a wait in here can be ended, and what all ranks leave
is fetched at once: gloo asks for one rank after the other, three questions each, which takes long where node 0 is far.
"""

import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError

from slipstream.runtime.torch_private import Store, TCPStore

FIRST_PAUSE_SECONDS = 0.0005
LONGEST_PAUSE_SECONDS = 0.005
GROWTH = 1.25
"""Of the pauses between two looks at the store: a wait lasts at most a quarter longer than it must."""
_ORDER = re.compile(r"order(\d+)/")


def order_prefix(order: int) -> str:
    """What all keys of an order begin with."""
    return f"order{order}/"


def forget_orders(store: TCPStore, before: int) -> None:
    """Delete the keys of all orders before one: no other ones ever go."""
    for key in store.list_keys():
        found = _ORDER.match(key)
        if found and int(found[1]) < before:
            store.delete_key(key)


class GroupStore(Store):
    """One group's keys, each of which is set once.

    Parameters
    ----------
    wait_for
        How long to wait for a key.
    require
        Raises what shall end a wait; called often.
    ranks
        How many members there are: who waits for the key `NAME/RANK` of one waits for those of all.
    """

    def __init__(self, store: Store, prefix: str, wait_for: timedelta, require: Callable[[], None],
                 ranks: int = 1) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._wait_for = wait_for
        self._require = require
        self._ranks = ranks
        self._values: dict[str, bytes] = {}
        """Those that are known."""

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Leave a value."""
        self._store.set(self._prefix + key, value)  # type: ignore[arg-type]
        self._values[key] = bytes(value)

    def get(self, key: str) -> bytes:
        """Wait for a value. Raises DistStoreError."""
        self.wait([key])
        return self._values[key]

    def decide(self, key: str, value: bytes) -> bytes:
        """Leave a value unless another member has left one; return the one that is there, which never changes."""
        return bytes(self._store.compare_set(self._prefix + key, "", value.decode()))

    def add(self, key: str, amount: int) -> int:
        """Count."""
        return self._store.add(self._prefix + key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all values are there."""
        return self._store.check([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for values. Raises DistStoreError when they do not come in time."""
        wanted = sorted({other for key in keys for other in self._of_all_ranks(key)} - self._values.keys())
        if not wanted:
            return
        deadline = time.monotonic() + (timeout or self._wait_for).total_seconds()
        pause = FIRST_PAUSE_SECONDS
        while not self.check(wanted):
            self._require()
            if time.monotonic() > deadline:
                raise DistStoreError(f"waited in vain for {', '.join(keys)}")
            time.sleep(pause)
            pause = min(GROWTH * pause, LONGEST_PAUSE_SECONDS)
        self._values.update(zip(wanted, self._store.multi_get([self._prefix + key for key in wanted]), strict=True))

    def met(self) -> None:
        """All are there: nothing is waited for any more, but torch keeps this."""
        self._require = lambda: None

    def _of_all_ranks(self, key: str) -> list[str]:
        name, slash, rank = key.rpartition("/")
        return [f"{name}/{other}" for other in range(self._ranks)] if slash and rank.isdecimal() else [key]
