"""Create process groups over host memory by gloo, whose waits any thread can end."""

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

from slipstream.runtime.errors import first_line
from slipstream.runtime.replay.backend import GroupRendezvous
from slipstream.runtime.replay.sockets import Sockets, find_open_sockets, is_any_open, shut_down_sockets
from slipstream.runtime.replay.torch_groups import GlooDevice, Group, create_gloo_group, open_gloo_devices
from slipstream.runtime.replay.transfers import TRANSFER_TIMEOUT, UnreachableError

CLOSE_TIMEOUT_SECONDS = 0.5
"""Limit on the wait until gloo closes a connection: it takes milliseconds, or never happens."""
MAX_UNSPLIT_BYTES = 2**15
"""Largest receive that arrives in one piece. A thread to wait for it would take longer (40 us)."""
POLL_SECONDS = 0.0005
"""Interval between checks of connections that are closing."""
SHUT_REASON = "its connections were shut down"


class InterruptibleCalls:
    """Calls that wait in gloo until they return or `end_all` is called.

    When a connection breaks, gloo fails the transfers that it has not started. It forgets transfers
    that are half written or half read, or were about to be written, and these wait until their
    timeout. So does a call that creates a group when a member has died before it could connect.
    Therefore each such call runs in a thread of its own, and the thread that needs the result waits
    for that thread or for `end_all`.
    """

    def __init__(self) -> None:
        self._idle: list[_CallThread] = []
        self._open_calls: set[_WaitingCall] = set()
        self.ended = False
        self._is_closing: Callable[[], bool] = lambda: True
        """Function that returns whether a connection that was shut down is not closed yet."""
        self._lock = threading.Lock()
        """Lock by which `end_all` sees each wait, or the wait sees that."""

    def run_call(self, call: Callable[[], object]) -> None:
        """Run a call in its own thread, and wait until it or `end_all`. Raises RuntimeError if the
        call does, or if its wait was ended."""
        waiting = _WaitingCall(call)
        with self._lock:
            if not self.ended:
                self._open_calls.add(waiting)
            waiter = self._idle.pop() if self._idle else _CallThread()
        waiter.queue.put(waiting)
        if not self.ended:
            waiting.released.acquire()
        if not waiting.is_done:
            self._wait_for_closing(waiting)
        with self._lock:
            self._open_calls.discard(waiting)
            if waiting.is_done and not self.ended:
                self._idle.append(waiter)
            else:
                waiter.queue.put(None)
        if waiting.error is not None:
            try:
                raise waiting.error
            finally:
                del waiting  # the traceback refers to this frame
        if not waiting.is_done:
            raise RuntimeError(SHUT_REASON)

    def end_all(self, cut: Callable[[], Sockets]) -> None:
        """Break all connections, and end all waits once they are closed. The function `cut` breaks
        the connections and returns their sockets."""
        with self._lock:
            self.ended = True
            waits, self._open_calls = self._open_calls, set()
            idle, self._idle = self._idle, []
        shut = cut()
        self._is_closing = lambda: is_any_open(shut)
        for waiting in waits:
            waiting.release()
        for waiter in idle:
            waiter.queue.put(None)

    def _wait_for_closing(self, one: "_WaitingCall") -> None:
        """Wait until connections are closed, or the call returns; gloo may write until then."""
        # The wait lasts at most `CLOSE_TIMEOUT_SECONDS`.
        deadline = time.monotonic() + CLOSE_TIMEOUT_SECONDS
        while not one.is_done and self._is_closing() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


class _WaitingCall:
    """A call that waits for a transfer, a sum, or a group's members."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.is_done = False
        self.error: Exception | None = None
        self.released = threading.Lock()
        self.released.acquire()

    def release(self) -> None:
        """Let the thread of this call continue: it is done, or all waits end."""
        with contextlib.suppress(RuntimeError):  # already released
            self.released.release()


class _CallThread:
    """A thread that runs waiting calls, one after the other."""

    def __init__(self) -> None:
        self.queue = SimpleQueue[_WaitingCall | None]()
        threading.Thread(target=self._run, daemon=True, name="waiting for gloo").start()

    def _run(self) -> None:
        while (waiting := self.queue.get()) is not None:
            try:
                waiting.call()
            except Exception as error:
                waiting.error = error
            waiting.is_done = True
            waiting.release()
            del waiting


class GlooWork:
    """A pending operation of a group, whose wait `InterruptibleCalls.end_all` ends."""

    def __init__(self, work: Work, waits: InterruptibleCalls) -> None:
        self._work = work
        self._waits = waits

    def wait(self) -> None:
        """Wait until the operation is done. Raises RuntimeError if it fails, or the wait was
        ended."""
        self._waits.run_call(self._work.wait)


class GlooGroup:
    """A process group over gloo.

    Torch's destructor of a group waits for all pending operations, and so without limit for those
    that gloo has forgotten. It runs in the thread that drops the last reference, which can be any
    thread at any time: an exception that refers to itself through its traceback keeps the variables
    of its frames until Python's garbage collector runs. Therefore torch's group is released by
    `close`, or in a thread of its own.
    """

    def __init__(self, waits: InterruptibleCalls) -> None:
        self._torch_group_slot: list[Group] = []
        """Torch's group, to which no other object keeps a reference, or nothing after `close`."""
        self.waits = waits

    def join_members(self, meeting: GroupRendezvous, devices: Sequence[GlooDevice]) -> None:
        """Create torch's group over gloo's listening sockets, when all members have joined. Raises
        RuntimeError if one does not."""
        self._torch_group_slot.append(create_gloo_group(meeting.keys, meeting.rank, meeting.size, TRANSFER_TIMEOUT,
                                                        devices))

    def __del__(self) -> None:
        if self._torch_group_slot:  # no thread of `threading`: its locks may be held where the collector comes
            _thread.start_new_thread(self._torch_group_slot.clear, ())

    def close(self) -> None:
        """Release torch's group. May wait without limit."""
        self._torch_group_slot.clear()

    def __getattr__(self, name: str) -> Callable[..., Work]:
        """Return a method of torch's group, such as `send`, whose waits can be ended."""
        begin = getattr(self._open_group, name)
        return lambda *arguments: self._as_interruptible(begin(*arguments))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Start to receive tensors from rank `source`, which sends them with the same `tag`.
        `InterruptibleCalls` can end a wait for the returned work, unless the tensors are small."""
        work = self._open_group.recv(tensors, source, tag)
        return work if sum(tensor.nbytes for tensor in tensors) <= MAX_UNSPLIT_BYTES else self._as_interruptible(work)

    @property
    def _open_group(self) -> Group:
        if not self._torch_group_slot:
            raise RuntimeError("the process group is closed")
        return self._torch_group_slot[0]

    def _as_interruptible(self, work: Work) -> Work:
        return cast(Work, GlooWork(work, self.waits))


class GlooBackend:
    """Gloo backend, whose abort shuts down the sockets of all groups.

    It ends the waits that gloo forgets, too. Gloo releases a blocked transfer only when its
    connection closes; it has no call for that. The sockets are those that were opened while groups
    were created, so an abort affects all groups. Groups share a listening socket and its thread.
    Groups created after an abort get new ones, because gloo may be stuck
    (`runtime.replay.stuck_calls`).
    """

    ordered = False

    def __init__(self) -> None:
        self._devices: list[GlooDevice] = []
        self._waits = InterruptibleCalls()
        """Calls that wait in the groups over the current listening sockets."""
        self._exempt_sockets: Callable[[], Sockets] = frozenset
        self._sockets_before: Sockets | None = None
        """Sockets that were open when the creation of groups began; None while none are created."""
        self._sockets: Sockets = frozenset()

    @contextlib.contextmanager
    def creating_groups(self, spared: Callable[[], Sockets]) -> Iterator[None]:
        """Return a context manager within which `create_group` must be called.

        An abort shuts down the sockets that are opened within it, except those that `spared`
        returns at the time of the abort.
        """
        self._exempt_sockets, self._sockets_before = spared, find_open_sockets()
        if not self._devices:
            self._sockets = frozenset()
        try:
            yield
        finally:
            self._sockets, self._sockets_before = self._sockets | (find_open_sockets() - self._sockets_before), None

    def create_group(self, meeting: GroupRendezvous) -> Group:
        """Create a process group; return it when all members have joined. Raises RuntimeError."""
        group_here = GlooGroup(self._waits)
        try:
            self._devices = self._devices or open_gloo_devices()
        except RuntimeError as error:  # as with a network interface that does not exist
            raise UnreachableError(first_line(error)) from error
        group_here.waits.run_call(partial(group_here.join_members, meeting, [*self._devices]))
        return cast(Group, group_here)

    def allow_reuse(self, group: Group) -> None:
        """Do nothing; groups over gloo are not reused."""

    def abort_groups(self, groups: Collection[Group]) -> None:  # noqa: ARG002
        """Shut down the connections of all groups, not only of `groups`, and end their waits."""
        waits, self._waits, self._devices = self._waits, InterruptibleCalls(), []
        waits.end_all(self.cut_connections)

    def cut_connections(self) -> Sockets:
        """Break all connections, as a network failure would, and return their sockets."""
        before = self._sockets_before
        return shut_down_sockets((self._sockets if before is None else self._sockets | (find_open_sockets() - before))
                                 - self._exempt_sockets())

    def failure_reason(self, group: Group) -> str | None:
        """Return why the group is no longer usable, or None if it is. See `Backend`."""
        return SHUT_REASON if cast(GlooGroup, group).waits.ended else None

    def is_quiescent(self, groups: Collection[Group]) -> bool:  # noqa: ARG002
        """Return True: after an abort, no operation can write once its sockets are shut down."""
        return True

    def count_started(self, group: Group) -> int:  # noqa: ARG002
        """Return 0, as groups over gloo are not reused."""
        return 0

    def close_groups(self, groups: Collection[Group]) -> None:
        """Release torch's process groups. May wait without limit."""
        for group in cast(Collection[GlooGroup], groups):
            group.close()
