"""Simulate time: an event loop with a clock, and connections within one process.

The clock advances when nothing is left to do. Everything else is what runs use: protocols, frames,
proofs and queues. This module defines what takes time: each delivery, and plans.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

from slipstream.runtime.protocol.channel import SILENT_SECONDS

BEGIN = 1000.0
TOGETHER = 1e-3
"""Interval, in seconds, within which due events happen at once, in their order."""


class HangError(AssertionError):
    """Exception for a loop in which nothing will ever happen again."""


_NO_SOCKET = mock.Mock()


class _Selector(selectors.DefaultSelector):
    """Selector that polls files, and advances the clock if no file is readable."""

    def __init__(self, loop: "VirtualLoop") -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the readable files, or advance the clock to the next timer."""
        ready = super().select(0)
        if not ready and timeout is None:
            raise HangError("nothing will ever happen again")
        if not ready and timeout:
            self._loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop with one server, to which `join` connects."""

    now = BEGIN

    def __init__(self) -> None:
        super().__init__(_Selector(self))
        self._clock_resolution = TOGETHER
        self._serves: Callable[[], asyncio.Protocol] | None = None

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self.now

    async def create_server(
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        *_: Any,  # type: ignore[override]
        sock: Any,
        **__: Any,
    ) -> Any:
        """Create the server. The socket is used only for its address."""
        self._serves = protocol_factory
        return sock

    def nobody_serves(self) -> None:
        """Remove the server."""
        self._serves = None

    def join(self, protocol: asyncio.Protocol, latency: Callable[[], float]) -> "Wire | None":
        """Connect to the server. Returns None if there is none."""
        if self._serves is None:
            return None
        served = self._serves()
        ours, theirs = Wire(self, served, latency), Wire(self, protocol, latency)
        ours.other, theirs.other = theirs, ours
        protocol.connection_made(ours)
        served.connection_made(theirs)
        return ours


class Wire(asyncio.Transport):
    """Direction of a connection: what its owner writes arrives at `target`, in order."""

    other: "Wire"

    def __init__(
        self, loop: VirtualLoop, target: asyncio.Protocol, latency: Callable[[], float]
    ) -> None:
        super().__init__()
        self._loop, self._target, self._latency = loop, target, latency
        self._unsent: list[bytes] = []
        self._due = loop.now
        self._closing = self.cut = False

    def write(self, data: Any) -> None:
        """Deliver data some time later."""
        if self._closing or self.cut:
            return
        self._unsent.append(bytes(data))
        if len(self._unsent) == 1:
            self._due = max(self._due + 1e-6, self._loop.now + self._latency())
            self._loop.call_at(self._due, self._deliver)

    def _deliver(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if data and not self.cut and not self.other._closing:
            self._target.data_received(data)

    def cut_silently(self) -> None:
        """Cut the connection as if the machine were gone.

        Neither end hears anything any more, until the system at the other end gives up.
        """
        self.cut = self.other.cut = True
        self.other._lost()
        self._loop.call_later(SILENT_SECONDS, self._lost)

    def close(self) -> None:
        """Close the connection once all data has arrived."""
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._own_end_lost)
            self._loop.call_at(max(self._due + 2e-6, self._loop.now + self._latency()), self._lost)

    abort = close

    def _own_end_lost(self) -> None:
        self.other._lost()

    def _lost(self) -> None:
        """Tell the target that its connection has ended, unless the target itself is gone."""
        target, self._target = self._target, asyncio.Protocol()
        self.other._closing = True
        target.connection_lost(None)

    def is_closing(self) -> bool:
        """Return whether no more data is accepted."""
        return self._closing

    def get_write_buffer_size(self) -> int:
        """Return 0, because nothing waits."""
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return a name, or a socket whose options nobody reads."""
        values = {"peername": ("virtual", 0), "socket": _NO_SOCKET}
        return values.get(name, default)


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    """Run to the end in virtual time. Meanwhile, `time.monotonic` is the loop's clock."""
    loop = VirtualLoop()
    with mock.patch("time.monotonic", loop.time):
        try:
            loop.run_until_complete(main(loop))
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.close()
