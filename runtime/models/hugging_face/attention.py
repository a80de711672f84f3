"""Attention of transformers' models within documents (`runtime.models.documents`), under a name of its own.

If data give the positions of packed documents, transformers builds a mask from them, which leaves attention as slow as
without documents. Padding and sliding windows need masks; for these, transformers' scaled_dot_product_attention is
used.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from slipstream.runtime.models.documents import attend_by_document

ATTENTION_NAME = "slipstream_by_document"
"""Name of this module's attention in transformers, as `attn_implementation`."""


def register_attention() -> None:
    """Register this module's attention with transformers under `ATTENTION_NAME`."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def needs_no_document_mask(config: PreTrainedConfig, slides: bool) -> bool:
    """Return whether a layer attends to each document separately and so needs no mask for documents.

    `slides` tells whether its attention has a sliding window, which needs masks.
    """
    return config._attn_implementation == ATTENTION_NAME and not slides


def _attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
            position_ids: Tensor | None = None, **more: Any) -> tuple[Tensor, None]:
    """Return the attention of queries, keys and values [B, heads, T, K] as [B, T, heads, K], and None for its weights.

    transformers calls this function and expects this form.
    """
    if attention_mask is not None or position_ids is None:
        output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **more)[0]
        return output, None
    return attend_by_document(partial(_run_sdpa, module, **more), position_ids, query, key, value).transpose(1, 2), None


def _run_sdpa(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
    """Compute transformers' causal attention without a mask, and return [B, heads, T, K]."""
    output: Tensor = sdpa_attention_forward(module, query, key, value, None, **more)[0]
    return output.transpose(1, 2)
