"""Step parameters by a rule of their layer, from values that the layer counts.

Such a parameter is state like any other. Its "gradient" need not be a derivative: it can be the
tokens that each expert was given (`leave_gradient`). The gradient is summed over all micro-batches
and workers, and the parameter's steps can be undone, and are moved and saved with the layer. The
parameter is never sharded, its gradient never scaled or counted in the norm of gradients.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.runtime.config import ConfigError

StepRule = Callable[[Tensor, Tensor], None]
"""Function that changes a parameter in place by the sum of its gradients alone, in its dtype."""


def step_rules(module: nn.Module) -> Mapping[str, StepRule]:
    """Return a layer's attribute `step_rules`, rules by parameter; empty if there is none."""
    rules: Mapping[str, StepRule] = getattr(module, "step_rules", {})
    return rules


def require_stepped_by_rules(layer: int, rules: Mapping[str, StepRule], trained: Mapping[str, bool]) -> None:
    """Raise ConfigError unless a layer's step rules belong to trained parameters of its own.

    `trained` maps the names of the layer's trained parameters to whether other layers share them.
    """
    for name in rules:
        if trained.get(name) is not False:
            what = "which other layers share" if name in trained else "which is no trained parameter of it"
            raise ConfigError(f"step_rules of layer {layer} of the model name {name!r}, {what}; expected a trained "
                              "parameter of its own")


def leave_gradient(value: Tensor, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return `value`, and let each backward through it add `gradient` to the parameter's.

    There is one for each micro-batch. The gradient is added as it is: the weight of the
    micro-batch's loss does not scale it.
    """
    passed: Tensor = _LeaveGradient.apply(value, parameter, gradient.detach())  # type: ignore[no-untyped-call]
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
