"""Use stores and process groups of torch that its public documentation does not cover.

The docstring or comment of each use states its purpose, and which public call would replace it, as
in `runtime.torch_private`.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed import ProcessGroupGloo, Work

# Store, TCPStore, HashStore, PrefixStore, DebugLevel, get_debug_level, set_debug_level: documented
#   as torch.distributed.Store, ..., where type checkers do not find them.
#   Replaced by: `from torch.distributed import TCPStore`, once torch exports it in words that mypy
#   reads.


class Group(Protocol):
    """Torch's process groups of gloo or NCCL, with the methods that its stubs leave out."""

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Work:
        """Start to send tensors to a rank."""

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Start to receive from a rank into `tensors`."""

    def allreduce(self, tensors: Sequence[Tensor]) -> Work:
        """Start to sum tensors over all ranks, in place."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Start to copy the tensor of rank `root` to all ranks."""

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work:
        """Start to gather equally long tensors of all ranks, in order, into `output`."""

    def abort(self) -> None:
        """Abort all operations; over NCCL, they then end as if they had succeeded."""


GlooDevice = ProcessGroupGloo.Device


def open_gloo_devices() -> list[GlooDevice]:
    """Return a listening gloo device for each interface of GLOO_SOCKET_IFNAME.

    Without this variable, returns one device at the machine's name, as torch does. Raises
    RuntimeError for an interface that does not exist.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return [ProcessGroupGloo.create_default_device(lazy_init=False)]
    return [ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in names]


def create_gloo_group(
    store: Store, rank: int, size: int, timeout: timedelta, devices: Sequence[GlooDevice]
) -> Group:
    """Create a gloo process group over `devices`, without torch.distributed's global state.

    Raises RuntimeError if a member does not join within `timeout`.

    For: groups that come and go with generations, several of them in a process, in any thread.

    Replaced by: torch.distributed.init_process_group and new_group, once groups need not be
    registered globally.
    """
    # Two threads, as is torch's default.
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = list(devices), 2, timeout
    return cast(Group, ProcessGroupGloo(store, rank, size, options))


CONNECT_TIMEOUT_SECONDS = 30.0
"""Seconds after which connecting a non-blocking communicator counts as failed."""
NCCL_ENVIRONMENT = {
    # What the watchdog does about an error or a timeout of an operation. 0: nothing. Otherwise it
    # aborts communicators that are still in use, or ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # `Work.wait` lets the stream wait, not the host
    # Otherwise a monitor ends the process when the watchdog hangs in CUDA.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Otherwise the watchdog ends the process at a CUDA error.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Otherwise a timeout writes traces, and signals in the store.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # After an error the watchdog sleeps for four times this (default: 15 s) and holds a lock.
    # Starting an operation takes the same lock, and closing the group waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # Otherwise each watchdog polls node 0's store ten times a second.
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # otherwise traces are written to that store
    # Otherwise each operation is recorded with its Python stack.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
}
"""Environment variables that keep torch's NCCL threads from ending or blocking this process.

Torch reads the variables when a process group is created; ProcessGroupNCCL.cpp has their effects.
These values replace the user's, because the runtime relies on them.
"""


BLOCKING_VARIABLE = "SLIPSTREAM_NCCL_BLOCKING"
"""Environment variable; if it is 0, communicators connect without blocking the host."""
PAIR_CHANNELS = 4
"""Largest number of NCCL channels of a group for one direction, which needs only few."""


def create_nccl_group(
    store: TCPStore, prefix: str, rank: int, size: int, timeout: timedelta, directed: bool
) -> "NcclGroup":
    """Return an NCCL process group on this thread's device, not connected yet.

    Sets `NCCL_ENVIRONMENT` and the time limit of connecting in this process's environment, and
    lowers torch's debug level from DETAIL to INFO. Raises torch's DistError if the store cannot be
    reached.

    Parameters
    ----------
    prefix
        First part of the group's keys in the store.
    timeout
        Torch's timeout of an operation, and limit of a wait for the store.
    directed
        True if the group has two ranks, of which only the first sends; it takes less memory then.
    """
    # Missing where torch has no CUDA.
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    os.environ.update(NCCL_ENVIRONMENT)
    # This level turns on desync debugging, and with it error handling.
    if get_debug_level() == DebugLevel.DETAIL:
        set_debug_level(DebugLevel.INFO)
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(CONNECT_TIMEOUT_SECONDS))
    options = ProcessGroupNCCL.Options()
    # Non-blocking calls wait for their connection within torch, and hold a lock that an abort
    # needs.
    options.config.blocking = os.environ.get(BLOCKING_VARIABLE, "1") != "0"
    if directed:
        options.config.max_ctas = PAIR_CHANNELS
    # Torch hands out streams in turn, from a pool of 32 for each priority. A stream that waits for
    # a peer must not be one that computes, copies, or waits for the device to finish.
    options.is_high_priority_stream = True
    options._timeout = timeout
    # NCCL's threads use the store for as long as they live, so they get their own connection.
    own_store = PrefixStore(
        prefix,
        TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout),
    )
    return NcclGroup(ProcessGroupNCCL(own_store, rank, size, options), rank)


_IDLE_STREAMS: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""Streams of each device in which nothing waits, reused because torch has only 32."""


@contextmanager
def _borrow_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Yield a stream of a device that no other thread uses within the context."""
    idle = _IDLE_STREAMS[device]
    try:
        stream = idle.pop()
    except IndexError:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    yield stream
    # Not after an error of the device: something may still wait in the stream.
    idle.append(stream)


class NcclGroup:
    """NCCL process group on one device; its attribute `group` starts transfers and sums."""

    def __init__(self, group: Any, rank: int) -> None:
        self.group = cast(Group, group)
        self.rank = rank
        self.device = torch.device("cuda", torch.cuda.current_device())

    def connect(self) -> None:
        """Connect this rank; in blocking mode, wait until all ranks have, or one has died."""
        torch.cuda.set_device(self.device)  # the current device belongs to a thread
        cast(Any, self.group).eager_connect_single_device(self.device)

    def wait_for_device(self, work: Work) -> None:
        """Block the host until the device has ended `work`. Raises RuntimeError if that failed."""
        torch.cuda.set_device(self.device)
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with _borrow_stream(self.device) as stream, torch.cuda.stream(stream):
            work.wait()  # this stream waits, the host does not
            ended.record()
            ended.synchronize()

    def watchdog_error(self) -> str | None:
        """Return the error that torch's watchdog has found.

        None means that there is no error, or that this version of torch does not tell.
        """
        # The watchdog looks ten times a second. The delay is harmless: NCCL does not end a failed
        # operation before it is aborted, and only this process aborts it.
        get_error = getattr(self.group, "get_error", None)
        result = None if get_error is None else get_error()
        return None if result is None or result.name == "SUCCESS" else str(result.name)
