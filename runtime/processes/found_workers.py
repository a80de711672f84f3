"""The workers that another launcher has left, which has died: who lives."""

import time

from slipstream.runtime.processes.fork_server import KILL_SECONDS, ForkServer
from slipstream.runtime.processes.worker_start import worker_named
from slipstream.schedules.schedule import Worker


def find_workers(adopted: ForkServer, ranks: int) -> list[Worker]:
    """The workers of a run whose launcher has died; what is left of those that are not whole is killed before.

    Raises ForkServerError.
    """
    living: dict[Worker, list[str]] = {}
    for name in adopted.names():
        living.setdefault(worker_named(name).worker, []).append(name)
    left = {name for names in living.values() if len(names) < ranks for name in names}
    for name in left:
        adopted.kill(name)
    deadline = time.monotonic() + KILL_SECONDS
    while left.intersection(adopted.names()) and time.monotonic() < deadline:
        adopted.poll(1.0)
    return [worker for worker, names in living.items() if len(names) == ranks]
