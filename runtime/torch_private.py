"""All uses of torch that its public documentation does not cover.

The docstring or comment of each use states its purpose, and which public call would replace it. The tests of the
callers cover these uses, so they notice a new torch version that breaks one.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
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
from torch.autograd import forward_ad
from torch.autograd.graph import _engine_run_backward
from torch.distributed import ProcessGroupGloo, Work, distributed_c10d
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils.flop_counter import FlopCounterMode

# Store, TCPStore, HashStore, PrefixStore, DebugLevel, get_debug_level, set_debug_level: documented as
#   torch.distributed.Store, ..., where type checkers do not find them.
#   Replaced by: `from torch.distributed import TCPStore`, once torch exports it in words that mypy reads.
# FakeTensor, FakeTensorMode, unset_fake_temporarily: shapes and dtypes of a model's activations without computing or
#   memory.
#   Replaced by: the documented part of torch.compiler's fake tensors, or by running layers on the meta device once all
#   models under test allow that.
# DATA_DEPENDENT: errors of fake tensors if shapes or control flow depend on data.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
# TorchDispatchMode, tree_leaves: see every tensor of a stage, to measure memory (`runtime.tools.stage_bench`).
#   Replaced by: torch.cuda.memory_stats on a GPU; nothing public on a CPU.


class Group(Protocol):
    """Type, for type checkers, of torch's gloo and NCCL process groups: the methods of their Backend class that torch's
    stubs leave out. Each returns torch's `Work`, except `abort`."""

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Work:
        """Start to send tensors to a rank."""

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Start to receive tensors, into the given ones, from a rank."""

    def allreduce(self, tensors: Sequence[Tensor]) -> Work:
        """Start to sum tensors over all ranks, in place."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Start to copy the tensor of rank `root` to all ranks."""

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work:
        """Start to gather equally long tensors, `input` of each rank, into the tensor `output`, in the order of the
        ranks."""

    def abort(self) -> None:
        """End all transfers of the group with an error. A gloo group does so only when the last reference to it is
        gone."""


GlooDevice = ProcessGroupGloo.Device


def open_gloo_devices() -> list[GlooDevice]:
    """Return a new gloo device for each network interface: a listening socket, and a thread for all of its connections.

    They listen where torch's process groups listen by default: on the interfaces of GLOO_SOCKET_IFNAME, or at the
    machine's name. Raises RuntimeError if there is no such interface.
    """
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in named] or [
        ProcessGroupGloo.create_default_device(lazy_init=False)]


def compile_with_inductor(graph: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile a graph with torch.compile's own backend and the given options.

    For: graphs that have been changed on their way to it (`runtime.models.compiling`).

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
    """Let fake tensors of a GPU be used within the context without initializing CUDA in this process.

    For: the launcher, which computes the shapes and dtypes of a model's activations but must not take memory of a GPU,
    nor make CUDA unusable for processes that are forked. The context is needed only for backwards on fake tensors.

    Replaced by: the meta device instead of fake tensors, once autocast works there as on a GPU.
    """
    saved = fake_tensor.init_gpu_context, torch.cuda.is_bf16_supported
    fake_tensor.init_gpu_context = lambda _: None  # type: ignore[assignment]
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    try:
        yield
    finally:
        fake_tensor.init_gpu_context, torch.cuda.is_bf16_supported = saved


def current_function_mode() -> object:
    """Return the active TorchFunctionMode; None if there is none.

    Replaced by: no public call exists.
    """
    mode: object = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return mode


@contextmanager
def without_function_mode() -> Iterator[None]:
    """Leave the active TorchFunctionMode within the context.

    For: compiled code, which splits its backward by itself, when it is called under the mode that splits backwards.

    Replaced by: leaving the mode, once torch has a public call for that.
    """
    if current_function_mode() is None:
        yield
    else:
        with _pop_mode_temporarily():
            yield


@contextmanager
def without_process_groups() -> Iterator[None]:
    """Hide all process groups of torch.distributed within the context, and restore them afterwards.

    For: a default group of our own, from which device meshes are built, in a program that has another default group.

    Replaced by: `init_device_mesh` with an argument for the group.
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


def create_gloo_group(store: Store, rank: int, size: int, timeout: timedelta, devices: Sequence[GlooDevice]) -> Group:
    """Create a gloo process group that connects over `devices`, without torch.distributed's global state.

    For: groups that come and go with generations, several of them in a process, in any thread.

    Replaced by: torch.distributed.init_process_group and new_group, once groups need not be registered globally.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = list(devices), 2, timeout
    return cast(Group, ProcessGroupGloo(store, rank, size, options))


CONNECT_TIMEOUT_SECONDS = 30.0
"""Seconds after which the connection of an NCCL communicator that does not block the host has failed."""
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
"""Environment variables that keep torch's NCCL threads from ending the process, and from aborting or blocking what
others use.

They are read when a process group is created; their effects are taken from ProcessGroupNCCL.cpp. They replace the
user's values, because the runtime relies on them.
"""


BLOCKING_VARIABLE = "SLIPSTREAM_NCCL_BLOCKING"
"""Name of an environment variable; if it is 0, communicators are created that do not block the host while they
connect."""
PAIR_CHANNELS = 4
"""Number of channels of a communicator of two ranks. Each takes device memory, and a transfer in one direction fills
few."""


def create_nccl_group(store: TCPStore, prefix: str, rank: int, size: int, timeout: timedelta,
                      directed: bool) -> "NcclGroup":
    """Return an NCCL process group on this thread's device that is not connected yet, the counterpart of
    `create_gloo_group`.

    The keys of the group in the store begin with `prefix`. Set `directed` to True if two ranks use it for transfers in
    one direction: then it takes less device memory. NCCL's threads use the store for as long as they live, so they get
    a connection of their own.
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
"""Streams of each device in which nothing waits. They are reused, because torch has only 32 of them
(`device.get_stream_for`)."""


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
    """NCCL process group on one device. Transfers and sums are started on its attribute `group`.

    Its own methods connect the members, wait until the device has ended an operation, and read torch's errors.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self.group = cast(Group, group)
        self.rank = rank
        self.device = torch.device("cuda", torch.cuda.current_device())

    def connect(self) -> None:
        """Connect the communicator. In NCCL's blocking mode, the default here, return when all members have connected,
        or one has died."""
        torch.cuda.set_device(self.device)  # the current device belongs to a thread
        cast(Any, self.group).eager_connect_single_device(self.device)

    def wait_for_device(self, work: Work) -> None:
        """Block the host until the device has ended the operation `work`, successfully or not.

        Raises RuntimeError if the device has failed.
        """
        torch.cuda.set_device(self.device)
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with _borrow_stream(self.device) as stream, torch.cuda.stream(stream):
            work.wait()  # this stream waits, the host does not
            ended.record()
            ended.synchronize()

    def watchdog_error(self) -> str | None:
        """Return the error that torch's watchdog has found, or None. The watchdog checks ten times a second.

        Returns None, too, in torch versions that do not report errors. The delay is harmless: NCCL does not end a
        failed operation before it is aborted, and only this process aborts it.
        """
        get_error = getattr(self.group, "get_error", None)
        result = None if get_error is None else get_error()
        return None if result is None or result.name == "SUCCESS" else str(result.name)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run a backward that accumulates into `.grad`, under the modes that are active.

    For: activation checkpointing, whose recomputation must see the modes that the forward saw.

    Replaced by: torch.autograd.backward, once it no longer suspends TorchFunctionModes.
    """
    _engine_run_backward(tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True,
                         accumulate_grad=True)


class GradientUse(Enum):
    """What the backward that is running does with the gradient of one input of a function."""

    NONE = "nothing; it need not be computed"
    ADDED = "adds it to `.grad` of a parameter, or passes it on"
    RETURNED = "returns it, as torch.autograd.grad"


def find_gradient_use(node: Any) -> GradientUse:
    """Return what the running backward does with the gradient that is passed to `node`, an entry of `next_functions`;
    None is passed nothing.

    To be called within the backward of a torch.autograd.Function, whose own `needs_input_grad` does not say for which
    inputs torch.autograd.grad was called.

    Replaced by: `needs_input_grad`, once it depends on the backward that is running.
    """
    if node is None:
        return GradientUse.NONE
    try:
        return GradientUse.ADDED if torch._C._will_engine_execute_node(node) else GradientUse.NONE
    except RuntimeError:  # it refuses to answer for leaves of which torch.autograd.grad returns the gradients
        return GradientUse.RETURNED


def is_transforming() -> bool:
    """Return whether a transform of torch.func (grad, vmap, ...) or forward-mode differentiation is active, under which
    only some functions of one's own work.

    Replaced by: no public call exists.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return whether a tensor has hooks that must see the gradient from autograd.

    Replaced by: no public call exists.
    """
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def count_changes(tensor: Tensor) -> int:
    """Return a number that is higher after each change of a tensor in place, such as a gradient that is added to it.

    Views of one tensor share it; `.data` has a count of its own.

    Replaced by: no public call exists; torch's notes on autograd name the attribute.
    """
    return tensor._version


def copy_tensors(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors in one call, which on a GPU is one kernel.

    Replaced by: `copy_` for each tensor.
    """
    if sources:
        torch._foreach_copy_(list(targets), list(sources))


class _NoModules:
    """Stand-in for the tracker of modules of a FlopCounterMode: everything counts for the whole."""

    parents = frozenset(("Global",))

    def __enter__(self) -> None:
        """Track nothing."""

    def __exit__(self, *_: object) -> None:
        """Track nothing."""


def without_module_tracking(counter: FlopCounterMode) -> FlopCounterMode:
    """Return a counter of floating-point operations that does not tell modules apart.

    For: layers that call torch.autograd.grad in their forward, which fails where hooks track modules.

    Replaced by: an argument of FlopCounterMode.
    """
    counter.mod_tracker = cast(Any, _NoModules())
    return counter


class LiveStorages:
    """Count of the bytes of watched storages that are still alive.

    For: the memory that a micro-batch holds between its ops.

    Replaced by: weak references to storages, once they are public.
    """

    def __init__(self, ignored: Sequence[Tensor]) -> None:
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def watch_tensor(self, tensor: Tensor) -> None:
        """Watch a tensor's storage, unless it is already watched or belongs to one of the tensors to ignore, given to
        the constructor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ignored:
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._seen[storage._cdata] = (reference, storage.nbytes())

    def live_bytes(self) -> int:
        """Return the total size in bytes of the watched storages that are still alive."""
        alive = 0
        for reference, size in self._seen.values():
            alive += 0 if reference.expired() else size  # type: ignore[no-untyped-call]
        return alive


class TensorWatchMode(TorchDispatchMode):
    """Dispatch mode that passes every tensor created under it to `storages.watch_tensor`."""

    def __init__(self, storages: LiveStorages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.storages.watch_tensor(tensor)
        return result


def remove_state_hooks(module: torch.nn.Module) -> None:
    """Remove the state_dict hooks of a module, so that its state_dict uses the modules' own parameter and buffer names.

    Torch can remove a hook only by the handle that its registration returned.
    """
    for submodule in module.modules():
        submodule._state_dict_hooks.clear()
        submodule._load_state_dict_pre_hooks.clear()
