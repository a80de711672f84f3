"""Layers that are about to be filled with somebody's state: nothing is drawn for them, and nothing is read.

Their parameters hold anything. Buffers, of which a state may lack some, are computed as ever.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_CURRENT: ContextVar[bool] = ContextVar("unfilled", default=False)


def is_unfilled() -> bool:
    """Whether a model that builds a layer may leave its parameters as they happen to be."""
    return _CURRENT.get()


@contextmanager
def unfilled() -> Iterator[None]:
    """Build a layer in here, and no call changes its parameters in place."""
    before = _CURRENT.set(True)
    try:
        with _Unchanged():
            yield
    finally:
        _CURRENT.reset(before)


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """A layer that is not filled, on a device: nothing of its parameters is copied there."""
    for parameter in module.parameters():
        if parameter.device != device:
            parameter.data = torch.empty_like(parameter, device=device)
    return module.to(device)


class _Unchanged(TorchFunctionMode):
    """Calls that would change a parameter in place do nothing: to draw billions of numbers takes seconds."""

    def __torch_function__(self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")
        if isinstance(target, nn.Parameter) and name.endswith("_") and not name.endswith(("__", "requires_grad_")):
            return target
        return func(*args, **kwargs)
