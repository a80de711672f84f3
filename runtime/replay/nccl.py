"""NCCL behind a session: communicators that any thread can abort, and that say by themselves of nothing."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, cast

from torch.distributed import Work

from slipstream.runtime.errors import first_line
from slipstream.runtime.replay.backend import Meeting
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.replay.transfers import TIMEOUT
from slipstream.runtime.torch_private import Group, NcclGroup, TCPStore, nccl_group

AGAIN_SECONDS = 0.05
"""From one attempt to abort to the next."""


class OverError(RuntimeError):
    """Nothing may be begun any more."""


class Communicator:
    """A process group over NCCL, and what is under way in it.

    Calls return at once, and are carried out in their order. When a member dies, or does not take part, those that wait
    for it wait for good, on the device, until `abort`; then they end as if all were well.
    """

    def __init__(self, nccl: NcclGroup) -> None:
        self._nccl = nccl
        self._inside = True
        """Whether a thread is within a call: it is being connected."""
        self._works: deque[Work] = deque()
        """Those that may not be done yet."""
        self._shut = False
        """Whether the order is over that it was used in last."""
        self._lost: str | None = None

    def connect(self) -> None:
        """Returns when all members have. Raises RuntimeError."""
        try:
            self._require()
            self._nccl.connect()
        finally:
            self._inside = False

    def __getattr__(self, name: str) -> Callable[..., Work]:
        """What torch's group begins under this name: `send`, `allreduce`, ..."""
        return partial(self._issue, getattr(self._nccl.group, name))

    def lost(self) -> str | None:
        """Why it cannot be used any more."""
        return self._lost or self._nccl.error()

    def reuse(self) -> None:
        """Another order begins to use it."""
        self._shut = False

    def end(self) -> None:
        """Nothing may be begun any more; abort it where anything is under way, or has failed."""
        self._shut = True
        if not self.over() or self._nccl.error() is not None:
            self.abort()

    def over(self) -> bool:
        """Whether the device has ended all that was begun here."""
        return not self._inside and all(_done(work) for work in tuple(self._works))

    def abort(self) -> None:
        """It is not used any more. Does not wait: NCCL may take long."""
        self._shut = True
        if self._lost is None:
            self._lost = "it was aborted"
            threading.Thread(target=self._abort, daemon=True, name="aborting").start()

    def _abort(self) -> None:
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # it was not connected yet
                self._nccl.group.abort()
            if not self._inside:
                return
            time.sleep(AGAIN_SECONDS)  # a thread had been about to begin something, or to connect

    def _issue(self, call: Callable[..., Work], *arguments: Any) -> Work:
        # Who ends it sets `_shut`, and then looks whether a thread is inside: one of both sees the other.
        self._inside = True
        try:
            self._require()
            work = call(*arguments)
            while self._works and _done(self._works[0]):
                self._works.popleft()
            self._works.append(work)
        except OverError:
            raise
        except RuntimeError as error:
            self._lost = self._lost or first_line(error)
            raise
        finally:
            self._inside = False
        return work

    def _require(self) -> None:
        if self._shut:
            raise OverError("the order is over")


class Nccl:
    """Communicators of one process. `abort` ends those in which anything is under way, and spares the others."""

    ordered = True

    def __init__(self, make: Callable[[TCPStore, str, int, int, Any], NcclGroup] = nccl_group) -> None:
        self._make = make
        self._connecting: Communicator | None = None
        self._aborts = 0

    def making(self, spared: Callable[[], Sockets]) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Nothing is to be done."""
        return contextlib.nullcontext()

    def group(self, meeting: Meeting) -> Group:
        """See `Backend`."""
        aborts, keys = self._aborts, meeting.keys
        # NCCL's own wait for the others' addresses could not be ended.
        keys.set(f"here/{meeting.rank}", b"!")
        keys.wait([f"here/{meeting.rank}"])
        one = Communicator(self._make(cast(TCPStore, meeting.store), meeting.prefix, meeting.rank, meeting.size,
                                      TIMEOUT))
        self._connecting = one
        if aborts != self._aborts:
            one.abort()
        one.connect()
        self._connecting = None
        return cast(Group, one)

    def reuse(self, group: Group) -> None:
        """See `Backend`."""
        cast(Communicator, group).reuse()

    def abort(self, groups: Collection[Group]) -> None:
        """See `Backend`."""
        self._aborts += 1
        connecting = self._connecting
        for one in (*cast(Collection[Communicator], groups), *(() if connecting is None else (connecting,))):
            one.end()

    def lost(self, group: Group) -> str | None:
        """See `Backend`."""
        return cast(Communicator, group).lost()

    def over(self, groups: Collection[Group]) -> bool:
        """See `Backend`."""
        return all(one.over() for one in cast(Collection[Communicator], groups))

    def close(self, groups: Collection[Group]) -> None:
        """Their other members may be gone: nothing is waited for."""
        for one in cast(Collection[Communicator], groups):
            one.abort()


def _done(work: Work) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:  # the device has failed
        return False
