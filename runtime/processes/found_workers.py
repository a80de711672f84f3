"""The workers that another launcher has left, which has died: who lives, and without which of its ranks."""

import time
from collections.abc import Collection
from typing import NamedTuple

from slipstream.runtime.config import STANDS_FOR
from slipstream.runtime.processes.fork_server import KILL_SECONDS, ForkServer
from slipstream.runtime.processes.worker_start import worker_named
from slipstream.schedules.schedule import Worker


class FoundWorker(NamedTuple):
    """A worker of a run whose launcher has died, of which some process lived when it was found."""

    lost: tuple[int, ...]
    """The ranks without whose devices it goes on, or went on."""
    whole: bool
    """Whether all of its processes live. Otherwise the others have been killed."""
    without: int | None = None
    """The rank that had ended, where the worker could go on without its device."""


def find_workers(adopted: ForkServer, ranks: int) -> dict[Worker, FoundWorker]:
    """The workers of a run whose launcher has died; what is left of those that are not whole is killed before.

    Raises ForkServerError.
    """
    living: dict[Worker, dict[int, str]] = {}
    lost: dict[Worker, tuple[int, ...]] = {}
    for name in adopted.names():
        named = worker_named(name)
        living.setdefault(named.worker, {})[named.rank] = name
        lost[named.worker] = named.without
    found = {worker: _found(lost[worker], names.keys(), ranks) for worker, names in living.items()}
    left = {name for worker, names in living.items() if not found[worker].whole for name in names.values()}
    for name in left:
        adopted.kill(name)
    deadline = time.monotonic() + KILL_SECONDS
    while left.intersection(adopted.names()) and time.monotonic() < deadline:
        adopted.poll(1.0)
    return found


def _found(lost: tuple[int, ...], living: Collection[int], ranks: int) -> FoundWorker:
    processes = ranks // STANDS_FOR if lost else ranks
    ended = [rank for rank in range(processes) if rank not in living]
    alone = ended[0] if len(ended) == 1 and enough_devices(ranks, len(lost) + 1) else None
    return FoundWorker(lost, whole=not ended, without=alone)


def enough_devices(ranks: int, lost: int) -> bool:
    """Whether so many ranks' devices can be done without."""
    return STANDS_FOR * (ranks - lost) >= ranks > 1
