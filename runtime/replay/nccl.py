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
from slipstream.runtime.replay.python_exit import start_thread
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.replay.torch_groups import Group, NcclGroup, TCPStore, create_nccl_group
from slipstream.runtime.replay.transfers import TRANSFER_TIMEOUT

HIGHEST_PRIORITY = -100
"""Priority of the streams to draw; torch lowers it to its highest, as for communicators."""
MAX_STREAMS = 256
"""Largest number of streams that are drawn to learn which ones torch's pool has."""


class StreamRotation:
    """Chooser of CUDA streams of torch's pool, so that no two communicators share one.

    The function `draw` takes the pool's next stream.
    """

    def __init__(self, draw: Callable[[], int]) -> None:
        self._draw = draw
        # Streams of the pool, in the order in which they are drawn.
        self._streams: list[int] = []
        # By communicator, so that a closed one frees its streams.
        self._used: WeakKeyDictionary[object, frozenset[int]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def reserve_stream(self, communicator: object) -> Iterator[None]:
        """Let a communicator that connects in this context get an unused stream if possible."""
        with self._lock:
            before = self._skip_used()
        try:
            yield
        finally:
            with self._lock:
                # What torch drew for the communicator lies between the two positions.
                after = self._draw_next()
                count = len(self._streams)
                # Streams that another thread drew meanwhile count as used by both communicators.
                self._used[communicator] = frozenset(
                    self._streams[(before + 1 + step) % count]
                    for step in range((after - before - 1) % count)
                )

    def _skip_used(self) -> int:
        """Draw streams until the pool's next one is unused; return the last one's index."""
        # The first time, draw a whole turn to learn the streams of the pool.
        if not self._streams:
            self._streams.append(self._draw())
            while (stream := self._draw()) != self._streams[0] and len(self._streams) < MAX_STREAMS:
                self._streams.append(stream)
        # Find the pool's present position: only drawing tells it.
        place = self._draw_next()
        used = {stream for streams in self._used.values() for stream in streams}
        # At most one turn: if all streams are used, the next one is as good as any.
        for _ in self._streams:
            if self._streams[(place + 1) % len(self._streams)] not in used:
                break
            place = self._draw_next()
        return place

    def _draw_next(self) -> int:
        """Draw the pool's next stream, and return its index in the order of the pool."""
        stream = self._draw()
        # Torch's pool has 32 streams. Of one with more than MAX_STREAMS, positions stay unknown:
        # any number does, and streams may then be shared.
        return self._streams.index(stream) if stream in self._streams else 0


@cache
def get_stream_rotation(device: torch.device) -> StreamRotation:
    """Return the object that chooses the streams of this process's communicators on a GPU."""

    def draw() -> int:
        stream = torch.cuda.Stream(device, HIGHEST_PRIORITY)  # type: ignore[no-untyped-call]
        return stream.cuda_stream

    return StreamRotation(draw)


ABORT_GRACE_SECONDS = 0.02
"""Seconds that pending operations get to end by themselves before an abort."""
ABORT_RETRY_SECONDS = 0.05
"""Seconds between attempts to abort."""
POLL_SECONDS = 0.001
"""Seconds between checks whether the device has finished."""
DECISION_KEY = "decision"
"""Key by which the members of a new group agree on whether they connect."""
CONNECT = b"connect"
"""Decision of the members of a new group that all of them connect."""
LEAVE = b"leave"
"""Decision that none of them connects, as one has left."""


class OperationRefusedError(RuntimeError):
    """Error for an operation that would start after its generation has ended."""


class Communicator:
    """A process group over NCCL that any thread can abort, and its pending operations.

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
        # True while a thread starts an operation.
        self._in_call = False
        self._last_work: Work | None = None
        # The operation for which a thread waits, or has waited; and the latest that has ended.
        self._watched_work: Work | None = None
        self._ended_work: Work | None = None
        self._generation_ended = False
        # True until it is decided whether the end of a generation aborts the communicator.
        self._abort_undecided = False
        self._failure: str | None = None
        self._aborting = False
        self.started_count = 0
        """Number of operations that this member has started."""
        # Set also when the generation ends, since the result of connecting is then not needed.
        self._connecting_ended = threading.Event()

    def connect(self, *, directed: bool) -> None:
        """Connect all members; if `directed`, only the first sends, and the second receives.

        Raises RuntimeError if connecting fails, and OperationRefusedError if the generation ends.
        """
        # In a thread of its own, which is abandoned when the generation ends.
        self.start_connecting(directed=directed)
        self._connecting_ended.wait()
        self._raise_if_ended()
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def start_connecting(self, *, directed: bool) -> None:
        """Start to `connect`, `directed` or not, in a thread.

        The thread aborts the communicator if connecting fails or the generation ends.
        """
        start_thread("connecting", self._connect_and_probe, directed)

    def __getattr__(self, name: str) -> Callable[..., Work]:
        """Return the method of torch's group that starts an operation: `send`, `allreduce`, ..."""
        return partial(self._start_operation, getattr(self._nccl.group, name))

    def failure_reason(self) -> str | None:
        """Return why the communicator is no longer usable; None if it is usable."""
        return self._failure or self._nccl.watchdog_error()

    def allow_reuse(self) -> None:
        """Accept operations again, for another generation."""
        self._generation_ended = False

    def refuse_operations(self) -> None:
        """Refuse new operations; `abort_unless_quiescent` must follow in another thread."""
        self._abort_undecided, self._generation_ended = True, True
        self._connecting_ended.set()

    def abort_unless_quiescent(self) -> None:
        """Abort the communicator if an operation has failed, or is pending after a grace period."""
        # Most communicators end by themselves within a moment, and stay usable.
        deadline = time.monotonic() + ABORT_GRACE_SECONDS
        while not (over := self._has_device_ended()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        # A failed operation ends at some members only: the communicator is of no more use.
        if not over or self._nccl.watchdog_error() is not None:
            self.abort()
        self._abort_undecided = False

    def is_quiescent(self) -> bool:
        """Return whether the device has ended all operations, as far as the last check found.

        Each call starts another check.
        """
        return not self._abort_undecided and self._has_device_ended()

    def abort(self) -> None:
        """Abort all operations and retire the communicator, without waiting for NCCL."""
        self._generation_ended = True
        self._connecting_ended.set()
        self._failure = self._failure or "it was aborted"
        # NCCL's abort may block, and one is enough.
        if not self._aborting:
            self._aborting = True
            start_thread("aborting", self._abort_group)

    def _connect_and_probe(self, directed: bool) -> None:
        """Connect, and run one operation, so that NCCL creates what a first operation needs."""
        device = self._nccl.device
        try:
            # Connecting takes the pool's next stream.
            with (
                get_stream_rotation(device).reserve_stream(self)
                if device.type == "cuda"
                else contextlib.nullcontext()
            ):
                self._nccl.connect()
            # Probe in the direction that is used, with what all members can do without a deadlock.
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
        # A call that has begun may still set the last operation.
        if self._in_call:
            return False
        last = self._last_work
        # One thread for each last operation, however often this is asked.
        if last is not None and self._watched_work is not last:
            self._watched_work = last
            start_thread("waiting for NCCL", self._wait_for_work, last)
        return self._ended_work is last

    def _wait_for_work(self, work: Work) -> None:
        try:
            self._nccl.wait_for_device(work)
        except RuntimeError as error:  # the device has failed, and executes nothing more
            self._failure = self._failure or first_line(error)
        self._ended_work = work

    def _abort_group(self) -> None:
        # Repeated: an abort has no effect before the communicator is connected.
        deadline = time.monotonic() + TRANSFER_TIMEOUT.total_seconds()
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # not connected yet
                self._nccl.group.abort()
            if not self._in_call:
                return
            time.sleep(ABORT_RETRY_SECONDS)  # a thread was about to start an operation

    def _start_operation(self, call: Callable[..., Work], *arguments: Any) -> Work:
        # The thread that ends the order sets `_generation_ended`, then reads `_in_call`: one of the
        # two sees the other.
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
    """NCCL backend, whose abort ends only communicators with pending or failed operations."""

    ordered = True

    def __init__(
        self, make: Callable[[TCPStore, str, int, int, Any, bool], NcclGroup] = create_nccl_group
    ) -> None:
        self._make = make
        self._connecting: Communicator | None = None
        self._aborts = 0

    def creating_groups(
        self,
        exempt_sockets: Callable[[], Sockets],  # noqa: ARG002
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that does nothing. See `Backend`."""
        return contextlib.nullcontext()

    def create_group(self, meeting: GroupRendezvous) -> Group:
        """Create a communicator; return it when all members are connected. See `Backend`."""
        # Announce this member, and wait for all: NCCL's own wait for a missing one cannot be ended.
        aborts, keys = self._aborts, meeting.keys
        keys.set(f"here/{meeting.rank}", b"!")
        try:
            keys.wait([f"here/{meeting.rank}"])
        except RuntimeError:
            # Leave; but after the decision to connect the others wait for this member, which
            # connects in a thread of its own.
            if keys.set_once(DECISION_KEY, LEAVE) == CONNECT:
                communicator_to_abort = self._create_communicator(meeting)
                communicator_to_abort.refuse_operations()
                communicator_to_abort.start_connecting(directed=meeting.directed)
            raise
        if keys.set_once(DECISION_KEY, CONNECT) == LEAVE:
            raise RuntimeError("another member has left")
        # An abort that came before the next line did not see the communicator: repeat it here.
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
        """Abort communicators with pending operations; all refuse new ones. See `Backend`."""
        self._aborts += 1
        # The communicator that is just being connected is in no list of groups yet.
        connecting, communicators = self._connecting, [*cast(Collection[Communicator], groups)]
        if connecting is not None:
            communicators.append(connecting)
        # All refuse before the first is aborted: its thread could go on in another one.
        for communicator in communicators:
            communicator.refuse_operations()
        self._abort_pending(communicators)

    def failure_reason(self, group: Group) -> str | None:
        """Return why a communicator is no longer usable; None if it is usable. See `Backend`."""
        return cast(Communicator, group).failure_reason()

    def is_quiescent(self, groups: Collection[Group]) -> bool:
        """Return whether the device has ended all operations of these groups. See `Backend`."""
        # All are asked, as the question starts a check.
        answers = [group.is_quiescent() for group in cast(Collection[Communicator], groups)]
        return all(answers)

    def count_started(self, group: Group) -> int:
        """Return the number of operations that this process has started. See `Backend`."""
        return cast(Communicator, group).started_count

    def close_groups(self, groups: Collection[Group]) -> None:
        """Abort communicators without waiting: other members may be gone. See `Backend`."""
        for communicator in cast(Collection[Communicator], groups):
            communicator.abort()

    def _create_communicator(self, meeting: GroupRendezvous) -> Communicator:
        return Communicator(
            self._make(
                cast(TCPStore, meeting.store),
                meeting.prefix,
                meeting.rank,
                meeting.size,
                TRANSFER_TIMEOUT,
                meeting.directed,
            )
        )

    def _abort_pending(self, communicators: Collection[Communicator]) -> None:
        for communicator in communicators:
            start_thread("ending", communicator.abort_unless_quiescent)
