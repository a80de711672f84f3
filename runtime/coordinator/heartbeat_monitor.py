"""Heartbeat monitor: when the last message of each worker's processes came, by this machine's clock."""

import time
from collections.abc import Hashable
from typing import Generic, TypeVar

LOOKS_PER_TIMEOUT = 10


Peer = TypeVar("Peer", bound=Hashable)


class HeartbeatMonitor(Generic[Peer]):
    """Finds processes that have sent nothing for longer than the timeout. Every message counts as a heartbeat."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self.interval_seconds = timeout_seconds / LOOKS_PER_TIMEOUT
        """From one call of `missed` to the next."""
        self._looked = time.monotonic()
        self._heard: dict[Peer, float] = {}

    def add(self, peer: Peer) -> None:
        """Watch a process from now on."""
        self._heard[peer] = time.monotonic()

    def remove(self, peer: Peer) -> None:
        """Watch it no more."""
        self._heard.pop(peer, None)

    def __contains__(self, peer: Peer) -> bool:
        """Whether a process is watched."""
        return peer in self._heard

    def heard(self, peer: Peer) -> None:
        """A message of a process has come."""
        if peer in self._heard:
            self._heard[peer] = time.monotonic()

    def missed(self) -> list[tuple[Peer, float]]:
        """The processes that were silent for too long, each with the time of its last message."""
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap > 3 * self.interval_seconds:
            # This process did not run, as when it was stopped: it could not have read any message. One interval counts
            # all the same; otherwise a silent worker would never be given up where every look is late.
            excused = gap - self.interval_seconds
            self._heard = {peer: heard + excused for peer, heard in self._heard.items()}
        return self.silent(1.0)

    def silent(self, share: float) -> list[tuple[Peer, float]]:
        """Those silent for more than a share of the timeout, by the last call of `missed`."""
        return [(peer, heard) for peer, heard in self._heard.items() if self._looked - heard > share * self._timeout]
