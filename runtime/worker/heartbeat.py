"""A worker's other threads: one says that the worker is alive, one hears at once when an order is over."""

import contextlib
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from runtime.protocol.orders import PATIENCE, over_key
from runtime.protocol.rendezvous import Rendezvous, connect_store
from schedules.schedule import Worker

BEATS_PER_TIMEOUT = 5


def beat_key(worker: Worker) -> str:
    """Counts the worker's heartbeats."""
    return f"beat/{worker}"


class Pulse:
    """Beats from the moment it is made, over connections of its own: those of others may be waiting.

    Parameters
    ----------
    after
        The last order that is no business of this worker.
    timeout_seconds
        Without a beat for so long, a worker counts as dead.
    """

    def __init__(self, rendezvous: Rendezvous, worker: Worker, *, after: int, timeout_seconds: float) -> None:
        self.store = store = connect_store(rendezvous)
        """Any thread may use it: it is never held up."""
        key = beat_key(worker)
        self._lock = threading.Lock()
        self._over = after
        self._watched = 0
        self._call: Callable[[], None] = lambda: None
        store.add(key, 1)
        threading.Thread(target=_beat, args=(store, key, timeout_seconds / BEATS_PER_TIMEOUT), daemon=True,
                         name="pulse").start()
        threading.Thread(target=self._listen, args=(connect_store(rendezvous),), daemon=True, name="ear").start()

    def watch(self, number: int, call: Callable[[], None]) -> None:
        """Have `call` called, in another thread, as soon as an order is over; at once where it is already."""
        with self._lock:
            self._watched, self._call = number, call
            late = self._over >= number
        if late:
            call()

    def unwatch(self) -> None:
        """Nothing will be called from now on, nor is under way."""
        with self._lock:
            self._watched = 0

    def _listen(self, store: TCPStore) -> None:
        # When node 0 is gone there is nothing to hear; the main thread finds out by itself.
        with contextlib.suppress(DistError):
            while True:
                store.wait([over_key(self._over + 1)], PATIENCE)
                with self._lock:
                    self._over += 1
                    if 0 < self._watched <= self._over:
                        self._call()
                        self._watched = 0


def _beat(store: TCPStore, key: str, interval_seconds: float) -> None:
    with contextlib.suppress(DistError):
        while True:
            time.sleep(interval_seconds)
            store.add(key, 1)
