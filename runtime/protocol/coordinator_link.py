"""Connect a worker or node agent to the coordinator, beyond the death of a coordinator.

After the coordinator is gone, messages to it are dropped: they concern a generation that has ended
with it. The reading thread gets an error, and then looks for a new coordinator at the same address.
Each coordinator has a number, its epoch, which is higher for one that was started later. A
coordinator is followed only if its epoch is higher than that of the one that is gone, even if a
process repeats messages of earlier coordinators.
"""

import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

import msgspec

from slipstream.runtime.protocol.channel import Channel
from slipstream.runtime.protocol.rendezvous import RendezvousError


class _HasEpoch(Protocol):
    @property
    def epoch(self) -> int: ...


M = TypeVar("M")
S = TypeVar("S", bound=_HasEpoch)
E = TypeVar("E")
R = TypeVar("R")
Connect = Callable[[msgspec.Struct, float], Channel[M]]
"""Function that connects to a coordinator in some seconds with a message, or raises
RendezvousError."""


class CoordinatorLink(Generic[M, S]):
    """Connection to the present coordinator or, while there is none, to the last one.

    Parameters
    ----------
    channel
        Connection to the first coordinator.
    setup
        Answer of the first coordinator.
    connect
        Function that connects to another coordinator.
    """

    def __init__(self, channel: Channel[M], setup: S, connect: Connect[M]) -> None:
        self._channel = channel
        self._connect = connect
        self.setup = setup
        self.sent = time.monotonic()
        """Time of `time.monotonic` at which a message was last sent. Any message shows that this
        process is alive."""

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket, for a selector."""
        return self._channel.fileno()

    @property
    def has_pending(self) -> bool:
        """True if `read` would not wait although a selector sees nothing on the socket."""
        return self._channel.has_pending

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; only `read` fails if the coordinator is gone. Any thread may call
        this."""
        channel = self._channel
        try:
            channel.send(message)
            self.sent = time.monotonic()
        except RendezvousError:
            channel.abort()

    def read(self) -> list[M]:
        """Wait for messages, and return them. Raises RendezvousError when the coordinator is
        gone."""
        return self._channel.read()

    def follow_new_coordinator(self, hello: msgspec.Struct, end: type[E], prepare: Callable[[S], R]) -> E | R:
        """Try once to connect to a new coordinator, send it `hello`, and use its connection.

        Before that, `prepare` is called with the coordinator's answer, and its result is returned.
        If the answer is of type `end`, the new coordinator continues without this process: the
        answer itself is returned, and its connection is not used. Raises RendezvousError if no
        coordinator answers, or only one whose epoch is not higher than that of the last one.
        Exceptions of `prepare` are passed on.
        """
        channel = self._connect(hello, 0.0)
        try:
            answer = channel.read_first(type(self.setup), end)
            if isinstance(answer, end):
                channel.close()
                return answer
            setup = cast(S, answer)
            if setup.epoch <= self.setup.epoch:
                raise RendezvousError("the coordinator there was started before the one that is gone")
            prepared = prepare(setup)
        except BaseException:
            channel.close()
            raise
        self._channel.close()
        self._channel, self.setup = channel, setup
        return prepared

    def close(self) -> None:
        """Close the connection after all that was sent has arrived."""
        self._channel.close()
