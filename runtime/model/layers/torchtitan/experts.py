"""torchtitan's mixtures of experts, as layers here.

torchtitan counts the tokens of each expert in the forward, and before a step moves the bias, by which tokens choose, up
where there were few. Here the bias is a parameter, the tokens are left as its gradient, and a rule steps it
(`runtime.model.layers.step_rules`): so they are counted once, though a forward may be void or run again, and are summed
over all workers, and the bias is undone, moved and saved with the layer.

Products are torchtitan's, in bfloat16 whatever the dtype of the parameters; gradients of experts' weights come in W.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchtitan.models.common.moe import GroupedExperts, MoE

from slipstream.runtime.model.layers.grouped_products import Groups, grouped_linear
from slipstream.runtime.model.layers.step_rules import StepRule, leave_gradient

_BIAS, _TOKENS = "expert_bias_E", "tokens_per_expert_E"


def with_counted_tokens(layer: nn.Module) -> dict[str, StepRule]:
    """Change the mixtures of a layer, on the meta device, and return the rules of their biases by name."""
    rules: dict[str, StepRule] = {}
    for name, module in list(layer.named_modules()):
        if type(module) is GroupedExperts:
            module.__class__ = _Experts
        if isinstance(module, MoE) and module.load_balance_coeff is not None:
            bias = module._buffers.pop(_BIAS)
            assert bias is not None
            setattr(module, _BIAS, nn.Parameter(torch.zeros_like(bias)))
            kind: Any = type(module)
            module.__class__ = _counting(kind)
            rules[f"{name}.{_BIAS}"] = partial(_move_bias, module.load_balance_coeff)
    return rules


@cache
def _counting(kind: Any) -> Any:
    return type(kind.__name__, (_Counting, kind), {})


class _Counting(nn.Module):
    """In front of torchtitan's own class, whose counter is anew in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, L, D] to features."""
        bias: nn.Parameter = getattr(self, _BIAS)
        tokens = torch.zeros_like(bias, requires_grad=False)
        setattr(self, _TOKENS, tokens)
        found: Tensor = super().forward(x)
        return leave_gradient(found, bias, tokens) if self.training else found

    def _init_self_parameters(self) -> None:
        nn.init.zeros_(getattr(self, _BIAS))

    def _init_self_buffers(self, **_: Any) -> None:
        setattr(self, _TOKENS, torch.zeros_like(getattr(self, _BIAS), requires_grad=False))


def _move_bias(coefficient: float, bias: Tensor, tokens: Tensor) -> None:
    """Move it as torchtitan's optimizer does."""
    change = coefficient * torch.sign(tokens.mean() - tokens)
    bias.add_(change - change.mean())


class _Experts(GroupedExperts):  # type: ignore[misc]
    """Computes what torchtitan's own do."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Features of tokens that are sorted by expert [R, D] to features."""
        groups = Groups(num_tokens_per_expert_E.cumsum(0).int(), None, len(x_RD))
        # Cast twice, as there, so that the two gradients are not summed in bfloat16.
        hidden = functional.silu(grouped_linear(x_RD.bfloat16(), self.w1_EFD, groups)) * grouped_linear(
            x_RD.bfloat16(), self.w3_EFD, groups)
        return grouped_linear(hidden, self.w2_EDF, groups).type_as(x_RD)
