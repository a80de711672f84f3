"""What a generation does at a moment, for a coordinator that asks because nothing has been committed for long."""

import time

from slipstream.runtime.protocol.to_coordinator import Status
from slipstream.runtime.replay.stuck_calls import OPEN_CALLS
from slipstream.schedules.schedule import Schedule, Worker

WAITS = "waits"
"""What a generation that waits for others says that it does begins so."""


class Activity:
    """Written by the thread that computes, read by the main thread."""

    def __init__(self) -> None:
        self._doing: tuple[str | tuple[int, int], float] = "begins an order", time.monotonic()

    @property
    def doing(self) -> str | tuple[int, int]:
        """What it does, or the iteration and the place of an op in the program."""
        return self._doing[0]

    def begins(self, what: str | tuple[int, int]) -> None:
        """From now on, it does this."""
        self._doing = what, time.monotonic()

    def status(self, worker: Worker, schedule: Schedule, thread: int | None) -> Status:
        """What it does now; in a call into a process group where `thread`, its ident, is in one."""
        doing, since = self._doing
        if not isinstance(doing, str):
            iteration, place = doing
            doing = f"iteration {iteration}, {schedule.ops(worker)[place]}"
        call = None if thread is None else OPEN_CALLS.of(thread)
        if call is not None:
            doing, since = f"{doing}: {call.what}", call.began
        return Status(worker, doing, time.monotonic() - since, waits=call is not None or doing.startswith(WAITS))
