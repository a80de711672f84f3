"""A double of NCCL on CPUs: what `replay.torch_groups.create_nccl_group` makes, over sockets, with
NCCL's manners.

Calls return at once; a thread for each group carries them out later, in their order. A send is over
once it is in the buffers on the way, which hold what is small; its receiver may take it later, or
never. Whatever waits for a member that has died, or has left, waits for good. After an abort, all
that was under way ends as if all were well, and holds NaN. An error shows only when it is asked
for, and late. From then on torch says of operations that they are completed, while the device still
waits in them, and begins no others.

Connecting blocks, and no abort ends it: only the last member does, or the death of one. With
`EARLY` set it returns at once; then the first operation waits for the connection, and so does an
abort.
"""

import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Operation = Callable[[Tensor, Tensor], Tensor]
LIMIT_SECONDS = 600.0
LOOK_SECONDS = 0.002
SLOW = "SLIPSTREAM_TESTS_SLOW"
"""Variable of the environment for slow calls: "CALL MEMBER SECONDS FILE".

While that file exists, the member's device begins each such call so much later.
"""

BEGUN = ".begun"
"""Ending of the file that exists once such a call has begun."""

HASTY = "SLIPSTREAM_TESTS_HASTY"
"""In the environment: that there are no commit points."""

EARLY = "SLIPSTREAM_TESTS_EARLY"
"""In the environment: that communicators do not block the host while they connect."""
ERROR_SECONDS = 0.1
"""From an error until torch's watchdog says so."""
CONNECT_SECONDS = 60.0
"""Torch's own patience with a connection, where calls do not block."""


class _LostError(Exception):
    """A member is gone."""


class Work:
    """A call that is carried out later."""

    def __init__(self, failed: threading.Event) -> None:
        self.over = threading.Event()
        self._failed = failed

    def wait(self) -> bool:
        """As a stream waits: to the end, whatever that is."""
        assert self.over.wait(LIMIT_SECONDS), "nobody has aborted it"
        return True

    def is_completed(self) -> bool:
        """Torch's answer: also after an error of its communicator, while the device waits."""
        return self.over.is_set() or self._failed.is_set()


class Double:
    """One member of a group: both an `NcclGroup` and the group within."""

    def __init__(
        self, store: Any, prefix: str, rank: int, size: int, timeout: Any, directed: bool
    ) -> None:
        self.group, self.rank, self.device = self, rank, torch.device("cpu")
        self._store, self._prefix, self._rank, self._size = store, prefix, rank, size
        self._ends: dict[int, socket.socket] = {}
        self._calls: queue.SimpleQueue[
            tuple[str, Callable[[], None], Sequence[Tensor], Work] | None
        ]
        self._calls = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        """The mutex of the communicator, which the first operation holds until there is a
        connection.
        """
        self._failed = threading.Event()
        self._failed_at = 0.0
        self._early = os.environ.get(EARLY, "0") == "1"

    def connect(self) -> None:
        """Meet the others."""
        if not self._early:
            self._connect(LIMIT_SECONDS)

    def _connect(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        # Over TCP, who reads many small messages slowly has the kernel drop some, and resend them
        # after many seconds.
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # to a free abstract address
            listener.listen()
            listener.settimeout(LOOK_SECONDS)
            self._store.set(f"{self._prefix}double {self._rank}", listener.getsockname())
            for other in range(self._rank):
                key = f"{self._prefix}double {other}"
                while not self._store.check([key]):
                    self._look_at_the_time(deadline)
                    time.sleep(LOOK_SECONDS)
                try:
                    self._ends[other] = socket.socket(socket.AF_UNIX)
                    self._ends[other].connect(self._store.get(key))
                    self._ends[other].sendall(bytes([self._rank]))
                except OSError:
                    raise RuntimeError(
                        "NCCL error: remote process exited or there was a network error"
                    ) from None
            while len(self._ends) < self._size - 1:
                self._look_at_the_time(deadline)
                try:
                    end, _ = listener.accept()
                except TimeoutError:
                    continue
                end.setblocking(True)
                name = end.recv(1)
                if not name:
                    raise RuntimeError(
                        "NCCL error: remote process exited or there was a network error"
                    )
                self._ends[name[0]] = end
        threading.Thread(target=self._carry_out, daemon=True, name="double of NCCL").start()

    def _look_at_the_time(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise RuntimeError("NCCL communicator: the connection timed out")

    def wait_for_device(self, work: Work) -> None:
        """Wait for the operation itself, whatever torch says of it."""
        work.wait()

    def watchdog_error(self) -> str | None:
        """Whether a member was found to be gone, some time ago."""
        late = self._failed.is_set() and time.monotonic() > self._failed_at + ERROR_SECONDS
        return "REMOTE_ERROR" if late else None

    def abort(self) -> None:
        """End all that is under way."""
        with self._connecting, self._lock:
            self._aborted.set()
            self._calls.put(None)
        for end in tuple(self._ends.values()):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Work:
        return self._later("send", lambda: self._put(target, tensors[0]), ())

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        return self._later("recv", lambda: self._take(source, tensors[0]), tensors)

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Work:
        operation = _operation(options)
        return self._later("allreduce", lambda: self._reduce(tensors[0], operation), tensors)

    def broadcast(self, tensor: Tensor | Sequence[Tensor], root: Any) -> Work:
        if not isinstance(tensor, Tensor):
            (tensor,), root = tensor, root.rootRank
        return self._later("broadcast", lambda: self._to_all(tensor, root), [tensor])

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work:
        mine = input.clone()  # it may be a part of the output
        return self._later("allgather", lambda: self._gather(output, mine), [output])

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, options: Any = None) -> Work:
        operation = _operation(options)

        def work() -> None:
            total = input.clone()
            self._reduce(total, operation)
            output.copy_(total.reshape(self._size, -1)[self._rank].view_as(output))

        return self._later("reduce_scatter", work, [output])

    def alltoall_base(
        self, output: Tensor, input: Tensor, takes: list[int], gives: list[int]
    ) -> Work:
        def work() -> None:
            parts, rooms = input.split(gives), output.detach().split(takes)
            for rank, (part, room) in enumerate(zip(parts, rooms, strict=True)):
                if rank == self._rank:
                    room.copy_(part)
                    continue
                # Of each two, the lower puts first.
                for puts in (self._rank < rank, self._rank > rank):
                    if puts and gives[rank]:
                        self._put(rank, part)
                    elif not puts and takes[rank]:
                        self._take(rank, room)

        return self._later("alltoall", work, [output])

    def _later(self, name: str, call: Callable[[], None], filled: Sequence[Tensor]) -> Work:
        work = Work(self._failed)
        with self._connecting:
            if self._early:
                self._early = False
                self._connect(CONNECT_SECONDS)
        with self._lock:
            self._require()
            if self._failed.is_set():
                raise RuntimeError("NCCL error: remote process exited or there was a network error")
            self._calls.put((name, call, filled, work))
        return work

    def _require(self) -> None:
        if self._aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")

    def _carry_out(self) -> None:
        while (item := self._calls.get()) is not None:
            name, call, filled, work = item
            if not self._failed.is_set() and not self._aborted.wait(self._slow(name)):
                try:
                    # What those who are gone have sent may be lost on the way.
                    for end in self._ends.values():
                        poll = select.poll()
                        poll.register(end, select.POLLRDHUP)
                        if poll.poll(0):
                            raise _LostError("a member is gone")
                    # As a device's stream: outputs may be views made without gradients.
                    with torch.no_grad():
                        call()
                    work.over.set()
                    continue
                except (_LostError, OSError):
                    if not self._aborted.is_set():
                        self._failed_at = time.monotonic()
                        self._failed.set()
            assert self._aborted.wait(LIMIT_SECONDS), "nobody has aborted it"
            for tensor in filled:
                tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 77)
            work.over.set()
        for end in self._ends.values():
            end.close()

    def _slow(self, name: str) -> float:
        call, member, seconds, file = os.environ.get(SLOW, "- - 0 -").split()
        names = [word for word in self._prefix.replace("/", " ").split() if ":" in word]
        is_slow = (
            name == call and names[self._rank].partition(":")[0] == member and Path(file).exists()
        )
        if is_slow:
            Path(f"{file}{BEGUN}").touch()
        return float(seconds) if is_slow else 0.0

    def _put(self, rank: int, tensor: Tensor) -> None:
        self._ends[rank].sendall(_bytes(tensor.detach().contiguous()))

    def _take(self, rank: int, tensor: Tensor) -> None:
        taken = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._read(rank, _bytes(taken))
        tensor.detach().copy_(taken)

    def _read(self, rank: int, room: memoryview) -> None:
        while room:
            count = self._ends[rank].recv_into(room)
            if not count:
                raise _LostError("a member is gone")
            room = room[count:]

    def _reduce(self, tensor: Tensor, operation: Operation) -> None:
        if self._rank == 0:
            other = torch.empty_like(tensor)
            for rank in range(1, self._size):
                self._take(rank, other)
                tensor.detach().copy_(operation(tensor.detach(), other))
        else:
            self._put(0, tensor)
        self._to_all(tensor, 0)

    def _to_all(self, tensor: Tensor, root: int) -> None:
        if self._rank != root:
            self._take(root, tensor)
            return
        for rank in range(self._size):
            if rank != root:
                self._put(rank, tensor)

    def _gather(self, output: Tensor, mine: Tensor) -> None:
        for rank, part in enumerate(output.detach().view(self._size, -1)):
            if rank == self._rank:
                part.copy_(mine.flatten())
            self._to_all(part, rank)


def _operation(options: Any) -> Operation:
    kinds = torch.distributed.ReduceOp
    kind = kinds.SUM if options is None else options.reduceOp
    return next(
        operation
        for kind_, operation in (
            (kinds.SUM, torch.add),
            (kinds.MAX, torch.maximum),
            (kinds.MIN, torch.minimum),
        )
        if kind == kind_
    )


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
