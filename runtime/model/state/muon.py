"""Muon (Jordan et al., 2024): steps along gradients' momentum whose matrices have been made orthogonal.

In bfloat16 it ends in the bits of `torch.optim.Muon`, which has neither float32 nor stacks of matrices, as those of
experts. Embeddings, heads and vectors are stepped by AdamW.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.runtime.config import MuonConfig, TrainingConfig
from slipstream.runtime.model.state.parameter_groups import Groups


class Muon(torch.optim.Optimizer):
    """Steps the groups that are marked with "muon", and the others by AdamW. Each matrix must be whole."""

    def __init__(self, groups: Groups, config: TrainingConfig,
                 adamw: Callable[[Groups, TrainingConfig], torch.optim.Optimizer]) -> None:
        self._options, self._maximize = config.muon, config.maximize
        # Both have the same groups and the same state: whoever sets a rate, or keeps state, sees one optimizer.
        self._adamw = adamw([group for group in groups if not group.get("muon")], config)
        super().__init__(groups, {**self._adamw.defaults, "muon": False})
        self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step all that has a gradient."""
        assert closure is None
        self._adamw.step()
        for group in self.param_groups:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        gradient = -parameter.grad if self._maximize else parameter.grad
        state, momentum = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(average, momentum) if self._options.nesterov else average
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(made_orthogonal(update, self._options),
                       alpha=-group["lr"] * _scale(parameter.shape, self._options))


def made_orthogonal(matrices: Tensor, options: MuonConfig) -> Tensor:
    """About the nearest matrix with orthonormal rows or columns [..., M, N], by a polynomial of odd powers that brings
    all singular values near 1."""
    a, b, c = options.coefficients
    add_product = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.bfloat16 if options.dtype == "bf16" else torch.float32, copy=True)
    x = x.mT if tall else x
    # A matrix has the norm of torch.optim.Muon, to the bit, which the sum over two dimensions of a stack has not.
    norms = torch.stack([one.norm() for one in x.reshape(-1, *x.shape[-2:])]).reshape(*x.shape[:-2], 1, 1)
    x = x / norms.clamp(min=options.epsilon)
    for _ in range(options.steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _scale(shape: torch.Size, options: MuonConfig) -> float:
    """What the shape of matrices [..., M, N] scales their learning rate by."""
    rows, columns = shape[-2:]
    if options.adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
