"""Coordinator link: a worker's or node agent's connection to the coordinator, which outlives a coordinator that dies.

Once the coordinator is gone, what is sent is dropped: it was about an order that has ended with it. Whoever reads finds
out, and then looks for another coordinator at the same address. That must have a higher epoch: coordinators that were
started before the one that is gone are followed no more, whoever repeats what they have said.
"""

import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

import msgspec

from slipstream.runtime.protocol.channel import Channel
from slipstream.runtime.protocol.rendezvous import RendezvousError


class _Setup(Protocol):
    @property
    def epoch(self) -> int: ...


M = TypeVar("M")
S = TypeVar("S", bound=_Setup)
E = TypeVar("E")
R = TypeVar("R")
Connect = Callable[[msgspec.Struct, float], Channel[M]]
"""Reaches a coordinator, within so many seconds, with a first message. Raises RendezvousError."""


class CoordinatorLink(Generic[M, S]):
    """The connection to the present coordinator, or the last one.

    Parameters
    ----------
    channel
        To the first coordinator.
    setup
        What that has answered.
    """

    def __init__(self, channel: Channel[M], setup: S, connect: Connect[M]) -> None:
        self._channel = channel
        self._connect = connect
        self.setup = setup
        self.sent = time.monotonic()
        """When anything was sent last: whatever it is shows that this process lives."""

    def fileno(self) -> int:
        """For a selector."""
        return self._channel.fileno()

    @property
    def pending(self) -> bool:
        """Whether `read` returns at once although a selector sees nothing to read."""
        return self._channel.pending

    def send(self, message: msgspec.Struct) -> None:
        """Send; where the coordinator is gone, nothing happens but that `read` fails. For any thread."""
        channel = self._channel
        try:
            channel.send(message)
            self.sent = time.monotonic()
        except RendezvousError:
            channel.abort()

    def read(self) -> list[M]:
        """Wait for messages. Raises RendezvousError when the coordinator is gone."""
        return self._channel.read()

    def follow_another(self, hello: msgspec.Struct, end: type[E], prepare: Callable[[S], R]) -> E | R:
        """Try once to reach another coordinator, and follow it.

        What `prepare` makes of its answer, before it is followed; or its answer where that is an `end`: it goes on
        without this process. Raises RendezvousError where there is none, or none that was started after the last one,
        and what `prepare` raises.
        """
        channel = self._connect(hello, 0.0)
        try:
            answer = channel.wait_for(type(self.setup), end)
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
        """Close the connection, once what was sent has arrived."""
        self._channel.close()
