"""Keep a worker or node agent connected to the coordinator, or to its successor.

After the coordinator is gone, messages to it are dropped: they concern a generation that has ended
with it. The reading thread gets an error, and then looks for a new coordinator at the same address.
A new coordinator is followed only if its epoch is higher, so nobody can pose as one by repeating
the messages of an earlier coordinator.
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
"""Function that connects to a coordinator, given a first message and a limit in seconds.

Raises RendezvousError.
"""


class CoordinatorLink(Generic[M, S]):
    """Connection to the present coordinator or, while there is none, to the last one.

    `channel` is the connection to the first coordinator and `setup` its answer; `connect` connects
    to another coordinator.
    """

    def __init__(self, channel: Channel[M], setup: S, connect: Connect[M]) -> None:
        self._channel = channel
        self._connect = connect
        self.setup = setup
        self.sent = time.monotonic()
        """Time of the last message sent, or of creation, by `time.monotonic`."""

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket, for a selector."""
        return self._channel.fileno()

    @property
    def has_pending(self) -> bool:
        """True if `read` would not wait although a selector sees nothing on the socket."""
        return self._channel.has_pending

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, from any thread; drop it if the coordinator is gone.

        `read` then fails. Raises ProtocolError if the message is too long.
        """
        channel = self._channel
        try:
            channel.send(message)
            self.sent = time.monotonic()
        except RendezvousError:
            # The reading thread gets an error and looks for a new coordinator.
            channel.abort()

    def read(self) -> list[M]:
        """Wait for data, and return the messages that they complete, if any.

        Raises RendezvousError as `Channel.read` does.
        """
        return self._channel.read()

    def follow_new_coordinator(
        self, hello: msgspec.Struct, end: type[E], prepare: Callable[[S], R]
    ) -> E | R:
        """Try once to connect to a new coordinator, with `hello` as the first message.

        Returns the result of `prepare`, which is called with the coordinator's answer before the
        new connection and this `setup` replace the old ones. Returns the answer itself if it is of
        type `end`: the coordinator continues without this process, and the new connection is
        closed. Raises RendezvousError if no coordinator of a higher epoch answers. Exceptions of
        `prepare` are passed on.
        """
        channel = self._connect(hello, 0.0)
        try:
            answer = channel.read_first(type(self.setup), end)
            if isinstance(answer, end):
                channel.close()
                return answer
            setup = cast(S, answer)
            if setup.epoch <= self.setup.epoch:
                raise RendezvousError(
                    "the coordinator there was started before the one that is gone"
                )
            prepared = prepare(setup)
        except BaseException:
            channel.close()
            raise
        # The old connection stays in use until everything is ready for the new one.
        self._channel.close()
        self._channel, self.setup = channel, setup
        return prepared

    def close(self) -> None:
        """Close the connection as `Channel.close` does."""
        self._channel.close()
