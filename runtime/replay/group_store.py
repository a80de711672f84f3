"""Keep the addresses of a process group's members under keys of the run's store.

Torch would open a separate connection for each group, and each end would ask the name server for
the name of the other end (`::ffff:127.0.0.1` is in no hosts file). A lost packet to the name server
takes 5 seconds in the middle of a recovery. In addition, a wait in this store can be ended, and the
values of all ranks are fetched at once: gloo asks for one rank after the other, with three requests
each.
"""

import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError

from slipstream.runtime.replay.torch_groups import Store, TCPStore

FIRST_PAUSE_SECONDS = 0.0005
"""Pause after the first poll for a key."""
LONGEST_PAUSE_SECONDS = 0.005
"""Longest pause between polls."""
PAUSE_GROWTH = 1.25
"""Factor by which each pause between polls is longer than the one before."""
_ORDER_KEY = re.compile(r"order(\d+)/")


def order_key_prefix(order: int) -> str:
    """Return the prefix of all keys in the run's store that belong to an order."""
    return f"order{order}/"


def delete_old_orders(store: TCPStore, before: int) -> None:
    """Delete the keys of all orders before number `before` from the run's store."""
    for key in store.list_keys():
        match = _ORDER_KEY.match(key)
        if match and int(match[1]) < before:
            store.delete_key(key)


class GroupStore(Store):
    """Key-value store of one process group, within another store.

    Each key, unless it is a counter, is set once.

    Parameters
    ----------
    wait_for
        Longest wait for the value of a key.
    require
        Function that is called at each poll, and whose error ends the wait.
    ranks
        Number of members. A wait for the key `NAME/RANK` of one rank waits for the keys of all
        ranks.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        wait_for: timedelta,
        require: Callable[[], None],
        ranks: int = 1,
    ) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._wait_for = wait_for
        self._require = require
        self._ranks = ranks
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Set the value of a key that has none."""
        self._store.set(self._prefix + key, value)  # type: ignore[arg-type]
        self._values[key] = bytes(value)

    def get(self, key: str) -> bytes:
        """Wait for the value of a key, and return it.

        Raises DistStoreError after the time `wait_for`, and any error of the function `require`.
        """
        self.wait([key])
        return self._values[key]

    def set_once(self, key: str, value: bytes) -> bytes:
        """Set a key's value unless it has one; return the value that it has then."""
        # The store compares and sets at once, so members that decide differently get one answer.
        return bytes(self._store.compare_set(self._prefix + key, "", value.decode()))

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the counter that is stored under a key, and return the sum."""
        return self._store.add(self._prefix + key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return self._store.check([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` have values, and keep these for `get`.

        Raises any error of `require`, and DistStoreError after `timeout` (None or 0: `wait_for`).
        """
        # Values are set once, so those that were fetched stay valid.
        wanted = {rank_key for key in keys for rank_key in self._keys_of_all_ranks(key)}
        missing = sorted(wanted - self._values.keys())
        if not missing:
            return
        deadline = time.monotonic() + (timeout or self._wait_for).total_seconds()
        pause = FIRST_PAUSE_SECONDS
        # Polled, as torch's own wait cannot be ended by another thread.
        while not self.check(missing):
            self._require()
            if time.monotonic() > deadline:
                raise DistStoreError(f"timed out waiting for {', '.join(keys)}")
            time.sleep(pause)
            pause = min(PAUSE_GROWTH * pause, LONGEST_PAUSE_SECONDS)
        # One request for the values of all ranks.
        values = self._store.multi_get([self._prefix + key for key in missing])
        self._values.update(zip(missing, values, strict=True))

    def drop_end_check(self) -> None:
        """Stop calling `require` in waits, as all members have joined."""
        self._require = lambda: None

    def _keys_of_all_ranks(self, key: str) -> list[str]:
        # Gloo asks for the ranks in turn: with the first, all values are fetched.
        name, slash, rank = key.rpartition("/")
        if not slash or not rank.isdecimal():
            return [key]
        return [f"{name}/{other}" for other in range(self._ranks)]
