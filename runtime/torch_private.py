"""Use torch where its public documentation does not reach.

The docstring or comment of each use states its purpose, and which public call would replace it. A
version of torch that breaks a use fails the tests of its callers. The stores and process groups by
which workers communicate are in `runtime.replay.torch_groups`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.autograd import forward_ad
from torch.autograd.graph import _engine_run_backward
from torch.distributed import distributed_c10d
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils.flop_counter import FlopCounterMode

# FakeTensor, FakeTensorMode, unset_fake_temporarily: shapes and dtypes of a model's activations
#   without computing or memory.
#   Replaced by: the documented part of torch.compiler's fake tensors, or by running layers on the
#   meta device once all models under test allow that.
# DATA_DEPENDENT: errors of fake tensors if shapes or control flow depend on data.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
# TorchDispatchMode, tree_leaves: see every tensor of a stage, to measure memory
#   (`runtime.tools.stage_bench`).
#   Replaced by: torch.cuda.memory_stats on a GPU; nothing public on a CPU.


def compile_with_inductor(
    graph: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a graph with torch.compile's own backend and options; return a function.

    For: graphs that `runtime.models.compiling` has changed before they reach the backend.

    Replaced by: torch.compile(options=...), once it takes functions that change the graph.
    """
    from torch._inductor.compile_fx import compile_fx  # takes seconds

    return cast(
        Callable[..., Any], compile_fx(cast(Any, graph), inputs, config_patches=dict(options))
    )


all_gather_single = (
    getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
)
reduce_scatter_single = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)
# all_gather_single, reduce_scatter_single: public since torch 2.12, which deprecates the older
#   names.
#   Replaced by: `from torch.distributed import ...`, once torch 2.11 is not supported any more.


@contextmanager
def without_gpu_context() -> Iterator[None]:
    """Let fake tensors of a GPU be used within the context without initializing CUDA.

    For: the launcher, which computes the shapes and dtypes of a model's activations but must not
    take memory of a GPU, nor make CUDA unusable for processes that are forked. The context is
    needed only for backwards on fake tensors. In it, `torch.cuda.is_bf16_supported` is always true.

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
    """Return the active TorchFunctionMode, None without one. Replaced by: no public call."""
    mode: object = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return mode


@contextmanager
def without_function_mode() -> Iterator[None]:
    """Leave the active TorchFunctionMode within the context.

    For: compiled code, which splits its backward by itself, when it is called under the mode that
    splits backwards.

    Replaced by: leaving the mode, once torch has a public call for that.
    """
    if current_function_mode() is None:
        yield
    else:
        with _pop_mode_temporarily():
            yield


@contextmanager
def without_process_groups() -> Iterator[None]:
    """Hide all process groups of torch.distributed within the context.

    For: a default group of our own, from which device meshes are built, in a program that has
    another default group.

    Replaced by: `init_device_mesh` with an argument for the group.
    """
    # Torch keeps its groups in these tables of a module, by group and by name.
    world = distributed_c10d._world
    tables = (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.tags_to_pg,
        world.pg_to_tag,
    )
    copies = [dict[Any, Any](table) for table in tables]
    default, count = world.default_pg, world.group_count

    def put(default: Any, count: int, contents: Sequence[Mapping[Any, Any]]) -> None:
        # Torch's C++ half has a register of its own, by name.
        _unregister_all_process_groups()
        for table, entries in zip(tables, contents, strict=True):
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
        put(default, count, copies)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run a backward that accumulates into `.grad`, under the modes that are active.

    For: activation checkpointing, whose recomputation must see the modes that the forward saw.

    Replaced by: torch.autograd.backward, once it no longer suspends TorchFunctionModes.
    """
    # The first False keeps no graph, the second builds none of the backward itself.
    _engine_run_backward(
        tuple(outputs),
        tuple(gradients),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class GradientUse(Enum):
    """Use that the running backward makes of the gradient of a function's input."""

    NONE = "nothing; it need not be computed"
    ADDED = "adds it to `.grad` of a parameter, or passes it on"
    RETURNED = "returns it, as torch.autograd.grad"


def find_gradient_use(node: Any) -> GradientUse:
    """Return what the running backward does with the gradient that is passed to `node`.

    `node` is the first half of an entry of `next_functions`; None: no gradient is passed. Call this
    within the backward of a torch.autograd.Function, whose own `needs_input_grad` does not say for
    which inputs torch.autograd.grad was called.

    Replaced by: `needs_input_grad`, once it depends on the backward that is running.
    """
    if node is None:
        return GradientUse.NONE
    try:
        return GradientUse.ADDED if torch._C._will_engine_execute_node(node) else GradientUse.NONE
    # Torch refuses to answer for leaves of which torch.autograd.grad returns the gradients.
    except RuntimeError:
        return GradientUse.RETURNED


def is_transforming() -> bool:
    """Return whether torch.func or forward-mode differentiation is active.

    Under these, only some torch.autograd.Functions work. Replaced by: no public call exists.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return whether a tensor has hooks for its gradient. Replaced by: no public call exists."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def count_changes(tensor: Tensor) -> int:
    """Return a number that grows with each change of a tensor in place.

    Views of one tensor share the number; `.data` has another. Replaced by: no public call exists;
    torch's notes on autograd name the attribute.
    """
    return tensor._version


def copy_tensors(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each of `sources` into its target, in few kernels on a GPU.

    Replaced by: `copy_` for each, which takes a kernel each.
    """
    if sources:
        torch._foreach_copy_(list(targets), list(sources))


class _NoModules:
    """Stand-in for a FlopCounterMode's module tracker that counts all operations as one module."""

    parents = frozenset(("Global",))

    def __enter__(self) -> None:
        """Track nothing."""

    def __exit__(self, *_: object) -> None:
        """Track nothing."""


def without_module_tracking(counter: FlopCounterMode) -> FlopCounterMode:
    """Change a counter of floating-point operations not to tell modules apart; return it.

    For: layers that call torch.autograd.grad in their forward, which fails where hooks track
    modules.

    Replaced by: an argument of FlopCounterMode.
    """
    counter.mod_tracker = cast(Any, _NoModules())
    return counter


class LiveStorages:
    """Counter of the bytes of watched storages that are still alive.

    For: the memory that a micro-batch holds between its ops, without that of the `ignored` tensors.

    Replaced by: weak references to storages, once they are public.
    """

    def __init__(self, ignored: Sequence[Tensor]) -> None:
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def watch_tensor(self, tensor: Tensor) -> None:
        """Watch a tensor's storage, unless it belongs to an ignored tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ignored:
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._seen[storage._cdata] = (reference, storage.nbytes())

    def live_bytes(self) -> int:
        """Return the bytes of the watched storages that are still alive."""
        # Storages, not tensors: views share memory.
        alive = 0
        for reference, size in self._seen.values():
            alive += 0 if reference.expired() else size  # type: ignore[no-untyped-call]
        return alive


class TensorWatchMode(TorchDispatchMode):
    """Dispatch mode that lets `storages` watch every tensor that an operation returns."""

    def __init__(self, storages: LiveStorages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.storages.watch_tensor(tensor)
        return result


def remove_state_hooks(module: torch.nn.Module) -> None:
    """Remove the state_dict hooks of a module and its submodules, and those before loading.

    For: parameters whose names no hook changes. Replaced by: no public call exists.
    """
    # Torch can remove a hook only by the handle that its registration returned.
    for submodule in module.modules():
        submodule._state_dict_hooks.clear()
        submodule._load_state_dict_pre_hooks.clear()
