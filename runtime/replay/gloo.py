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
from slipstream.runtime.replay.python_exit import finish_before_exit
from slipstream.runtime.replay.sockets import (
    Sockets,
    find_open_sockets,
    is_any_open,
    shut_down_sockets,
)
from slipstream.runtime.replay.torch_groups import (
    GlooDevice,
    Group,
    create_gloo_group,
    open_gloo_devices,
)
from slipstream.runtime.replay.transfers import TRANSFER_TIMEOUT, UnreachableError

CLOSE_TIMEOUT_SECONDS = 0.5
"""Longest wait until gloo closes a connection, which takes milliseconds, or never happens."""
MAX_UNSPLIT_BYTES = 2**15  # a wait in a thread would cost 40 us
"""Largest receive, in bytes, that comes in one piece: its wait needs no thread."""
POLL_SECONDS = 0.0005
"""Interval between checks of connections that are closing."""
SHUT_REASON = "its connections were shut down"


class InterruptibleCalls:
    """Calls that wait in gloo until they return or `end_all` is called.

    When a connection breaks, gloo fails the transfers that it has not started. It forgets transfers
    that are half written or half read, or were about to be written: calls that await them return
    only after their timeout. The same happens to a call that creates a group if a member dies
    before it connects. Therefore each call runs in a thread of its own, which can be left behind.
    """

    def __init__(self) -> None:
        self._idle: list[_CallThread] = []
        self._open_calls: set[_WaitingCall] = set()
        self.ended = False
        # Returns whether a connection that was shut down is not closed yet.
        self._is_closing: Callable[[], bool] = lambda: True
        # With this lock, either `end_all` sees a new wait, or the wait sees that all have ended.
        self._lock = threading.Lock()

    def run_call(self, call: Callable[[], object]) -> None:
        """Run a call in another thread, and wait until it returns or `end_all` is called.

        After `end_all`, waits up to `CLOSE_TIMEOUT_SECONDS` for connections to close. Raises the
        error of the call, and RuntimeError if `end_all` came first.
        """
        # Give the call to an idle thread or a new one.
        waiting = _WaitingCall(call)
        with self._lock:
            if not self.ended:
                self._open_calls.add(waiting)
            waiter = self._idle.pop() if self._idle else _CallThread()
        waiter.queue.put(finish_before_exit(_make_call, waiting))
        if not self.ended:
            waiting.released.acquire()
        # Released by `end_all`: gloo may still write to tensors while connections close.
        if not waiting.is_done:
            self._wait_for_closing(waiting)
        # A thread whose call has not returned is not reused; it ends when the call does.
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
        """Break connections, and end all waits once these connections are closed, without waiting.

        `cut` breaks them, and returns their sockets. Each wait ends after `CLOSE_TIMEOUT_SECONDS`
        at the latest.
        """
        # Refuse new waits first: none may begin after the connections are broken.
        with self._lock:
            self.ended = True
            waits, self._open_calls = self._open_calls, set()
            idle, self._idle = self._idle, []
        shut = cut()
        self._is_closing = lambda: is_any_open(shut)
        # Release the waiting threads, and end the threads that no call needs any more.
        for waiting in waits:
            waiting.release()
        for waiter in idle:
            waiter.queue.put(None)

    def _wait_for_closing(self, call: "_WaitingCall") -> None:
        # A limit, as gloo never closes a connection whose thread is stuck.
        deadline = time.monotonic() + CLOSE_TIMEOUT_SECONDS
        while not call.is_done and self._is_closing() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


class _WaitingCall:
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
    def __init__(self) -> None:
        self.queue = SimpleQueue[Callable[[], None] | None]()
        threading.Thread(target=self._run, daemon=True, name="waiting for gloo").start()

    def _run(self) -> None:
        while (make_call := self.queue.get()) is not None:
            make_call()


def _make_call(waiting: _WaitingCall) -> None:
    try:
        waiting.call()
    except Exception as error:
        waiting.error = error
    waiting.is_done = True
    waiting.release()
    del waiting  # the traceback of the error refers to this frame


class GlooWork:
    """A pending operation of a group; `InterruptibleCalls.end_all` ends waits for it."""

    def __init__(self, work: Work, waits: InterruptibleCalls) -> None:
        self._work = work
        self._waits = waits

    def wait(self) -> None:
        """Wait until the operation is done. Raises RuntimeError, also if the wait is ended."""
        self._waits.run_call(self._work.wait)


class GlooGroup:
    """A process group over gloo, whose waits can be ended, and whose deletion never waits.

    Torch's destructor of a group waits for all pending operations, without limit for those that
    gloo has forgotten. The destructor runs in the thread that drops the last reference, which can
    be any thread at any time: an exception that refers to itself through its traceback keeps the
    variables of its frames until Python's garbage collector runs. Therefore torch's group is
    released by `close`, or in a thread of its own.
    """

    def __init__(self, waits: InterruptibleCalls) -> None:
        self._torch_group_slot: list[Group] = []
        """List of torch's group, to which no other object refers; empty after `close`."""
        self.waits = waits

    def join_members(self, meeting: GroupRendezvous, devices: Sequence[GlooDevice]) -> None:
        """Create torch's group with all members, over the network interfaces `devices`.

        Raises RuntimeError if a member does not join.
        """
        self._torch_group_slot.append(
            create_gloo_group(meeting.keys, meeting.rank, meeting.size, TRANSFER_TIMEOUT, devices)
        )

    def __del__(self) -> None:
        # No thread of `threading`: its locks may be held where the collector comes.
        if self._torch_group_slot:
            _thread.start_new_thread(finish_before_exit(self._torch_group_slot.clear), ())

    def close(self) -> None:
        """Release torch's group. May wait without limit."""
        self._torch_group_slot.clear()

    def __getattr__(self, name: str) -> Callable[..., Work]:
        """Return a method of torch's group, such as `send`, whose waits can be ended."""
        # The operation begins in the caller's thread; only the wait for it needs another.
        begin = getattr(self._open_group, name)
        return lambda *arguments: self._as_interruptible(begin(*arguments))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Start to receive from rank `source` what it sends with `tag`.

        Returns work whose wait `end_all` can end, except if the tensors have together at most
        `MAX_UNSPLIT_BYTES`.
        """
        work = self._open_group.recv(tensors, source, tag)
        # These are never half read when a connection breaks, so gloo does not forget them.
        if sum(tensor.nbytes for tensor in tensors) <= MAX_UNSPLIT_BYTES:
            return work
        return self._as_interruptible(work)

    @property
    def _open_group(self) -> Group:
        if not self._torch_group_slot:
            raise RuntimeError("the process group is closed")
        return self._torch_group_slot[0]

    def _as_interruptible(self, work: Work) -> Work:
        return cast(Work, GlooWork(work, self.waits))


class GlooBackend:
    """Gloo backend, whose abort shuts down the sockets of all groups.

    An abort also ends waits that gloo has forgotten. Gloo does not tell which sockets belong to a
    group: an abort shuts down all that were opened while groups were created. Groups share
    listening sockets and their threads.
    """

    ordered = False

    def __init__(self) -> None:
        self._devices: list[GlooDevice] = []
        self._waits = InterruptibleCalls()
        """Calls that wait in the groups over the current listening sockets."""
        self._exempt_sockets: Callable[[], Sockets] = frozenset
        # Sockets that were open when the creation of groups began; None outside of it.
        self._sockets_before: Sockets | None = None
        # Sockets that were opened since, while groups were created.
        self._sockets: Sockets = frozenset()

    @contextlib.contextmanager
    def creating_groups(self, exempt_sockets: Callable[[], Sockets]) -> Iterator[None]:
        """Return a context manager within which `create_group` must be called. See `Backend`."""
        self._exempt_sockets, self._sockets_before = exempt_sockets, find_open_sockets()
        if not self._devices:
            self._sockets = frozenset()
        try:
            yield
        finally:
            # Gloo does not tell which sockets it opens: those that are new now belong to groups.
            new_sockets = find_open_sockets() - self._sockets_before
            self._sockets, self._sockets_before = self._sockets | new_sockets, None

    def create_group(self, meeting: GroupRendezvous) -> Group:
        """Create a process group; return it when all members have joined. See `Backend`."""
        group = GlooGroup(self._waits)
        try:
            self._devices = self._devices or open_gloo_devices()
        except RuntimeError as error:  # as with a network interface that does not exist
            raise UnreachableError(first_line(error)) from error
        # In another thread, as gloo waits for members that have died until its timeout.
        group.waits.run_call(partial(group.join_members, meeting, [*self._devices]))
        return cast(Group, group)

    def allow_reuse(self, group: Group) -> None:
        """Do nothing; groups over gloo are not reused."""

    def abort_groups(self, groups: Collection[Group]) -> None:  # noqa: ARG002
        """Shut down the connections of all groups, not only of `groups`, and end their waits."""
        # Groups created from now on get new listening sockets, because gloo may be stuck
        # (`runtime.replay.stuck_calls`).
        waits, self._waits, self._devices = self._waits, InterruptibleCalls(), []
        waits.end_all(self.cut_connections)

    def cut_connections(self) -> Sockets:
        """Break all but exempt connections, as a network failure would; return their sockets."""
        before, sockets = self._sockets_before, self._sockets
        # While groups are created, their sockets are not in the list yet.
        if before is not None:
            sockets = sockets | (find_open_sockets() - before)
        return shut_down_sockets(sockets - self._exempt_sockets())

    def failure_reason(self, group: Group) -> str | None:
        """Return why a group is no longer usable; None if it is usable. See `Backend`."""
        return SHUT_REASON if cast(GlooGroup, group).waits.ended else None

    def is_quiescent(self, groups: Collection[Group]) -> bool:  # noqa: ARG002
        """Return True: after an abort, no operation can write once its sockets are shut down."""
        return True

    def count_started(self, group: Group) -> int:  # noqa: ARG002
        """Return 0: operations are not counted, as groups over gloo are not reused."""
        return 0

    def close_groups(self, groups: Collection[Group]) -> None:
        """Release torch's process groups. May wait without limit."""
        for group in cast(Collection[GlooGroup], groups):
            group.close()
