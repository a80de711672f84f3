"""Create NCCL communicators that any thread can abort, and check what has ended.

No two communicators in use at the same time share a stream. Torch gives each communicator a stream
out of 32, in turn. After many communicators were created and closed, a new one would get the stream
of one that is still used, and its transfers would wait for those of the other one, perhaps forever.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.distributed import Work

from slipstream.runtime.errors import first_line
from slipstream.runtime.replay.backend import GroupRendezvous
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.replay.torch_groups import Group, NcclGroup, TCPStore, create_nccl_group
from slipstream.runtime.replay.transfers import TRANSFER_TIMEOUT

HIGHEST_PRIORITY = -100
"""Priority of the drawn CUDA streams, of which torch takes the nearest, as for communicators."""
MAX_STREAMS = 256
"""Largest number of streams in torch's pool, if given out in turn."""


class StreamRotation:
    """Chooser of CUDA streams: a new communicator gets one that no other uses. The function `draw`
    takes the pool's next stream, and returns its identity."""

    def __init__(self, draw: Callable[[], int]) -> None:
        self._draw = draw
        self._streams: list[int] = []
        """All streams of the pool, in the order in which they are drawn."""
        self._used: WeakKeyDictionary[object, frozenset[int]] = WeakKeyDictionary()
        """Streams that each live communicator may have."""
        self._lock = threading.Lock()

    @contextmanager
    def reserve_stream(self, communicator: object) -> Iterator[None]:
        """Give the communicator that connects within this context its own stream, if one is
        free."""
        with self._lock:
            before = self._skip_used()
        try:
            yield
        finally:
            with self._lock:
                after = self._draw_next()
                count = len(self._streams)
                # Streams that another thread drew meanwhile count as used by both communicators.
                self._used[communicator] = frozenset(
                    self._streams[(before + 1 + step) % count] for step in range((after - before - 1) % count))

    def _skip_used(self) -> int:
        """Draw streams until the pool's next one is unused. Return the index of the last drawn."""
        if not self._streams:
            self._streams.append(self._draw())
            while (stream := self._draw()) != self._streams[0] and len(self._streams) < MAX_STREAMS:
                self._streams.append(stream)
        place, used = self._draw_next(), {stream for streams in self._used.values() for stream in streams}
        for _ in self._streams:
            if self._streams[(place + 1) % len(self._streams)] not in used:
                break
            place = self._draw_next()
        return place

    def _draw_next(self) -> int:
        """Draw the pool's next stream, and return its index in the order of the pool."""
        stream = self._draw()
        return self._streams.index(stream) if stream in self._streams else 0


@cache
def get_stream_rotation(device: torch.device) -> StreamRotation:
    """Return the object that chooses the streams of this process's communicators on a GPU."""
    return StreamRotation(lambda: torch.cuda.Stream(device, HIGHEST_PRIORITY).cuda_stream)  # type: ignore[no-untyped-call]


ABORT_GRACE_SECONDS = 0.02
"""Time for a communicator to end before an abort; a new one takes longer."""
ABORT_RETRY_SECONDS = 0.05
"""Interval between attempts to abort."""
POLL_SECONDS = 0.001
"""Interval between checks if the device has finished."""
DECISION_KEY = "decision"
"""Key by which the members of a new group agree on whether they connect."""
CONNECT, LEAVE = b"connect", b"leave"


class OperationRefusedError(RuntimeError):
    """Error for an operation that is to be started after the generation has ended."""


class Communicator:
    """A process group over NCCL, and its pending operations.

    Calls return at once, and the device executes the operations in their order, so all have ended
    when the last one has. If a member dies or does not take part, the device waits for it without
    limit, until `abort`; then every operation ends as if it had succeeded.

    Torch's `Work.is_completed` is not enough, because it is also true after an error, while the
    device still waits. Instead, an event is recorded on the device after the last operation.
    Threads of this class wait for the event, so `is_quiescent` itself calls neither CUDA nor NCCL:
    such a call may wait for a lock that an abort holds, and would block heartbeats.
    """

    def __init__(self, nccl: NcclGroup) -> None:
        self._nccl = nccl
        self._in_call = False
        """True while a thread is in a call that starts an operation."""
        self._last_work: Work | None = None
        """Operation that was started last."""
        self._watched_work: Work | None = None
        """Operation for which a thread waits, or has waited."""
        self._ended_work: Work | None = None
        """Last operation that the device is known to have ended."""
        self._generation_ended = False
        """True if the generation that used the communicator last has ended."""
        self._abort_undecided = False
        """True until it is decided if the end of a generation aborts the communicator."""
        self._failure: str | None = None
        self._aborting = False
        """True once the abort has started."""
        self.started_count = 0
        """Number of operations that this member has started."""
        self._connecting_ended = threading.Event()
        """Event set when connecting has ended, or its result is not needed."""

    def connect(self, *, directed: bool) -> None:
        """Connect all members; return when they are connected. Raises RuntimeError.

        If a member dies, connecting ends by itself with an error. It runs in a thread of its own,
        which is abandoned when the generation ends. If `directed`, the first of two members will
        only send to the second one.
        """
        self.start_connecting(directed=directed)
        self._connecting_ended.wait()
        self._raise_if_ended()
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def start_connecting(self, *, directed: bool) -> None:
        """Start to connect all members in a thread, which aborts if the generation ends. `directed`
        is as in `connect`."""
        threading.Thread(target=self._connect_and_probe, args=(directed,), daemon=True, name="connecting").start()

    def __getattr__(self, name: str) -> Callable[..., Work]:
        """Return the method of torch's group that starts an operation: `send`, `allreduce`, ..."""
        return partial(self._start_operation, getattr(self._nccl.group, name))

    def failure_reason(self) -> str | None:
        """Return why the communicator is no longer usable, or None if it is usable."""
        return self._failure or self._nccl.watchdog_error()

    def allow_reuse(self) -> None:
        """Accept operations again, of another generation."""
        self._generation_ended = False

    def refuse_operations(self) -> None:
        """Refuse new operations, as the generation has ended. The caller must then call
        `abort_unless_quiescent` in another thread."""
        self._abort_undecided, self._generation_ended = True, True
        self._connecting_ended.set()

    def abort_unless_quiescent(self) -> None:
        """Abort the communicator if operations are pending after a grace period, or failed."""
        deadline = time.monotonic() + ABORT_GRACE_SECONDS
        while not (over := self._has_device_ended()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if not over or self._nccl.watchdog_error() is not None:
            self.abort()
        self._abort_undecided = False

    def is_quiescent(self) -> bool:
        """Return whether the device has ended all operations; each call starts a check."""
        return not self._abort_undecided and self._has_device_ended()

    def abort(self) -> None:
        """Abort all operations and retire the communicator, without waiting for NCCL."""
        self._generation_ended = True
        self._connecting_ended.set()
        self._failure = self._failure or "it was aborted"
        if not self._aborting:
            self._aborting = True
            threading.Thread(target=self._abort_group, daemon=True, name="aborting").start()

    def _connect_and_probe(self, directed: bool) -> None:
        """Connect, and run one operation, in which NCCL creates what the first one needs."""
        device = self._nccl.device
        try:
            with get_stream_rotation(device).reserve_stream(self) if device.type == "cuda" \
                    else contextlib.nullcontext():
                self._nccl.connect()
            operand = torch.zeros(1, device=device)
            if not directed:
                work = self._start_operation(self._nccl.group.allreduce, [operand])
            elif self._nccl.rank == 0:
                work = self._start_operation(self._nccl.group.send, [operand], 1, 0)
            else:
                work = self._start_operation(self._nccl.group.recv, [operand], 0, 0)
            self._watched_work = work
            self._wait_for_work(work)
        except RuntimeError as error:
            self._failure = self._failure or first_line(error)
        finally:
            self._connecting_ended.set()
        if self._generation_ended or self._failure is not None:
            self.abort()

    def _has_device_ended(self) -> bool:
        if self._in_call:
            return False
        last = self._last_work
        if last is not None and self._watched_work is not last:
            self._watched_work = last
            threading.Thread(target=self._wait_for_work, args=(last,), daemon=True, name="waiting for NCCL").start()
        return self._ended_work is last

    def _wait_for_work(self, work: Work) -> None:
        try:
            self._nccl.wait_for_device(work)
        except RuntimeError as error:  # the device has failed, and executes nothing more
            self._failure = self._failure or first_line(error)
        self._ended_work = work

    def _abort_group(self) -> None:
        deadline = time.monotonic() + TRANSFER_TIMEOUT.total_seconds()
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # not connected yet
                self._nccl.group.abort()
            if not self._in_call:
                return
            time.sleep(ABORT_RETRY_SECONDS)  # a thread was about to start an operation

    def _start_operation(self, call: Callable[..., Work], *arguments: Any) -> Work:
        # The thread that ends the order sets `_generation_ended`, then reads `_in_call`: one of the two sees the other.
        self._in_call = True
        try:
            self._raise_if_ended()
            self.started_count += 1  # counts operations that fail half-way, too
            work = self._last_work = call(*arguments)
        except OperationRefusedError:
            raise
        except RuntimeError as error:
            self._failure = self._failure or first_line(error)
            raise
        finally:
            self._in_call = False
        return work

    def _raise_if_ended(self) -> None:
        if self._generation_ended:
            raise OperationRefusedError("the generation has ended")


class NcclBackend:
    """NCCL backend, whose abort concerns communicators with pending operations only."""

    ordered = True

    def __init__(self, make: Callable[[TCPStore, str, int, int, Any, bool], NcclGroup] = create_nccl_group) -> None:
        self._make = make
        self._connecting: Communicator | None = None
        self._aborts = 0

    def creating_groups(self, spared: Callable[[], Sockets]) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Return a context manager that does nothing. See `Backend`."""
        return contextlib.nullcontext()

    def create_group(self, meeting: GroupRendezvous) -> Group:
        """Create a communicator; return it when all members are connected. Raises RuntimeError.

        NCCL's own wait for a missing member cannot be ended. So all members first announce that
        they are present, and agree that all of them connect, or none. A member that leaves after
        this decision still connects, in a thread of its own.
        """
        aborts, keys = self._aborts, meeting.keys
        keys.set(f"here/{meeting.rank}", b"!")
        try:
            keys.wait([f"here/{meeting.rank}"])
        except RuntimeError:
            if keys.set_once(DECISION_KEY, LEAVE) == CONNECT:
                communicator_to_abort = self._create_communicator(meeting)
                communicator_to_abort.refuse_operations()
                communicator_to_abort.start_connecting(directed=meeting.directed)
            raise
        if keys.set_once(DECISION_KEY, CONNECT) == LEAVE:
            raise RuntimeError("another member has left")
        self._connecting = communicator = self._create_communicator(meeting)
        if aborts != self._aborts:
            communicator.refuse_operations()
            self._abort_pending([communicator])
        try:
            communicator.connect(directed=meeting.directed)
        finally:
            self._connecting = None
        return cast(Group, communicator)

    def allow_reuse(self, group: Group) -> None:
        """Allow another generation to use a communicator. See `Backend`."""
        cast(Communicator, group).allow_reuse()

    def abort_groups(self, groups: Collection[Group]) -> None:
        """Abort the communicators that have pending operations. See `Backend`."""
        self._aborts += 1
        connecting = self._connecting
        ended = [*cast(Collection[Communicator], groups), *(() if connecting is None else (connecting,))]
        for communicator in ended:
            communicator.refuse_operations()
        self._abort_pending(ended)

    def failure_reason(self, group: Group) -> str | None:
        """Return why a communicator is no longer usable, or None if it is. See `Backend`."""
        return cast(Communicator, group).failure_reason()

    def is_quiescent(self, groups: Collection[Group]) -> bool:
        """Return whether the device has ended all their operations. See `Backend`."""
        return not [one for one in cast(Collection[Communicator], groups) if not one.is_quiescent()]  # each is asked

    def count_started(self, group: Group) -> int:
        """Return the number of operations that this member has started. See `Backend`."""
        return cast(Communicator, group).started_count

    def close_groups(self, groups: Collection[Group]) -> None:
        """Abort communicators without waiting: other members may be gone. See `Backend`."""
        for communicator in cast(Collection[Communicator], groups):
            communicator.abort()

    def _create_communicator(self, meeting: GroupRendezvous) -> Communicator:
        return Communicator(self._make(cast(TCPStore, meeting.store), meeting.prefix, meeting.rank, meeting.size,
                                       TRANSFER_TIMEOUT, meeting.directed))

    def _abort_pending(self, ended: Collection[Communicator]) -> None:
        """Start a thread for each communicator that aborts it if operations stay pending."""
        for communicator in ended:
            threading.Thread(target=communicator.abort_unless_quiescent, daemon=True, name="ending").start()
