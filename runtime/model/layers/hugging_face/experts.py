"""Experts as grouped products: tokens are sorted by expert, so that no shape depends on how they are routed.

A rank of a worker may have some of the experts (`runtime.model.layers.hugging_face.parallel`). Tokens that have chosen
others are sorted behind its own, as there may be any number of them, and add nothing.

transformers runs it for `experts_implementation = "slipstream"`, which is what a model has unless it names another.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

from slipstream.runtime.model.layers.grouped_products import Groups, grouped_linear

NAME = "slipstream"


def run_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Features [N, C] through the experts [N, k] that each token has chosen, weighted [N, k]: [N, C].

    Where the module has some of the experts, from `first_expert` on, it is what these add.
    """
    experts: Any = self
    (tokens, choices), every, here = top_k_index.shape, experts.num_experts, experts.gate_up_proj.shape[0]
    own_first = (top_k_index - getattr(experts, "first_expert", 0)) % every
    rows = tokens * min(choices, here)  # the choices of a token differ
    order = own_first.flatten().argsort(stable=True)[:rows]
    ends = functional.one_hot(own_first, every).sum((0, 1))[:here].cumsum(0).int()
    outside = None if here == every else torch.arange(rows, device=ends.device)[:, None] >= ends[-1]
    groups = Groups(ends, outside, tokens * choices * here // every)
    value = hidden_states[order // choices]
    if torch.is_autocast_enabled(value.device.type) and value.dtype == torch.float32:
        value = value.to(torch.get_autocast_dtype(value.device.type))
    gate, up = grouped_linear(value, experts.gate_up_proj, groups).chunk(2, -1)
    given = grouped_linear(experts.act_fn(gate) * up, experts.down_proj, groups)
    weighted = given * top_k_weights.flatten()[order, None]
    allocate = weighted.new_empty if rows == tokens * choices else weighted.new_zeros
    result = allocate((tokens * choices, weighted.shape[1])).index_copy(0, order, weighted)
    return result.view(tokens, choices, -1).sum(1).to(hidden_states.dtype)


def register() -> None:
    """Have transformers know of this."""
    ExpertsInterface.register(NAME, run_experts)
