"""Gloo behind a session: process groups over host memory, whose waits any thread can end."""

import _thread
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import cast

from torch import Tensor
from torch.distributed import Work

from slipstream.runtime.replay.backend import Meeting
from slipstream.runtime.replay.sockets import Sockets, cut, open_sockets, still_open
from slipstream.runtime.replay.transfers import TIMEOUT
from slipstream.runtime.torch_private import GlooDevice, Group, gloo_devices, gloo_group

CLOSING_SECONDS = 0.5
"""Gloo closes a connection that was shut within milliseconds, or never, where its own thread is stuck."""
WHOLE_BYTES = 2**15
"""What is received up to this size arrives in one piece: an abort finds it not begun, or over, and a thread of its own
to wait for it would take longer (40 us)."""
LOOK_SECONDS = 0.0005
"""From one look at connections that are to close to the next."""
SHUT = "its connections were shut"


class Waits:
    """Calls that wait in gloo, until `end`.

    When a connection breaks, gloo tells those that wait for transfers which it has not begun. It forgets those that
    are half written or half read, or were just about to be written: they wait until their time is over. So does who
    makes a group and is to be called by a member that has died. So each such call is left to a thread that does nothing
    else, and who needs the result waits for that thread, or for `end`.
    """

    def __init__(self) -> None:
        self._idle: list[_Waiter] = []
        self._open: set[_Wait] = set()
        self.ended = False
        self._closing: Callable[[], bool] = lambda: True
        """Whether a connection that was shut has not been closed yet."""
        self._lock = threading.Lock()
        """Either `end` knows a wait, or that knows of the end."""

    def wait(self, call: Callable[[], object]) -> None:
        """Returns when it is done. Raises RuntimeError."""
        one = _Wait(call)
        with self._lock:
            if not self.ended:
                self._open.add(one)
            waiter = self._idle.pop() if self._idle else _Waiter()
        waiter.queue.put(one)
        if not self.ended:
            one.released.acquire()
        if not one.over:
            self._wait_for_closing(one)
        with self._lock:
            self._open.discard(one)
            if one.over and not self.ended:
                self._idle.append(waiter)
            else:
                waiter.queue.put(None)
        if one.error is not None:
            try:
                raise one.error
            finally:
                del one  # the traceback refers to this frame
        if not one.over:
            raise RuntimeError(SHUT)

    def end(self, cut: Callable[[], Sockets]) -> None:
        """Break all connections; nobody waits any more once they are closed."""
        with self._lock:
            self.ended = True
            waits, self._open = self._open, set()
            idle, self._idle = self._idle, []
        shut = cut()
        self._closing = lambda: still_open(shut)
        for one in waits:
            one.release()
        for waiter in idle:
            waiter.queue.put(None)

    def _wait_for_closing(self, one: "_Wait") -> None:
        """Until then, what arrives may still be written where the wait's owner goes on."""
        deadline = time.monotonic() + CLOSING_SECONDS
        while not one.over and self._closing() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)


class _Wait:
    """For one transfer or sum, or for the members of a group."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.over = False
        self.error: Exception | None = None
        self.released = threading.Lock()
        self.released.acquire()

    def release(self) -> None:
        """Let its owner go on: it is over, or all waits are to end."""
        with contextlib.suppress(RuntimeError):  # the other has done so
            self.released.release()


class _Waiter:
    """A thread that waits for one after the other."""

    def __init__(self) -> None:
        self.queue = SimpleQueue[_Wait | None]()
        threading.Thread(target=self._run, daemon=True, name="waiting for gloo").start()

    def _run(self) -> None:
        while (one := self.queue.get()) is not None:
            try:
                one.call()
            except Exception as error:
                one.error = error
            one.over = True
            one.release()
            del one


class GlooWork:
    """Something under way in a group."""

    def __init__(self, work: Work, waits: Waits) -> None:
        self._work = work
        self._waits = waits

    def wait(self) -> None:
        """Returns when it is done. Raises RuntimeError."""
        self._waits.wait(self._work.wait)


class GlooGroup:
    """A process group over gloo.

    Torch's end of one waits for all that is under way in it, and so without end for what gloo has forgotten, in
    whichever thread lets go of it last. That may be any, in the middle of anything: an error that refers to itself by
    its traceback keeps what its frames use until Python's collector comes. So torch's group is let go of by `close`, or
    in a thread of its own.
    """

    def __init__(self, waits: Waits) -> None:
        self._held: list[Group] = []
        """Nothing else refers to it for longer than a call."""
        self.waits = waits

    def meet(self, meeting: Meeting, devices: Sequence[GlooDevice]) -> None:
        """Returns when all members have. Raises RuntimeError."""
        self._held.append(gloo_group(meeting.keys, meeting.rank, meeting.size, TIMEOUT, devices))

    def __del__(self) -> None:
        if self._held:  # no thread of `threading`: its locks may be held where the collector comes
            _thread.start_new_thread(self._held.clear, ())

    def close(self) -> None:
        """It is not used any more. May wait without end."""
        self._held.clear()

    def __getattr__(self, name: str) -> Callable[..., Work]:
        """What torch's group begins under this name: `send`, `allreduce`, ..."""
        begin = getattr(self._group, name)
        return lambda *arguments: self._waited(begin(*arguments))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Start to receive from a rank."""
        work = self._group.recv(tensors, source, tag)
        return work if sum(one.nbytes for one in tensors) <= WHOLE_BYTES else self._waited(work)

    @property
    def _group(self) -> Group:
        if not self._held:
            raise RuntimeError("it is closed")
        return self._held[0]

    def _waited(self, work: Work) -> Work:
        return cast(Work, GlooWork(work, self.waits))


class Gloo:
    """Gloo lets go of a blocked transfer when its connection closes, and by no call of its own: `abort` shuts the
    sockets that were opened while groups were made, whichever groups are meant, and ends the waits that gloo forgets.

    Groups share a listening socket and its thread. Those that are made after an abort get others: gloo may be stuck
    (`runtime.replay.stuck_calls`).
    """

    ordered = False

    def __init__(self) -> None:
        self._devices: list[GlooDevice] = []
        self._waits = Waits()
        """In the groups that share these devices."""
        self._spared: Callable[[], Sockets] = frozenset
        self._before: Sockets | None = None
        """What was open when groups began to be made; None while none are."""
        self._sockets: Sockets = frozenset()

    @contextlib.contextmanager
    def making(self, spared: Callable[[], Sockets]) -> Iterator[None]:
        """See `Backend`."""
        self._spared, self._before = spared, open_sockets()
        if not self._devices:
            self._sockets = frozenset()
        try:
            yield
        finally:
            self._sockets, self._before = self._sockets | (open_sockets() - self._before), None

    def group(self, meeting: Meeting) -> Group:
        """See `Backend`."""
        made = GlooGroup(self._waits)
        self._devices = self._devices or gloo_devices()
        made.waits.wait(partial(made.meet, meeting, [*self._devices]))
        return cast(Group, made)

    def reuse(self, group: Group) -> None:
        """Nothing is to be done."""

    def abort(self, groups: Collection[Group]) -> None:  # noqa: ARG002
        """See `Backend`."""
        waits, self._waits, self._devices = self._waits, Waits(), []
        waits.end(self.cut)

    def cut(self) -> Sockets:
        """Break the connections, as a network may: these."""
        before = self._before
        return cut((self._sockets if before is None else self._sockets | (open_sockets() - before)) - self._spared())

    def lost(self, group: Group) -> str | None:
        """See `Backend`."""
        return SHUT if cast(GlooGroup, group).waits.ended else None

    def over(self, groups: Collection[Group]) -> bool:  # noqa: ARG002
        """It is once their sockets are shut."""
        return True

    def begun(self, group: Group) -> int:  # noqa: ARG002
        """Groups are not used again."""
        return 0

    def close(self, groups: Collection[Group]) -> None:
        """See `Backend`."""
        for one in cast(Collection[GlooGroup], groups):
            one.close()
