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

# Store, TCPStore, HashStore, PrefixStore, DebugLevel, get_debug_level, set_debug_level: documented as
#   torch.distributed.Store, ..., where type checkers do not find them.
#   Replaced by: `from torch.distributed import TCPStore`, once torch exports it in words that mypy reads.


class Group(Protocol):
    """Type of torch's gloo and NCCL process groups: methods that its stubs leave out. Each returns
    torch's `Work`, except `abort`."""

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Work:
        """Start to send tensors to a rank."""

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Start to receive tensors, into the given ones, from a rank."""

    def allreduce(self, tensors: Sequence[Tensor]) -> Work:
        """Start to sum tensors over all ranks, in place."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Start to copy the tensor of rank `root` to all ranks."""

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work:
        """Start to gather equally long tensors of all ranks, in order, into `output`."""

    def abort(self) -> None:
        """End all transfers with an error; gloo does so only at the last reference's end."""


GlooDevice = ProcessGroupGloo.Device


def open_gloo_devices() -> list[GlooDevice]:
    """Return a gloo device for each network interface: a listening socket and a thread.

    They listen where torch's process groups listen by default: on the interfaces of
    GLOO_SOCKET_IFNAME, or at the machine's name. Raises RuntimeError if there is no such interface.
    """
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in named] or [
        ProcessGroupGloo.create_default_device(lazy_init=False)]


def create_gloo_group(store: Store, rank: int, size: int, timeout: timedelta, devices: Sequence[GlooDevice]) -> Group:
    """Create a gloo process group that connects over `devices`, without torch.distributed's global
    state.

    For: groups that come and go with generations, several of them in a process, in any thread.

    Replaced by: torch.distributed.init_process_group and new_group, once groups need not be
    registered globally.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = list(devices), 2, timeout
    return cast(Group, ProcessGroupGloo(store, rank, size, options))


CONNECT_TIMEOUT_SECONDS = 30.0
"""Seconds after which the connection of a non-blocking communicator has failed."""
NCCL_ENVIRONMENT = {
    # What the watchdog does about an error or a timeout of an operation. 0: nothing. Otherwise it aborts communicators
    # that are still in use, or ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # `Work.wait` lets the stream wait, not the host
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # otherwise a monitor ends the process when the watchdog hangs in CUDA
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # otherwise the watchdog ends the process at a CUDA error
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # otherwise a timeout writes traces, and signals in the store
    # After an error the watchdog sleeps for four times this (default: 15 s) and holds a lock. Starting an operation
    # takes the same lock, and closing the group waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # otherwise each watchdog polls node 0's store ten times a second
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # otherwise traces are written to that store
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",  # otherwise each operation is recorded with its Python stack
}
"""Environment variables that keep torch's NCCL threads from ending or blocking what is used.

They are read when a process group is created; their effects are taken from ProcessGroupNCCL.cpp.
They replace the user's values, because the runtime relies on them.
"""


BLOCKING_VARIABLE = "SLIPSTREAM_NCCL_BLOCKING"
"""Name of an environment variable; 0 for communicators that connect without blocking the host."""
PAIR_CHANNELS = 4
"""Channels of a communicator of two ranks, few of which one direction fills."""


def create_nccl_group(store: TCPStore, prefix: str, rank: int, size: int, timeout: timedelta,
                      directed: bool) -> "NcclGroup":
    """Return an NCCL process group on this thread's device, not connected yet.

    It is the counterpart of `create_gloo_group`. The keys of the group in the store begin with
    `prefix`. Set `directed` to True if two ranks use it for transfers in one direction: then it
    takes less device memory. NCCL's threads use the store for as long as they live, so they get a
    connection of their own.
    """
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # missing where torch has no CUDA

    os.environ.update(NCCL_ENVIRONMENT)
    if get_debug_level() == DebugLevel.DETAIL:  # this level turns on desync debugging, and with it error handling
        set_debug_level(DebugLevel.INFO)
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(CONNECT_TIMEOUT_SECONDS))
    options = ProcessGroupNCCL.Options()
    # Non-blocking calls wait for their connection within torch, and hold a lock that an abort needs.
    options.config.blocking = os.environ.get(BLOCKING_VARIABLE, "1") != "0"
    if directed:
        options.config.max_ctas = PAIR_CHANNELS
    # Torch hands out streams in turn, from a pool of 32 for each priority. A stream that waits for a peer must not be
    # one that computes, copies, or waits for the device to finish.
    options.is_high_priority_stream = True
    options._timeout = timeout
    own_store = PrefixStore(prefix, TCPStore(store.host, store.port, is_master=False, wait_for_workers=False,
                                             timeout=timeout))
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
    idle.append(stream)  # not after an error of the device


class NcclGroup:
    """NCCL process group on one device; its attribute `group` starts transfers and sums.

    Its own methods connect the members, wait until the device has ended an operation, and read
    torch's errors.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self.group = cast(Group, group)
        self.rank = rank
        self.device = torch.device("cuda", torch.cuda.current_device())

    def connect(self) -> None:
        """Connect the communicator; in blocking mode, until all have connected or one has died."""
        torch.cuda.set_device(self.device)  # the current device belongs to a thread
        cast(Any, self.group).eager_connect_single_device(self.device)

    def wait_for_device(self, work: Work) -> None:
        """Block the host until the device has ended `work`, successfully or not. Raises
        RuntimeError if the device has failed."""
        torch.cuda.set_device(self.device)
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with _borrow_stream(self.device) as stream, torch.cuda.stream(stream):
            work.wait()  # this stream waits, the host does not
            ended.record()
            ended.synchronize()

    def watchdog_error(self) -> str | None:
        """Return the error that torch's watchdog has found, or None.

        It checks ten times a second. Returns None, too, in torch versions that do not report
        errors. The delay is harmless: NCCL does not end a failed operation before it is aborted,
        and only this process aborts it.
        """
        get_error = getattr(self.group, "get_error", None)
        result = None if get_error is None else get_error()
        return None if result is None or result.name == "SUCCESS" else str(result.name)
