"""Who takes part: quorums and heartbeats, by torchft's lighthouse.

Each worker is a member of its own (world size 1), so that the loss of one is the loss of one. torchft's interface
changes between versions; nothing else in Slipstream names it, but for `runtime.replay.communication`.
"""

import contextlib
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Self

import msgspec
from torchft.coordination import LighthouseClient, LighthouseServer

from runtime.errors import first_line
from schedules.schedule import Worker

HEARTBEAT_SECONDS = 0.5
HEARTBEAT_TIMEOUT_SECONDS = 5.0
TICK_SECONDS = 0.02


class MembershipError(RuntimeError):
    """No quorum came together in time. The message is one line."""


class Quorum(msgspec.Struct, frozen=True):
    """Those who agreed to work together, under a number that no other quorum of the run has."""

    number: int
    ranks: Mapping[Worker, int]
    """Of every member, 0 upwards, the same at every member."""


class Lighthouse:
    """The server where members meet; it forms a quorum once all `members` of them have asked for one."""

    def __init__(self, host: str, members: int) -> None:
        address = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
        address = f"[{address}]" if ":" in address else address
        self._server = LighthouseServer(
            bind=f"{address}:0", min_replicas=members, join_timeout_ms=100, quorum_tick_ms=round(TICK_SECONDS * 1e3),
            heartbeat_timeout_ms=round(HEARTBEAT_TIMEOUT_SECONDS * 1e3))
        # The server names itself by the host's name, which need not resolve to the address it listens on.
        self.url = f"http://{address}:{self._server.address().rpartition(':')[2]}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()


class Member:
    """One worker's side: it sends heartbeats from the moment it is made until it is closed."""

    def __init__(self, url: str, worker: Worker, connect_timeout: timedelta = timedelta(seconds=30)) -> None:
        self._worker = worker
        self._client = LighthouseClient(url, connect_timeout)
        self._stop = threading.Event()
        self._pulse = threading.Thread(target=self._beat, args=(LighthouseClient(url, connect_timeout),), daemon=True)
        self._pulse.start()

    def join(self, timeout: timedelta) -> Quorum:
        """Ask for a quorum and wait for it. Raises MembershipError."""
        try:
            answer = self._client.quorum(str(self._worker), timeout, address="", store_address="", step=0,
                                         world_size=1, shrink_only=False)
        except (RuntimeError, TimeoutError) as error:
            raise MembershipError(f"worker {self._worker} found no quorum within {timeout.total_seconds():.0f} s: "
                                  f"{first_line(error)}") from None
        members = sorted(Worker.parse(participant.replica_id) for participant in answer.participants)
        return Quorum(int(answer.quorum_id), {worker: rank for rank, worker in enumerate(members)})

    def close(self) -> None:
        """Stop the heartbeats."""
        self._stop.set()
        self._pulse.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _beat(self, client: LighthouseClient) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            # A lighthouse that does not answer is no reason to stop training: a later beat may get through.
            with contextlib.suppress(RuntimeError, TimeoutError):
                client.heartbeat(str(self._worker), timeout=timedelta(seconds=HEARTBEAT_TIMEOUT_SECONDS))
