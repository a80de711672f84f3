"""Step parameters by a rule of their layer, from values that the layer counts.

Such a parameter is state like any other: it is moved and saved with the layer, and its steps can be
undone. Its "gradient" need not be a derivative: it can be the tokens that each expert was given
(`leave_gradient`). This gradient is summed over all micro-batches and workers, but neither scaled
nor counted in the norm of gradients. The parameter is never sharded.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.runtime.config import ConfigError

StepRule = Callable[[Tensor, Tensor], None]
"""Function that steps a parameter in place, given it and the sum of its gradients."""


def step_rules(module: nn.Module) -> Mapping[str, StepRule]:
    """Return a layer's attribute `step_rules`: rules by parameter's name; empty without it."""
    rules: Mapping[str, StepRule] = getattr(module, "step_rules", {})
    return rules


def require_stepped_by_rules(
    layer: int, rules: Mapping[str, StepRule], trained: Mapping[str, bool]
) -> None:
    """Raise ConfigError unless a layer's step rules belong to trained parameters of its own.

    `trained` says of each trained parameter whether other layers share it.
    """
    for name in rules:
        if trained.get(name) is not False:
            what = "which is no trained parameter of it"
            if name in trained:
                what = "which other layers share"
            raise ConfigError(
                f"step_rules of layer {layer} of the model name {name!r}, {what}; expected a "
                "trained parameter of its own"
            )


def leave_gradient(value: Tensor, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return `value`; each backward through it adds `gradient` to the parameter's gradient.

    The weight of a micro-batch's loss does not scale this gradient.
    """
    # The counts are no function of the value, so autograd must not follow them.
    apply: Any = _LeaveGradient.apply
    passed: Tensor = apply(value, parameter, gradient.detach())
    return passed


class _LeaveGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient.to(parameter.dtype))
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, of_value: Tensor) -> tuple[Tensor, Tensor, None]:
        [gradient] = ctx.saved_tensors
        return of_value, gradient, None
