"""How a layer is called: what it is given besides what the layer before it gave, and what it may add to the loss."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from slipstream.runtime.model.layers.compiling import compile_layer
from slipstream.runtime.model.layers.distributed_tensors import as_called
from slipstream.runtime.model.layers.documents import remember_lengths
from slipstream.runtime.model.passed import Value, changed, handed_on
from slipstream.runtime.torch_private import without_function_mode

Batch = tuple[Tensor, ...]
"""What data give for a micro-batch (`runtime.model.data.data.Data`), on the device that computes."""

def on_device(batch: Batch, device: torch.device) -> Batch:
    """A micro-batch, there."""
    moved = changed(batch, lambda tensor: tensor.to(device))
    assert isinstance(moved, tuple)
    positions, there = positions_of(batch), positions_of(moved)
    if positions is not None and there is not None:
        remember_lengths(positions, there)
    return moved


def positions_of(batch: Batch | None) -> Tensor | None:
    """[B or 1, T]: where each token stands in its document, where data say so."""
    return getattr(batch, "position_ids", None)


_ADDED: ContextVar[list[Tensor] | None] = ContextVar("added losses", default=None)


def takes_batch(function: Callable[..., Any]) -> bool:
    """Whether a layer's forward, or a loss, has a parameter `batch`: it reads what belongs to the micro-batch."""
    return "batch" in inspect.signature(function).parameters


def needs_batch(function: Callable[..., Any]) -> bool:
    """Whether it reads that in any case. A `batch` that may be None is for what data give beyond tokens and targets."""
    parameters = inspect.signature(function).parameters
    return "batch" in parameters and parameters["batch"].default is not None


class LayerCall:
    """A layer that is called as it wants to be."""

    def __init__(self, module: nn.Module, *, compiled: bool = False) -> None:
        self._module, self._compiled = module, compiled
        if compiled:
            compile_layer(module)
        self.takes_batch, self.needs_batch = takes_batch(module.forward), needs_batch(module.forward)
        self._copy = _copy_of(module) if hasattr(module, "placed") else None
        """Where torch's own functions have cut it: what is called with other parameters in the place of its own. A
        thread that is left behind within a call leaves the layer itself as it is."""

    def __call__(self, value: Value, batch: Batch | None) -> Value:
        """What the layer gives. `batch` may be None where it takes none."""
        more = {"batch": batch} if self.takes_batch else {}
        if self._copy is not None:
            if self._copy.training != self._module.training:
                self._copy.train(self._module.training)
            given = functional_call(self._copy, as_called(self._module), (value,), more)
            # It may be on its way still.
            given = changed(given, lambda tensor: tensor if type(tensor) is Tensor else tensor.clone())
        else:
            with without_function_mode() if self._compiled else nullcontext():
                given = self._module(value, **more)
        return given if isinstance(given, Tensor) else handed_on(given)


def _copy_of(module: nn.Module) -> nn.Module:
    """The same layer in other objects, with the same parameters and buffers."""
    shared = (*module.parameters(), *module.buffers(), *(getattr(module, name) for name in ("placed", "shards")))
    return copy.deepcopy(module, {id(one): one for one in shared})


def loss_call(loss: Callable[..., Tensor]) -> Callable[[Value, Tensor, Batch | None], Tensor]:
    """A model's loss, called as it wants to be, with the last layer's output, the target and the batch."""
    if takes_batch(loss):
        return lambda output, target, batch: loss(output, target, batch=batch)
    return lambda output, target, _: loss(output, target)


def add_to_loss(loss: Tensor) -> None:
    """To be called in a layer's forward: add a scalar to the loss of the micro-batch, as routers of experts do.

    It counts as what the last layer's loss does: a mean over the micro-batches of an iteration is taken of the sum. A
    forward that is repeated, or is not part of training, adds nothing.
    """
    added = _ADDED.get()
    if added is not None:
        added.append(loss)


@contextmanager
def adding_losses() -> Iterator[list[Tensor]]:
    """Run layers in here; what they add to the loss gets into the list."""
    added: list[Tensor] = []
    before = _ADDED.set(added)
    try:
        yield added
    finally:
        _ADDED.reset(before)
