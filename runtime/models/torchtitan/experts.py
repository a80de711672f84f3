"""Use torchtitan's mixtures of experts as layers of this runtime.

torchtitan counts the tokens of each expert in the forward. Before a step it changes the bias by
which tokens choose experts: up for experts with few tokens. Here the bias is a parameter, the token
counts are its gradient, and a rule steps it (`runtime.models.step_rules`). So tokens are counted
once, although a forward may be discarded or run again. The counts are summed over all workers; the
bias is moved and saved with the layer, and its steps can be undone. As in torchtitan, products are
in bfloat16 for any dtype of the parameters. W computes the gradients of the weights of plain
`GroupedExperts`.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchtitan.models.common.moe import GroupedExperts, MoE

from slipstream.runtime.models.grouped_products import ExpertGroups, grouped_linear
from slipstream.runtime.models.step_rules import StepRule, leave_gradient

_BIAS = "expert_bias_E"
_TOKENS = "tokens_per_expert_E"


def count_tokens_in_backward(layer: nn.Module) -> dict[str, StepRule]:
    """Make a layer's mixtures of experts count tokens; return rules of their biases, by name.

    The layer, on the meta device, is changed in place. Where the load is balanced, the backward
    then adds the tokens of each expert to the gradient of the bias. It leaves the gradients of the
    weights of plain `GroupedExperts` to W.
    """
    rules: dict[str, StepRule] = {}
    for name, module in list(layer.named_modules()):
        if type(module) is GroupedExperts:
            module.__class__ = _Experts
        if isinstance(module, MoE) and module.load_balance_coeff is not None:
            # torchtitan's buffer becomes a parameter of the same name.
            bias = module._buffers.pop(_BIAS)
            assert bias is not None
            setattr(module, _BIAS, nn.Parameter(torch.zeros_like(bias)))
            kind: Any = type(module)
            module.__class__ = _counting_class(kind)
            rules[f"{name}.{_BIAS}"] = partial(_move_bias, module.load_balance_coeff)
    return rules


@cache
def _counting_class(kind: Any) -> Any:
    return type(kind.__name__, (_CountingMixin, kind), {})


class _CountingMixin(nn.Module):
    """Mixin for `MoE` whose backward adds each expert's token count to the bias's gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the mixture to features [B, L, D]; in training, the backward adds tokens up."""
        bias: nn.Parameter = getattr(self, _BIAS)
        # torchtitan adds to this tensor in the forward, before any backward reads it.
        tokens = torch.zeros_like(bias, requires_grad=False)
        setattr(self, _TOKENS, tokens)
        output: Tensor = super().forward(x)
        return leave_gradient(output, bias, tokens) if self.training else output

    def _init_self_parameters(self) -> None:
        nn.init.zeros_(getattr(self, _BIAS))

    def _init_self_buffers(self, **_: Any) -> None:
        setattr(self, _TOKENS, torch.zeros_like(getattr(self, _BIAS), requires_grad=False))


def _move_bias(coefficient: float, bias: Tensor, tokens: Tensor) -> None:
    """Change the experts' `bias` in place: up for experts with few tokens, else down."""
    # `tokens` has the number of each expert, and `coefficient` the size of the change before its
    # mean over experts is subtracted.
    change = coefficient * torch.sign(tokens.mean() - tokens)
    bias.add_(change - change.mean())


class _Experts(GroupedExperts):  # type: ignore[misc]
    """torchtitan's experts as grouped products whose weight gradients are computed in W."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Apply to rows [R, D] of features, sorted by expert, their experts' MLPs."""
        groups = ExpertGroups(num_tokens_per_expert_E.cumsum(0).int(), None, len(x_RD))
        # Cast twice, as in torchtitan, so that the two gradients are not summed in bfloat16.
        gate = functional.silu(grouped_linear(x_RD.bfloat16(), self.w1_EFD, groups))
        up = grouped_linear(x_RD.bfloat16(), self.w3_EFD, groups)
        return grouped_linear(gate * up, self.w2_EDF, groups).type_as(x_RD)
