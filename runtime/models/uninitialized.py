"""Build layers to be filled with received or stored state, without initial values.

Parameters have arbitrary values. Buffers are computed as usual, since a state may lack some.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_CURRENT: ContextVar[bool] = ContextVar("unfilled", default=False)


def is_uninitialized() -> bool:
    """Return whether the caller runs within `building_uninitialized`."""
    return _CURRENT.get()


@contextmanager
def building_uninitialized() -> Iterator[None]:
    """Let layers that are built within the context have arbitrary parameters."""
    before = _CURRENT.set(True)
    try:
        with _SkipInPlaceMode():
            yield
    finally:
        _CURRENT.reset(before)


def move_uninitialized(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a layer in place, with arbitrary parameters on a new device; return the layer."""
    for parameter in module.parameters():
        if parameter.device != device:
            # Nothing is copied, as the values do not count.
            parameter.data = torch.empty_like(parameter, device=device)
    return module.to(device)


class _SkipInPlaceMode(TorchFunctionMode):
    """Mode that skips changes of parameters in place, as initialization makes them."""

    # Drawing billions of numbers takes seconds.

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")
        # Functions in place end with an underscore; special methods, and `requires_grad_`, still
        # run.
        if (
            isinstance(target, nn.Parameter)
            and name.endswith("_")
            and not name.endswith(("__", "requires_grad_"))
        ):
            return target
        return func(*args, **kwargs)
