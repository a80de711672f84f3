"""Muon (Jordan et al., 2024): steps along the gradients' momentum, whose matrices are made orthogonal.

In bfloat16 the result is bit for bit that of `torch.optim.Muon`, which supports neither float32 nor stacks of matrices,
as those of experts. Embeddings, heads and vectors are stepped by AdamW.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.runtime.config import MuonConfig, TrainingConfig
from slipstream.runtime.state.parameter_groups import OptimizerGroups


class Muon(torch.optim.Optimizer):
    """Optimizer that steps the parameter groups with a true value of the key "muon" by Muon, the others by AdamW. Each
    matrix must be whole, not cut into parts."""

    def __init__(self, groups: OptimizerGroups, config: TrainingConfig,
                 adamw: Callable[[OptimizerGroups, TrainingConfig], torch.optim.Optimizer]) -> None:
        self._options, self._maximize = config.muon, config.maximize
        # Both share groups and state, so that code that sets rates or stores state sees a single optimizer.
        self._adamw = adamw([group for group in groups if not group.get("muon")], config)
        super().__init__(groups, {**self._adamw.defaults, "muon": False})
        self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step all parameters that have a gradient; `closure` must be None."""
        assert closure is None
        self._adamw.step()
        for group in self.param_groups:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    self._step_parameter(parameter, group)

    def _step_parameter(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        gradient = -parameter.grad if self._maximize else parameter.grad
        state, momentum = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(average, momentum) if self._options.nesterov else average
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(orthogonalize(update, self._options),
                       alpha=-group["lr"] * _rate_scale(parameter.shape, self._options))


def orthogonalize(matrices: Tensor, options: MuonConfig) -> Tensor:
    """Return, approximately, the matrices with orthonormal rows or columns that are nearest to `matrices` [..., M, N].

    A polynomial of odd powers brings all singular values near 1.
    """
    a, b, c = options.coefficients
    add_product = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.bfloat16 if options.dtype == "bf16" else torch.float32, copy=True)
    x = x.mT if tall else x
    # The norm of each matrix equals that of torch.optim.Muon to the bit, unlike a sum over two dimensions of a stack.
    norms = torch.stack([matrix.norm() for matrix in x.reshape(-1, *x.shape[-2:])]).reshape(*x.shape[:-2], 1, 1)
    x = x / norms.clamp(min=options.epsilon)
    for _ in range(options.steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _rate_scale(shape: torch.Size, options: MuonConfig) -> float:
    """Return the factor by which Muon multiplies the learning rate for matrices of shape [..., M, N]."""
    rows, columns = shape[-2:]
    if options.adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
