"""Heartbeat monitor: when the last message of each worker came, by this machine's clock."""

import time

from schedules.schedule import Worker

LOOKS_PER_TIMEOUT = 10


class HeartbeatMonitor:
    """Finds workers that have sent nothing for longer than the timeout. Every message counts as a heartbeat."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self.interval_seconds = timeout_seconds / LOOKS_PER_TIMEOUT
        """From one call of `missed` to the next."""
        self._looked = time.monotonic()
        self._heard: dict[Worker, float] = {}

    def add(self, worker: Worker) -> None:
        """Watch a worker from now on."""
        self._heard[worker] = time.monotonic()

    def remove(self, worker: Worker) -> None:
        """Watch it no more."""
        self._heard.pop(worker, None)

    def __contains__(self, worker: Worker) -> bool:
        """Whether a worker is watched."""
        return worker in self._heard

    def heard(self, worker: Worker) -> None:
        """A message of a worker has come."""
        if worker in self._heard:
            self._heard[worker] = time.monotonic()

    def missed(self) -> list[tuple[Worker, float]]:
        """The workers that were silent for too long, each with the time of its last message."""
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap > 3 * self.interval_seconds:
            # This process did not run, as when it was stopped: it could not have read any message. One interval counts
            # all the same; otherwise a silent worker would never be given up where every look is late.
            excused = gap - self.interval_seconds
            self._heard = {worker: heard + excused for worker, heard in self._heard.items()}
        return [(worker, heard) for worker, heard in self._heard.items() if now - heard > self._timeout]
