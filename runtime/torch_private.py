"""Every use of torch that its public documentation does not cover. Nothing else in the runtime has one.

Each says what it is for and what would replace it. They are checked by the tests of their callers, which is where a
new torch version would be noticed.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import (
    DebugLevel,
    PrefixStore,
    _register_process_group,
    _unregister_all_process_groups,
    get_debug_level,
    set_debug_level,
)
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.autograd.graph import _engine_run_backward
from torch.distributed import ProcessGroupGloo, Work, distributed_c10d
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

# Store, TCPStore, HashStore, PrefixStore, DebugLevel, get_debug_level, set_debug_level: documented as
#   torch.distributed.Store, ..., where type checkers do not find them.
#   Replaced by: `from torch.distributed import TCPStore`, once torch exports it in words that mypy reads.
# FakeTensor, FakeTensorMode, unset_fake_temporarily: shapes and dtypes of a model's activations without computing or
#   memory.
#   Replaced by: the documented part of torch.compiler's fake tensors, or by running layers on the meta device once all
#   models under test allow that.
# DATA_DEPENDENT: what it raises where shapes, or the way of the computation, depend on data.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
# TorchDispatchMode, tree_leaves: every tensor that a stage makes, to measure its memory (`runtime.tools.stage_bench`).
#   Replaced by: torch.cuda.memory_stats on a GPU; nothing public on a CPU.


class Group(Protocol):
    """A process group of torch.distributed: the methods of its Backend that its type stubs leave out."""

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Work:
        """Start to send to a rank."""

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Start to receive from a rank."""

    def allreduce(self, tensors: Sequence[Tensor]) -> Work:
        """Start to sum in place."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Start to bring a rank's tensor to all."""

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work:
        """Start to gather equal parts, one after the other."""

    def abort(self) -> None:
        """End all transfers with an error. Gloo's does so only when the last reference to the group is gone."""


GlooDevice = ProcessGroupGloo.Device


def gloo_devices() -> list[GlooDevice]:
    """Of each network interface, a listening socket, and the thread of all connections that are made by it.

    They listen where torch's process groups do by themselves: on the interfaces of GLOO_SOCKET_IFNAME, or at the
    machine's name. Raises RuntimeError where there is no such interface.
    """
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in named] or [
        ProcessGroupGloo.create_default_device(lazy_init=False)]


def inductor(graph: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """torch.compile's own backend, with options.

    For: graphs that have been changed on their way to it (`runtime.model.layers.compiling`).
    Replaced by: torch.compile(options=...), once it takes passes over the graph that it hands to its backend.
    """
    from torch._inductor.compile_fx import compile_fx  # takes seconds

    return cast(Callable[..., Any], compile_fx(cast(Any, graph), inputs, config_patches=dict(options)))


all_gather_single = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
reduce_scatter_single = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
# all_gather_single, reduce_scatter_single: public since torch 2.12, which deprecates the older names.
#   Replaced by: `from torch.distributed import ...`, once torch 2.11 is not supported any more.


@contextmanager
def without_gpu_context() -> Iterator[None]:
    """Use fake tensors of a GPU without initialising CUDA in this process.

    For: the launcher, which finds out a model's forms and must not take memory of a card, nor spoil CUDA for processes
    that are forked. Without backwards on fake tensors nothing needs the context.
    Replaced by: forms found on the meta device, once autocast works there as on a GPU.
    """
    kept = fake_tensor.init_gpu_context, torch.cuda.is_bf16_supported
    fake_tensor.init_gpu_context = lambda _: None  # type: ignore[assignment]
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    try:
        yield
    finally:
        fake_tensor.init_gpu_context, torch.cuda.is_bf16_supported = kept


@contextmanager
def without_function_mode() -> Iterator[None]:
    """Within a TorchFunctionMode: as outside of it.

    For: compiled code that is called while the mode is active by which a backward is split: it knows that by itself.
    Replaced by: leaving the mode, once torch has a public call for that.
    """
    if _get_current_function_mode() is None:  # type: ignore[no-untyped-call]
        yield
    else:
        with _pop_mode_temporarily():
            yield


@contextmanager
def without_process_groups() -> Iterator[None]:
    """torch.distributed as if it had no process group; afterwards it has those of before.

    For: a default group of our own, which meshes of devices are made of, in a program that has another.
    Replaced by: `init_device_mesh` with the group that it is to be of.
    """
    world = distributed_c10d._world
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.tags_to_pg,
              world.pg_to_tag)
    kept, default, count = [dict[Any, Any](table) for table in tables], world.default_pg, world.group_count

    def put(default: Any, count: int, kept: Sequence[Mapping[Any, Any]]) -> None:
        _unregister_all_process_groups()
        for table, entries in zip(tables, kept, strict=True):
            cast(dict[Any, Any], table).clear()
            cast(dict[Any, Any], table).update(entries)
        for group, name in world.pg_names.items():
            _register_process_group(name, group)
        distributed_c10d._update_default_pg(default)
        world.group_count = count

    put(None, 0, [{}] * len(tables))
    try:
        yield
    finally:
        put(default, count, kept)


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta, devices: Sequence[GlooDevice]) -> Group:
    """A gloo process group, without torch.distributed's global state.

    For: groups that come and go with orders, several of them in a process, in any thread.
    Replaced by: torch.distributed.init_process_group and new_group, once groups need not be registered globally.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = list(devices), 2, timeout
    return cast(Group, ProcessGroupGloo(store, rank, size, options))


CONNECT_SECONDS = 30.0
"""How long a call that does not block may wait for its connection."""
NCCL_ENVIRONMENT = {
    # What the watchdog does about an error or a timeout of an operation: 0, nothing. Else it aborts communicators that
    # others still use, or ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # `Work.wait` lets the stream wait, not the host
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a monitor ends the process when the watchdog is stuck in a call to CUDA
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # else the watchdog's thread ends the process when it meets a CUDA error
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # nor are traces written, or signals left in the store, where one times out
    # After an error the watchdog sleeps four times as long as this (15 s unless it is set), with a lock that whoever
    # begins an operation takes, and whoever closes the group waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # else each watchdog asks node 0's store ten times a second
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # else it leaves its traces in that store
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",  # else each operation is recorded, with a stack of Python's frames
}
"""How torch's threads beside NCCL never end a process of ours, nor abort or hold up what others use. They are read when
a process group is made: what each does is from ProcessGroupNCCL.cpp. Whatever the user has set, the runtime relies on
these."""


BLOCKING = "SLIPSTREAM_NCCL_BLOCKING"
"""In the environment: 0 makes communicators that do not block the host while they connect."""
PAIR_CHANNELS = 4
"""Of a communicator of two: each takes memory of the device, and a transfer in one direction fills few."""


def nccl_group(store: TCPStore, prefix: str, rank: int, size: int, timeout: timedelta, directed: bool) -> "NcclGroup":
    """Return an NCCL process group of this thread's device, as `gloo_group`, that is not connected yet.

    NCCL's own threads use the store for as long as they live: they get a connection of their own.
    """
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # missing where torch has no CUDA

    os.environ.update(NCCL_ENVIRONMENT)
    if get_debug_level() == DebugLevel.DETAIL:  # else desync debugging is on, and with it error handling
        set_debug_level(DebugLevel.INFO)
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(CONNECT_SECONDS))
    options = ProcessGroupNCCL.Options()
    # Calls that do not block wait for their connection within torch, with a lock that an abort needs.
    options.config.blocking = os.environ.get(BLOCKING, "1") != "0"
    if directed:
        options.config.max_ctas = PAIR_CHANNELS
    # Streams of torch's come from two pools of 32, by priority, and go round: one that waits for a peer must not be one
    # that computes, copies, or waits for the device to end.
    options.is_high_priority_stream = True
    options._timeout = timeout
    own = PrefixStore(prefix, TCPStore(store.host, store.port, is_master=False, wait_for_workers=False,
                                       timeout=timeout))
    return NcclGroup(ProcessGroupNCCL(own, rank, size, options), rank)


_IDLE_STREAMS: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""In which nothing waits. A process draws as few as it can: they come out of 32, in turn (`device.own_stream`)."""


@contextmanager
def _waiting_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A stream in which nothing else waits meanwhile, for any thread."""
    idle = _IDLE_STREAMS[device]
    try:
        stream = idle.pop()
    except IndexError:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    yield stream
    idle.append(stream)  # not after an error of the device


class NcclGroup:
    """What of a process group over NCCL the protocol `Group` leaves out."""

    def __init__(self, group: Any, rank: int) -> None:
        self.group = cast(Group, group)
        self.rank = rank
        self.device = torch.device("cuda", torch.cuda.current_device())

    def connect(self) -> None:
        """Make the communicator. A call that blocks returns when all members have, or one has died."""
        torch.cuda.set_device(self.device)  # of each thread its own
        cast(Any, self.group).eager_connect_single_device(self.device)

    def wait_for_device(self, work: Work) -> None:
        """Wait until the device has ended an operation, however that has ended. Raises RuntimeError where the device
        has failed."""
        torch.cuda.set_device(self.device)
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with _waiting_stream(self.device) as stream, torch.cuda.stream(stream):
            work.wait()  # lets this stream wait, and not the host
            ended.record()
            ended.synchronize()

    def error(self) -> str | None:
        """Return what torch's watchdog has found, which looks ten times a second; None where this torch does not say.

        It is no matter that it may be late: NCCL ends no operation that has failed before it is aborted, and only this
        process aborts it.
        """
        ask = getattr(self.group, "get_error", None)
        found = None if ask is None else ask()
        return None if found is None or found.name == "SUCCESS" else str(found.name)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """A backward that adds to `.grad`, under the modes that are active.

    For: activation checkpointing, whose recomputation must see the modes that the forward saw.
    Replaced by: torch.autograd.backward, once it no longer suspends TorchFunctionModes.
    """
    _engine_run_backward(tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True,
                         accumulate_grad=True)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether hooks want to see the tensor's gradient as autograd makes it. Replaced by: nothing public says."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors in one call, which on a GPU is one kernel. Replaced by: `copy_`, tensor by tensor."""
    if sources:
        torch._foreach_copy_(list(targets), list(sources))


class LivingStorages:
    """Bytes of the storages that are still alive, of all that were shown to it.

    For: what a micro-batch holds between its ops. Replaced by: weak references to storages, once they are public.
    """

    def __init__(self, ignored: Sequence[Tensor]) -> None:
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ignored:
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._seen[storage._cdata] = (reference, storage.nbytes())

    def bytes(self) -> int:
        """Of those that are alive."""
        alive = 0
        for reference, size in self._seen.values():
            alive += 0 if reference.expired() else size  # type: ignore[no-untyped-call]
        return alive


class TensorWatch(TorchDispatchMode):
    """Within it, `storages` is shown every tensor that is made."""

    def __init__(self, storages: LivingStorages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.storages.watch(tensor)
        return made


def without_state_hooks(module: torch.nn.Module) -> None:
    """From now on its state_dict has its parameters and buffers under their own names, whatever its classes make of it.

    torch can remove a hook only by the handle that its registration has returned.
    """
    for one in module.modules():
        one._state_dict_hooks.clear()
        one._load_state_dict_pre_hooks.clear()
