"""Coordinator link: a worker's connection to the coordinator, which outlives a coordinator that dies.

Once the coordinator is gone, what is sent is dropped: it was about an order that has ended with it. The main thread
reads, and so finds out; it has the order end, and then looks for another coordinator at the same address.
"""

from collections.abc import Callable
from datetime import timedelta

import msgspec

from runtime.protocol.channel import Channel
from runtime.protocol.rendezvous import RendezvousError, connect_store
from runtime.protocol.setup import Setup
from runtime.protocol.to_coordinator import JoinWorker
from runtime.protocol.to_worker import Leave, ToWorker
from runtime.torch_private import TCPStore
from schedules.schedule import Worker

STORE_TIMEOUT = timedelta(seconds=10)

Connect = Callable[[JoinWorker, float], Channel[ToWorker]]
"""Reaches the coordinator, within so many seconds, with a first message. Raises RendezvousError."""


class CoordinatorLink:
    """The connection to the present coordinator, or none.

    `connect` waits `timeout_seconds` for the first coordinator. Raises RendezvousError.
    """

    def __init__(self, worker: Worker, connect: Connect, timeout_seconds: float) -> None:
        self._worker = worker
        self._connect = connect
        self._channel = connect(JoinWorker(worker), timeout_seconds)
        self.setup = self._channel.wait_for(Setup)

    def fileno(self) -> int:
        """For a selector."""
        return self._channel.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send; where the coordinator is gone, nothing happens but that `read` fails. For any thread."""
        channel = self._channel
        try:
            channel.send(message)
        except RendezvousError:
            channel.abort()

    def read(self) -> list[ToWorker]:
        """Wait for messages. Raises RendezvousError when the coordinator is gone."""
        return self._channel.read()

    def follow_another(self) -> TCPStore | None:
        """Try once to reach another coordinator: its key-value store; None where this worker is to leave.

        Raises RendezvousError where there is none, or one that was started before the last one.
        """
        channel = self._connect(JoinWorker(self._worker, self.setup.epoch), 0.0)
        try:
            answer = channel.wait_for(Setup, Leave)
            if not isinstance(answer, Setup):
                channel.close()
                return None
            if answer.epoch <= self.setup.epoch:
                raise RendezvousError("the coordinator there was started before the one that is gone")
            store = connect_store(answer.store, STORE_TIMEOUT)
        except RendezvousError:
            channel.close()
            raise
        self._channel.close()
        self._channel, self.setup = channel, answer
        return store

    def close(self) -> None:
        """Close the connection, once what was sent has arrived."""
        self._channel.close()
