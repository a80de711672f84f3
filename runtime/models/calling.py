"""Call layers: pass the data that they take, and collect the losses that they add."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from slipstream.runtime.models.compiling import compile_layer
from slipstream.runtime.models.distributed_tensors import build_dtensors
from slipstream.runtime.models.documents import remember_lengths
from slipstream.runtime.replay.layer_values import Value, as_layer_input, map_tensors
from slipstream.runtime.torch_private import without_function_mode

Batch = tuple[Tensor, ...]
"""Data of a micro-batch (`runtime.data.data.Data`), on the device that computes."""


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Return a micro-batch moved to a device."""
    # The lengths of documents are computed on the CPU, so that nobody waits for the device for
    # them.
    moved = map_tensors(batch, lambda tensor: tensor.to(device))
    assert isinstance(moved, tuple)
    positions, moved_positions = positions_of(batch), positions_of(moved)
    if positions is not None and moved_positions is not None:
        remember_lengths(positions, moved_positions)
    return moved


def positions_of(batch: Batch | None) -> Tensor | None:
    """Return tokens' positions in their documents, [B or 1, T]; None if `batch` has none."""
    return getattr(batch, "position_ids", None)


_ADDED: ContextVar[list[Tensor] | None] = ContextVar("added losses", default=None)


def has_batch_parameter(function: Callable[..., Any]) -> bool:
    """Return whether a forward or loss has a parameter `batch` for the micro-batch's data."""
    return "batch" in inspect.signature(function).parameters


def needs_batch(function: Callable[..., Any]) -> bool:
    """Return whether a forward has a parameter `batch` without the default None.

    Such a forward always gets the micro-batch's data. With the default, it gets them only if they
    are more than tokens and targets.
    """
    parameters = inspect.signature(function).parameters
    return "batch" in parameters and parameters["batch"].default is not None


class LayerCall:
    """Callable that runs a layer, compiled if requested, with the batch if it takes one."""

    def __init__(self, module: nn.Module, *, compiled: bool = False) -> None:
        self._module, self._compiled = module, compiled
        if compiled:
            compile_layer(module)
        self.takes_batch = has_batch_parameter(module.forward)
        self.needs_batch = needs_batch(module.forward)
        self._copy = _copy_layer(module) if hasattr(module, "placed") else None
        """Copy of a layer that torch has cut, called with DTensors instead of its parameters."""
        # The layer itself is never changed, so a thread that is abandoned within a call does no
        # harm.

    def __call__(self, value: Value, batch: Batch | None) -> Value:
        """Return the layer's output for `value`, the previous layer's output or the tokens.

        `batch` may be None if the layer does not take it.
        """
        more = {"batch": batch} if self.takes_batch else {}
        if self._copy is not None:
            # `train` and `eval` are called on the layer itself.
            if self._copy.training != self._module.training:
                self._copy.train(self._module.training)
            output = functional_call(self._copy, build_dtensors(self._module), (value,), more)
            # An asynchronous collective may still be writing it.
            output = map_tensors(
                output, lambda tensor: tensor if type(tensor) is Tensor else tensor.clone()
            )
        else:
            # Compiled code splits its backward by itself.
            with without_function_mode() if self._compiled else nullcontext():
                output = self._module(value, **more)
        return output if isinstance(output, Tensor) else as_layer_input(output)


def _copy_layer(module: nn.Module) -> nn.Module:
    # What the copy has in common with the layer itself.
    shared = (
        *module.parameters(),
        *module.buffers(),
        *(getattr(module, name) for name in ("placed", "shards")),
    )
    return copy.deepcopy(module, {id(item): item for item in shared})


def adapt_loss(loss: Callable[..., Tensor]) -> Callable[[Value, Tensor, Batch | None], Tensor]:
    """Return a function of output, target and batch that calls `loss`, with or without batch."""
    if has_batch_parameter(loss):
        return lambda output, target, batch: loss(output, target, batch=batch)
    return lambda output, target, _: loss(output, target)


def add_to_loss(loss: Tensor) -> None:
    """Add a scalar to the loss of the micro-batch, as routers of experts do.

    To be called in a layer's forward. The scalar has the same weight as the last layer's loss, also
    in evaluations. Nothing is added in a forward that is run again, or outside of a run.
    """
    losses = _ADDED.get()
    if losses is not None:
        losses.append(loss)


@contextmanager
def collecting_losses() -> Iterator[list[Tensor]]:
    """Yield a list, to which layers that run within the context append losses."""
    losses: list[Tensor] = []
    before = _ADDED.set(losses)
    try:
        yield losses
    finally:
        _ADDED.reset(before)
