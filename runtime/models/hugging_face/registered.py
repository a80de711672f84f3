"""Register attention and experts of this package with transformers.

**Attention** within documents (`runtime.models.documents`). If data give the positions of packed
documents, transformers builds a mask from them, which leaves attention as slow as without
documents. Padding and sliding windows need masks; for these, transformers'
scaled_dot_product_attention is used.

**Experts** as grouped products: tokens are sorted by expert, so that no shape depends on the
routing. A rank of a worker may have some of the experts (`runtime.models.hugging_face.parallel`).
Any number of tokens may choose experts of other ranks; these tokens are sorted behind this rank's,
and add nothing.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from slipstream.runtime.models.documents import attend_by_document
from slipstream.runtime.models.grouped_products import ExpertGroups, grouped_linear

ATTENTION_NAME = "slipstream_by_document"
"""Name of this module's attention in transformers, as `attn_implementation`."""


def register_attention() -> None:
    """Register this module's attention with transformers under `ATTENTION_NAME`."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def needs_no_document_mask(config: PreTrainedConfig, slides: bool) -> bool:
    """Return whether a layer attends to each document separately, without a mask for them.

    Padding needs a mask even so. `slides` is True for attention within a sliding window.
    """
    return config._attn_implementation == ATTENTION_NAME and not slides


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    # The attention is [B, T, heads, K]; transformers expects its weights, too, or None.
    # With a mask, or without documents, transformers' own attention does.
    if attention_mask is not None or position_ids is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **more)
        return output, None
    attend = partial(_run_sdpa, module, **more)
    return attend_by_document(attend, position_ids, query, key, value).transpose(1, 2), None


def _run_sdpa(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **more: Any
) -> Tensor:
    """Compute transformers' causal attention without a mask, and return [B, heads, T, K]."""
    output: Tensor = sdpa_attention_forward(module, query, key, value, None, **more)[0]
    return output.transpose(1, 2)


EXPERTS_NAME = "slipstream"
"""Name of `run_experts` in transformers, as `experts_implementation`."""


def run_experts(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum, [N, C], of the results of each token's experts.

    If the module has only some of the experts, beginning with `first_expert`, only these are
    summed.

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
    tokens, choices = top_k_index.shape
    every, here = experts.num_experts, experts.gate_up_proj.shape[0]

    # Rows are pairs of token and choice, sorted by expert. This rank's experts come first.
    own_first = (top_k_index - getattr(experts, "first_expert", 0)) % every
    rows = tokens * min(choices, here)  # a token chooses an expert at most once
    order = own_first.flatten().argsort(stable=True)[:rows]
    ends = functional.one_hot(own_first, every).sum((0, 1))[:here].cumsum(0).int()
    outside = None if here == every else torch.arange(rows, device=ends.device)[:, None] >= ends[-1]
    groups = ExpertGroups(ends, outside, tokens * choices * here // every)

    # The MLP of each row's expert.
    value = hidden_states[order // choices]
    if torch.is_autocast_enabled(value.device.type) and value.dtype == torch.float32:
        value = value.to(torch.get_autocast_dtype(value.device.type))
    gate, up = grouped_linear(value, experts.gate_up_proj, groups).chunk(2, -1)
    down = grouped_linear(experts.act_fn(gate) * up, experts.down_proj, groups)

    # The weighted sum over each token's choices; those of other ranks' experts add nothing.
    weighted = down * top_k_weights.flatten()[order, None]
    allocate = weighted.new_empty if rows == tokens * choices else weighted.new_zeros
    result = allocate((tokens * choices, weighted.shape[1])).index_copy(0, order, weighted)
    return result.view(tokens, choices, -1).sum(1).to(hidden_states.dtype)


def register_experts() -> None:
    """Register `run_experts` with transformers under `EXPERTS_NAME`."""
    ExpertsInterface.register(EXPERTS_NAME, run_experts)
