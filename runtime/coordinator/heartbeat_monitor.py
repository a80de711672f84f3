"""Heartbeat monitor: when the last message of each worker's processes came, by this machine's clock."""

import time

from slipstream.schedules.schedule import Worker

LOOKS_PER_TIMEOUT = 10
Process = tuple[Worker, int]
"""A worker's, by rank."""


class HeartbeatMonitor:
    """Finds processes that have sent nothing for longer than the timeout. Every message counts as a heartbeat."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self.interval_seconds = timeout_seconds / LOOKS_PER_TIMEOUT
        """From one call of `missed` to the next."""
        self._looked = time.monotonic()
        self._heard: dict[Process, float] = {}

    def add(self, process: Process) -> None:
        """Watch a process from now on."""
        self._heard[process] = time.monotonic()

    def remove(self, process: Process) -> None:
        """Watch it no more."""
        self._heard.pop(process, None)

    def __contains__(self, process: Process) -> bool:
        """Whether a process is watched."""
        return process in self._heard

    def heard(self, process: Process) -> None:
        """A message of a process has come."""
        if process in self._heard:
            self._heard[process] = time.monotonic()

    def missed(self) -> list[tuple[Process, float]]:
        """The processes that were silent for too long, each with the time of its last message."""
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap > 3 * self.interval_seconds:
            # This process did not run, as when it was stopped: it could not have read any message. One interval counts
            # all the same; otherwise a silent worker would never be given up where every look is late.
            excused = gap - self.interval_seconds
            self._heard = {process: heard + excused for process, heard in self._heard.items()}
        return self.silent(1.0)

    def silent(self, share: float) -> list[tuple[Process, float]]:
        """Those silent for more than a share of the timeout, by the last call of `missed`."""
        return [(process, heard) for process, heard in self._heard.items()
                if self._looked - heard > share * self._timeout]
