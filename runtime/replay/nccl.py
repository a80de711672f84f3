"""NCCL behind a session: communicators that any thread can abort, and that report nothing by themselves."""

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, cast

import torch
from torch.distributed import Work

from slipstream.runtime.errors import first_line
from slipstream.runtime.replay.backend import Meeting
from slipstream.runtime.replay.nccl_streams import stream_turns
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.replay.transfers import TIMEOUT
from slipstream.runtime.torch_private import Group, NcclGroup, TCPStore, nccl_group

GRACE_SECONDS = 0.02
"""How long an order that has ended leaves a communicator to end what it does, before it is aborted. A new one takes
longer to make."""
AGAIN_SECONDS = 0.05
"""From one attempt to abort to the next."""
LOOK_SECONDS = 0.001
"""From one look at what the device does to the next."""
DECISION = "decision"
"""The key by which the members of a group that meet agree whether they connect."""
CONNECT, LEAVE = b"connect", b"leave"


class OverError(RuntimeError):
    """The order has ended, so nothing can be begun."""


class Communicator:
    """A process group over NCCL, and what is under way in it.

    Calls return at once, and the device carries them out in their order, so that all have ended once the last one has.
    When a member dies or does not take part, the device waits for it without end, until `abort`; then everything ends
    as if all were well.

    Torch's own answer, `Work.is_completed`, is also true after an error, while the device still waits. What counts here
    is an event of the device behind the last operation. Threads of this class wait for it, so `over` itself calls
    neither CUDA nor NCCL: such a call may wait for a lock that an abort holds, and would hold up heartbeats.
    """

    def __init__(self, nccl: NcclGroup) -> None:
        self._nccl = nccl
        self._calling = False
        """Whether a thread is within a call that begins an operation."""
        self._last: Work | None = None
        """The operation that was begun last."""
        self._watched: Work | None = None
        """The operation that a thread waits for, or has waited for."""
        self._done: Work | None = None
        """The last operation that the device is known to have ended."""
        self._order_ended = False
        """Whether the order that it was used in last has ended."""
        self._ending = False
        """Whether it has not been decided yet if the end of an order aborts it."""
        self._lost: str | None = None
        self._aborting = False
        """Whether it is being aborted, or has been."""
        self.begun = 0
        """How many operations this member has begun."""
        self._settled = threading.Event()
        """Set when connecting has succeeded or failed, or is not waited for any more."""

    def connect(self, *, directed: bool) -> None:
        """Connect all members; return when they are connected. Raises RuntimeError.

        Connecting ends by itself, with an error where a member dies. It happens in a thread of its own, which is left
        to itself when the order ends. `directed`: the first of two members will only send to the second one.
        """
        self.begin_to_connect(directed=directed)
        self._settled.wait()
        self._require()
        if self._lost is not None:
            raise RuntimeError(self._lost)

    def begin_to_connect(self, *, directed: bool) -> None:
        """Start the thread that connects; what it connects for an order that has ended is aborted."""
        threading.Thread(target=self._connect, args=(directed,), daemon=True, name="connecting").start()

    def __getattr__(self, name: str) -> Callable[..., Work]:
        """Return what begins an operation of torch's group by its name: `send`, `allreduce`, ..."""
        return partial(self._issue, getattr(self._nccl.group, name))

    def lost(self) -> str | None:
        """Return why the communicator cannot be used any more, or None."""
        return self._lost or self._nccl.error()

    def reuse(self) -> None:
        """Let another order use the communicator."""
        self._order_ended = False

    def end(self) -> None:
        """Begin nothing any more. Whoever calls this then calls `abort_unless_over` in another thread."""
        self._ending, self._order_ended = True, True
        self._settled.set()

    def abort_unless_over(self) -> None:
        """Abort the communicator where anything is still under way in it after a moment, or has failed."""
        deadline = time.monotonic() + GRACE_SECONDS
        while not (over := self._is_quiet()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        if not over or self._nccl.error() is not None:
            self.abort()
        self._ending = False

    def over(self) -> bool:
        """Return whether the device has ended all that was begun here, as far as is known; ask again."""
        return not self._ending and self._is_quiet()

    def abort(self) -> None:
        """End all that is under way; the communicator is not used any more. Returns at once: NCCL may take long."""
        self._order_ended = True
        self._settled.set()
        self._lost = self._lost or "it was aborted"
        if not self._aborting:
            self._aborting = True
            threading.Thread(target=self._abort, daemon=True, name="aborting").start()

    def _connect(self, directed: bool) -> None:
        """Connect, and carry out one operation, which makes what NCCL else makes in the first call that needs it."""
        device = self._nccl.device
        try:
            with stream_turns(device).connecting(self) if device.type == "cuda" else contextlib.nullcontext():
                self._nccl.connect()
            one = torch.zeros(1, device=device)
            if not directed:
                work = self._issue(self._nccl.group.allreduce, [one])
            elif self._nccl.rank == 0:
                work = self._issue(self._nccl.group.send, [one], 1, 0)
            else:
                work = self._issue(self._nccl.group.recv, [one], 0, 0)
            self._watched = work
            self._watch(work)
        except RuntimeError as error:
            self._lost = self._lost or first_line(error)
        finally:
            self._settled.set()
        if self._order_ended or self._lost is not None:
            self.abort()

    def _is_quiet(self) -> bool:
        if self._calling:
            return False
        last = self._last
        if last is not None and self._watched is not last:
            self._watched = last
            threading.Thread(target=self._watch, args=(last,), daemon=True, name="waiting for NCCL").start()
        return self._done is last

    def _watch(self, work: Work) -> None:
        try:
            self._nccl.wait_for_device(work)
        except RuntimeError as error:  # the device has failed, and so does nothing any more
            self._lost = self._lost or first_line(error)
        self._done = work

    def _abort(self) -> None:
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # it was not connected yet
                self._nccl.group.abort()
            if not self._calling:
                return
            time.sleep(AGAIN_SECONDS)  # a thread had been about to begin something

    def _issue(self, call: Callable[..., Work], *arguments: Any) -> Work:
        # Who ends the order sets `_order_ended`, and then looks whether a thread calls: one of both sees the other.
        self._calling = True
        try:
            self._require()
            self.begun += 1  # also what fails half-way
            work = self._last = call(*arguments)
        except OverError:
            raise
        except RuntimeError as error:
            self._lost = self._lost or first_line(error)
            raise
        finally:
            self._calling = False
        return work

    def _require(self) -> None:
        if self._order_ended:
            raise OverError("the order is over")


class Nccl:
    """The communicators of one process. `abort` ends those in which anything is under way, and spares the others."""

    ordered = True

    def __init__(self, make: Callable[[TCPStore, str, int, int, Any, bool], NcclGroup] = nccl_group) -> None:
        self._make = make
        self._connecting: Communicator | None = None
        self._aborts = 0

    def making(self, spared: Callable[[], Sockets]) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """See `Backend`. Nothing is to be done."""
        return contextlib.nullcontext()

    def group(self, meeting: Meeting) -> Group:
        """See `Backend`.

        Nothing ends NCCL's own wait for a member that does not come. So all members say that they are here, and agree
        that all connect, or none does: who leaves afterwards still connects, in a thread of its own.
        """
        aborts, keys = self._aborts, meeting.keys
        keys.set(f"here/{meeting.rank}", b"!")
        try:
            keys.wait([f"here/{meeting.rank}"])
        except RuntimeError:
            if keys.decide(DECISION, LEAVE) == CONNECT:
                late = self._communicator(meeting)
                late.end()
                late.begin_to_connect(directed=meeting.directed)
            raise
        if keys.decide(DECISION, CONNECT) == LEAVE:
            raise RuntimeError("another member has left")
        self._connecting = one = self._communicator(meeting)
        if aborts != self._aborts:
            one.end()
            self._abort([one])
        try:
            one.connect(directed=meeting.directed)
        finally:
            self._connecting = None
        return cast(Group, one)

    def reuse(self, group: Group) -> None:
        """See `Backend`."""
        cast(Communicator, group).reuse()

    def abort(self, groups: Collection[Group]) -> None:
        """See `Backend`."""
        self._aborts += 1
        connecting = self._connecting
        ended = [*cast(Collection[Communicator], groups), *(() if connecting is None else (connecting,))]
        for one in ended:
            one.end()
        self._abort(ended)

    def lost(self, group: Group) -> str | None:
        """See `Backend`."""
        return cast(Communicator, group).lost()

    def over(self, groups: Collection[Group]) -> bool:
        """See `Backend`."""
        return not [one for one in cast(Collection[Communicator], groups) if not one.over()]  # each is asked

    def begun(self, group: Group) -> int:
        """See `Backend`."""
        return cast(Communicator, group).begun

    def close(self, groups: Collection[Group]) -> None:
        """See `Backend`. Their other members may be gone: nothing is waited for."""
        for one in cast(Collection[Communicator], groups):
            one.abort()

    def _communicator(self, meeting: Meeting) -> Communicator:
        return Communicator(self._make(cast(TCPStore, meeting.store), meeting.prefix, meeting.rank, meeting.size,
                                       TIMEOUT, meeting.directed))

    def _abort(self, ended: Collection[Communicator]) -> None:
        """Abort what is under way in these, in threads of their own."""
        for one in ended:
            threading.Thread(target=one.abort_unless_over, daemon=True, name="ending").start()
