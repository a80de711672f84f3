"""Experts as grouped products: tokens are sorted by expert, so that no shape depends on the routing.

A rank of a worker may have some of the experts (`runtime.models.hugging_face.parallel`). Tokens that have chosen
experts of other ranks, of which there may be any number, are sorted behind those of this rank and add nothing.

transformers uses this implementation for `experts_implementation = "slipstream"`, which is the default of models here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

from slipstream.runtime.models.grouped_products import ExpertGroups, grouped_linear

EXPERTS_NAME = "slipstream"
"""Name of `run_experts` in transformers, as `experts_implementation`."""


def run_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum, [N, C], of the results of the experts that each of N tokens has chosen.

    If the module has only some of the experts, beginning with `first_expert`, the result is the share of these.

    Parameters
    ----------
    self
        Module of transformers with the experts' weights.
    hidden_states
        Features of the tokens, [N, C].
    top_k_index, top_k_weights
        Numbers of the k experts of each token, and their weights in the sum, [N, k].
    """
    experts: Any = self
    (tokens, choices), every, here = top_k_index.shape, experts.num_experts, experts.gate_up_proj.shape[0]
    own_first = (top_k_index - getattr(experts, "first_expert", 0)) % every
    rows = tokens * min(choices, here)  # a token chooses an expert at most once
    order = own_first.flatten().argsort(stable=True)[:rows]
    ends = functional.one_hot(own_first, every).sum((0, 1))[:here].cumsum(0).int()
    outside = None if here == every else torch.arange(rows, device=ends.device)[:, None] >= ends[-1]
    groups = ExpertGroups(ends, outside, tokens * choices * here // every)
    value = hidden_states[order // choices]
    if torch.is_autocast_enabled(value.device.type) and value.dtype == torch.float32:
        value = value.to(torch.get_autocast_dtype(value.device.type))
    gate, up = grouped_linear(value, experts.gate_up_proj, groups).chunk(2, -1)
    given = grouped_linear(experts.act_fn(gate) * up, experts.down_proj, groups)
    weighted = given * top_k_weights.flatten()[order, None]
    allocate = weighted.new_empty if rows == tokens * choices else weighted.new_zeros
    result = allocate((tokens * choices, weighted.shape[1])).index_copy(0, order, weighted)
    return result.view(tokens, choices, -1).sum(1).to(hidden_states.dtype)


def register_experts() -> None:
    """Register `run_experts` with transformers under `EXPERTS_NAME`."""
    ExpertsInterface.register(EXPERTS_NAME, run_experts)
